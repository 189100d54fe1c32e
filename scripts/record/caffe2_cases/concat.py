"""Concat and Split."""

import numpy as np

from caffe2_cases import case, i32, i64, normal

CASES = [
    case("Concat", {"a": normal(2, 3), "b": normal(2, 1)}, ["y", "sizes"], gradient=True),
    case(
        "Concat",
        {"a": normal(2, 3), "b": normal(1, 3), "c": normal(0, 3)},
        ["y", "sizes"],
        gradient=True,
        axis=0,
    ),
    case(
        "Concat",
        {"a": normal(2, 3), "b": normal(2, 3, seed=1)},
        ["y", "sizes"],
        gradient=True,
        axis=1,
        add_axis=1,
    ),
    case(
        "Concat",
        {"a": normal(2, 3), "b": normal(2, 3, seed=1)},
        ["y", "sizes"],
        axis=-1,
        add_axis=1,
    ),
    case(
        "Concat",
        {"a": normal(2, 2, 3), "b": normal(2, 2, 1)},
        ["y", "sizes"],
        gradient=True,
        axis=-1,
    ),
    case(
        "Concat", {"a": normal(1, 2, 2, 3), "b": normal(1, 2, 2, 1)}, ["y", "sizes"], order="NHWC"
    ),
    case("Concat", {"a": i64(1, 2), "b": i64(3)}, ["y", "sizes"], axis=0),
    case("Concat", {"a": normal(2, 2)}, ["y", "sizes"], reads=["a", "a"], gradient=True),
    case("Split", {"x": normal(2, 4)}, ["a", "b"], gradient=["a", "b"]),
    case("Split", {"x": normal(5, 2)}, ["a", "b"], gradient=["a", "b"], axis=0, split=[2, 3]),
    case(
        "Split",
        {"x": normal(2, 5), "sizes": i32(1, 0, 4)},
        ["a", "b", "c"],
        gradient=["a", "b", "c"],
        axis=-1,
    ),
    case(
        "Split", {"x": normal(3, 2)}, ["a", "b", "c"], gradient=["a", "b", "c"], axis=0, add_axis=1
    ),
    case("Split", {"x": normal(1, 1, 1, 4)}, ["a", "b"], order="NHWC"),
    case("Split", {"x": np.arange(6, dtype=np.int32).reshape(2, 3)}, ["a", "b", "c"]),
]
