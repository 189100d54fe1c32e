"""AddPadding, RemovePadding, GatherPadding and PadEmptySamples."""

import numpy as np

from caffe2_cases import case, i32, i64, normal

ROWS = normal(3, 2)
LONG = normal(9, 2)
N = i32(1, 2)
CASES = [
    case("AddPadding", {"x": ROWS}, ["y"], gradient=True),
    case("AddPadding", {"x": ROWS}, ["y", "m"]),
    case("AddPadding", {"x": ROWS, "n": N}, ["y", "m"], gradient=True, padding_width=2),
    case(
        "AddPadding",
        {"x": ROWS, "n": N},
        ["y", "m"],
        gradient=True,
        padding_width=1,
        end_padding_width=0,
    ),
    case("AddPadding", {"x": ROWS, "n": N, "p": normal(2)}, ["y", "m"], gradient=True),
    case(
        "AddPadding",
        {"x": ROWS, "n": i32(0, 3), "p": normal(2), "q": normal(2, seed=1)},
        ["y", "m"],
        gradient=True,
    ),
    case(
        "AddPadding", {"x": i64(1, 2, 3), "n": N}, ["y", "m"], padding_width=0, end_padding_width=1
    ),
    case("RemovePadding", {"x": LONG}, ["y"], gradient=True),
    case("RemovePadding", {"x": LONG, "n": i32(4, 5)}, ["y", "m"], gradient=True, padding_width=2),
    case(
        "RemovePadding",
        {"x": LONG, "n": i32(1, 8)},
        ["y", "m"],
        gradient=True,
        padding_width=1,
        end_padding_width=0,
    ),
    case(
        "GatherPadding",
        {"x": LONG, "n": i32(4, 5)},
        ["y", "z"],
        padding_width=1,
        end_padding_width=2,
    ),
    case("GatherPadding", {"x": LONG, "n": i32(4, 5)}, ["y"]),
    case("PadEmptySamples", {"n": i32(2, 0, 1), "x": ROWS, "z": i64(1, 2, 3)}, ["m", "y", "w"]),
    case("PadEmptySamples", {"n": i32(0, 1), "x": np.array([b"ab"])}, ["m", "y"]),
    case("PadEmptySamples", {"n": i32(0, 0), "x": normal(0, 2)}, ["m", "y"]),
]
