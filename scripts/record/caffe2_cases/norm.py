"""Softmax, LayerNorm and Dropout."""

import numpy as np

from caffe2_cases import case, f32, flags, normal

X = normal(2, 2, 3)
CASES = [
    case("Softmax", {"x": normal(2, 3)}, ["y"], gradient=True),
    case("Softmax", {"x": X}, ["y"], gradient=True),
    case("Softmax", {"x": X}, ["y"], gradient=True, axis=2),
    case("Softmax", {"x": X}, ["y"], gradient=True, axis=-1),
    case("Softmax", {"x": normal(3)}, ["y"], gradient=True, axis=0),
    case("Softmax", {"x": np.zeros((0, 3), np.float32)}, ["y"]),
    case("Softmax", {"x": f32(100, -100, 0, -np.inf).reshape(1, 4)}, ["y"]),
    case("LayerNorm", {"x": normal(2, 3)}, ["y", "mean", "std"], gradient=True),
    case("LayerNorm", {"x": X}, ["y", "mean", "std"], gradient=True, axis=2, epsilon=0.1),
    case("LayerNorm", {"x": X}, ["y", "mean", "std"], gradient=True, axis=0),
    case(
        "LayerNorm",
        {"x": X, "gamma": normal(6), "beta": normal(6, seed=1)},
        ["y", "mean", "std"],
        gradient=True,
        elementwise_affine=1,
    ),
    case(
        "LayerNorm",
        {"x": normal(2, 3), "gamma": normal(3), "beta": normal(3)},
        ["y", "mean", "std"],
        axis=-1,
    ),
    case("Dropout", {"x": normal(2, 3)}, ["y", "mask"], is_test=0),
    case("Dropout", {"x": normal(2, 3)}, ["y", "mask"], gradient=True, is_test=0, ratio=0.3),
    case("Dropout", {"x": normal(2, 3)}, ["y"], gradient=True, is_test=1),
    case("DropoutGrad", {"dy": f32(1, 2, 3), "mask": flags(1, 0, 1)}, ["dx"], is_test=0, ratio=0.5),
    case("DropoutGrad", {"dy": f32(1, 2, 3)}, ["dx"], is_test=1),
]
