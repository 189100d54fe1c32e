"""Reductions over axes and over all elements."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

TIED = f32(3, 3, 0, 3, -3, 0).reshape(2, 3)
CASES = []
for type in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"):
    CASES += [
        case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True),
        case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True, axes=[0, 2]),
        case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True, axes=[1], keepdims=0),
        case(type, {"x": normal(2, 3)}, ["out"], gradient=True, axes=[-1]),
        case(type, {"x": TIED}, ["out"], gradient=True, axes=[1]),
        case(type, {"x": np.zeros((2, 0), np.float32)}, ["out"], axes=[1]),
    ]
for type in ("ReduceSum", "ReduceMax", "ReduceMin"):
    CASES += [
        case(type, {"x": i32(3, 1, 2)}, ["out"], keepdims=0),
        case(type, {"x": i64(3, 1, 2)}, ["out"]),
    ]
CASES += [
    case(
        "ReduceL2Gradient",
        {"g": f32(2, 3), "x": f32(0, 0, 3, -4).reshape(2, 2), "y": f32(0, 5)},
        ["out"],
        axes=[1],
        keepdims=0,
    ),
    case("SumElements", {"x": normal(2, 3)}, ["out"], gradient=True),
    case("SumElements", {"x": normal(2, 3)}, ["out"], gradient=True, average=1),
    case("SumElements", {"x": np.zeros(0, np.float32)}, ["out"], average=1),
    case("SumElementsInt", {"x": i32(3, -1)}, ["out"]),
    case("SumSqrElements", {"x": normal(2, 3)}, ["out"]),
    case("SumSqrElements", {"x": normal(2, 3)}, ["out"], average=1),
]
for type in ("ArgMax", "ArgMin"):
    CASES += [
        case(type, {"x": TIED}, ["out"]),
        case(type, {"x": TIED}, ["out"], axis=0, keepdims=0),
        case(type, {"x": i64(2, 5, 5, 2)}, ["out"]),
        case(type, {"x": f32(1, np.nan, 2)}, ["out"]),
        case(type, {"x": f32(np.nan, 1, 2)}, ["out"]),
    ]
