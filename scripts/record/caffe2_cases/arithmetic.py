"""Sum, Add, Sub, Mul and Div, with both ways of broadcasting."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, integers, normal, positive

CASES = [
    case(
        "Sum",
        {"a": normal(2, 3), "b": normal(2, 3, seed=1), "c": normal(2, 3, seed=2)},
        ["y"],
        gradient=True,
    ),
    case("Sum", {"a": normal(4)}, ["y"], gradient=True),
    case("Sum", {"a": i64(1, 2), "b": i64(3, 4)}, ["y"]),
    case("Sum", {"a": normal(2, 3), "b": normal(2, 3, seed=1)}, ["a"]),
    case("Sum", {"a": np.zeros((0, 3), np.float32), "b": np.zeros((0, 3), np.float32)}, ["y"]),
    case("Mul", {"x": normal(2, 3)}, ["y"], gradient=True, reads=["x", "x"]),
    case("Div", {"a": i32(-7, 7, 9), "b": i32(2, -2, 3)}, ["y"]),
    case(
        "DivGradient",
        {"b": positive(3), "y": normal(3), "y_grad": normal(3, seed=1)},
        ["a_grad", "b_grad"],
    ),
]
for type in ("Add", "Sub", "Mul", "Div"):
    CASES += [
        case(type, {"a": normal(2, 3), "b": positive(2, 3)}, ["y"], gradient=True),
        case(type, {"a": normal(2, 1, 3), "b": positive(4, 1)}, ["y"], gradient=True),
        case(type, {"a": normal(3), "b": positive(2, 1, 3)}, ["y"], gradient=True),
        case(type, {"a": normal(2, 3, 4), "b": positive(4)}, ["y"], gradient=True, broadcast=1),
        case(
            type,
            {"a": normal(2, 3, 4), "b": positive(3)},
            ["y"],
            gradient=True,
            broadcast=1,
            axis=1,
        ),
        case(
            type,
            {"a": normal(2, 3, 4), "b": positive(2, 1)},
            ["y"],
            gradient=True,
            broadcast=1,
            axis=0,
        ),
        case(type, {"a": normal(2, 3), "b": positive(1)}, ["y"], gradient=True, broadcast=1),
        case(
            type,
            {"a": normal(1, 3, 2, 2), "b": positive(3)},
            ["y"],
            broadcast=1,
            axis_str="C",
            order="NCHW",
        ),
        case(type, {"a": np.zeros((0, 3), np.float32), "b": f32(1, 2, 3)}, ["y"], broadcast=1),
        case(type, {"a": integers(-9, 9, 2, 3), "b": integers(1, 5, 2, 3, seed=1)}, ["y"]),
        case(type, {"a": integers(-9, 9, 2, 3, dtype=np.int64), "b": i64(1, 2, 3)}, ["y"]),
    ]
