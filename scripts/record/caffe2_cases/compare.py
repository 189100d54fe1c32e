"""Comparisons and logic."""

import numpy as np

from caffe2_cases import case, f32, flags, i32, i64

CASES = [case("Not", {"x": flags(True, False)}, ["y"])]
for type in ("EQ", "NE", "LT", "LE", "GT", "GE"):
    CASES += [
        case(type, {"a": f32(1, 2, 3, np.nan), "b": f32(2, 2, 2, np.nan)}, ["y"]),
        case(type, {"a": i32(1, 2, 3, 1, 2, 3).reshape(2, 3), "b": i32(1, 3, 2)}, ["y"]),
        case(
            type,
            {"a": i64(1, 2, 3, 1, 2, 3).reshape(3, 2), "b": i64(1, 3, 2)},
            ["y"],
            broadcast=1,
            axis=0,
        ),
        case(type, {"a": flags(True, False), "b": flags(True, True)}, ["y"]),
    ]
for type in ("And", "Or"):
    CASES += [
        case(
            type,
            {"a": flags(True, True, False, False), "b": flags(True, False, True, False)},
            ["y"],
        ),
        case(
            type,
            {"a": flags(True, True, False, False).reshape(2, 2), "b": flags(True, False)},
            ["y"],
            broadcast=1,
        ),
    ]
