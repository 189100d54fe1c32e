"""Norms and moments."""

import numpy as np

from caffe2_cases import case, f32, normal

CASES = []
for p in (1, 2):
    for average in (0, 1):
        CASES += [case("LpNorm", {"x": normal(2, 3)}, ["out"], gradient=True, p=p, average=average)]
    CASES += [case("LpNormGradient", {"x": f32(1, 0, 1e-13, -2), "g": f32(3)}, ["out"], p=p)]
CASES += [
    case("LpNorm", {"x": normal(3)}, ["out"]),
    case("Normalize", {"x": normal(2, 3)}, ["out"], gradient=True),
    case("Normalize", {"x": normal(2, 3, 2)}, ["out"], gradient=True, axis=1),
    case("Normalize", {"x": f32(0, 0, 3, -4).reshape(2, 2)}, ["out"]),
    case("NormalizeGradient", {"x": f32(0, 0, 3, -4).reshape(2, 2), "g": normal(2, 2)}, ["out"]),
    case("NormalizeL1", {"x": normal(2, 3)}, ["out"]),
    case("NormalizeL1", {"x": normal(2, 3)}, ["out"], axis=0),
    case("Moments", {"x": normal(2, 3)}, ["mean", "variance"], gradient=["mean", "variance"]),
    case(
        "Moments",
        {"x": normal(2, 3, 2)},
        ["mean", "variance"],
        gradient=["mean", "variance"],
        axes=[0, 2],
    ),
    case(
        "Moments",
        {"x": normal(2, 3)},
        ["mean", "variance"],
        gradient=["mean", "variance"],
        axes=[1],
        keepdims=0,
    ),
    case("Moments", {"x": np.zeros((0, 2), np.float32)}, ["mean", "variance"], axes=[0]),
]
