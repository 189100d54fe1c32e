"""Gathering, scattering, one-hot codes, masks, keys."""

import numpy as np

from caffe2_cases import case, f32, flags, i32, i64, normal

X, CUBE = normal(4, 3), normal(2, 3, 4)
OUTER = i32(1, 0, 0, 2).reshape(2, 2)
HALF = np.array(0.5, "f4")
ONE = np.array([b"x", b"yz"])
CASES = [
    case("Gather", {"x": X, "i": i32(2, 0, 2)}, ["out"], gradient=True),
    case("Gather", {"x": X, "i": i64(2, 0).reshape(1, 2)}, ["out"]),
    case("Gather", {"x": X, "i": i32(2, 0, 2)}, ["out"], gradient=True, dense_gradient=1),
    case("Gather", {"x": X, "i": i32(-1, 0)}, ["out"]),
    case("Gather", {"x": X, "i": i32(2, 0)}, ["out"], gradient=True, axis=1),
    case("Gather", {"x": CUBE, "i": OUTER}, ["out"], axis=1, match_outer=1),
    case("Gather", {"x": i64(4, 5), "i": i32(1)}, ["out"]),
    case("Gather", {"x": ONE, "i": i32(1, 1)}, ["out"]),
    case("Gather", {"x": normal(0, 3), "i": i32(5, 7)}, ["out"]),
    case("BatchGather", {"x": CUBE, "i": i32(2, 0, 2)}, ["out"], gradient=True),
    case("BatchGather", {"x": CUBE, "i": OUTER}, ["out"], gradient=True, match_outer=1),
    case("BatchGather", {"x": CUBE, "i": OUTER}, ["out"], gradient=True),
    case("SparseToDense", {"i": i32(2, 0, 2), "x": normal(3, 2)}, ["out"], gradient=True),
    case(
        "SparseToDense",
        {"i": i64(2, 0, 2), "x": normal(3), "like": normal(5, 2)},
        ["out"],
        gradient=True,
    ),
    case("SparseToDense", {"i": i32(1, 1), "x": i64(3, 4)}, ["out"]),
    case("ScatterAssign", {"x": X, "i": i32(2, 0), "s": normal(2, 3)}, ["x"]),
    case("ScatterAssign", {"x": i32(1, 2, 3), "i": i64(1), "s": i32(9)}, ["x"]),
    case(
        "ScatterWeightedSum",
        {"x": X, "v": f32(2), "i": i32(2, 2), "s": normal(2, 3), "w": f32(3)},
        ["x"],
    ),
    case(
        "ScatterWeightedSum",
        {
            "x": X,
            "v": f32(1),
            "i": i64(2, 0),
            "s": normal(2, 3),
            "w": f32(3),
            "t": normal(2, 3, seed=1),
            "u": f32(-1),
        },
        ["x"],
    ),
    case(
        "Scatter",
        {"x": X, "i": i32(2, 0, 1, 1).reshape(2, 2), "s": f32(5, 6, 7, 7).reshape(2, 2)},
        ["out"],
    ),
    case(
        "Scatter",
        {"x": X, "i": i32(2, 0).reshape(1, 2), "s": f32(5, 6).reshape(1, 2)},
        ["out"],
        axis=0,
    ),
    case(
        "Scatter",
        {"x": normal(3, 2, 3), "i": i32(2, 0, 1, 1).reshape(1, 2, 2), "s": normal(1, 2, 2)},
        ["out"],
        axis=0,
    ),
    case("OneHot", {"i": i64(1, 0, 2), "n": np.array(3, np.int64)}, ["out"]),
    case("OneHot", {"i": i64(1), "n": i64(4)}, ["out"]),
    case(
        "BatchOneHot",
        {"x": i32(1, 5, 2, 5, 1, 6).reshape(3, 2), "n": i32(2, 3), "v": i32(1, 2, 5, 6, 7)},
        ["out"],
    ),
    case("BatchOneHot", {"x": i64(1, 5).reshape(1, 2), "n": i32(2, 1), "v": i64(1, 2, 5)}, ["out"]),
    case("SegmentOneHot", {"n": i32(2, 1, 0), "i": i64(1, 0, 3), "k": i64(4)}, ["out"]),
    case("BooleanMask", {"x": X, "m": flags(1, 0, 1, 0)}, ["out", "rows"]),
    case("BooleanMask", {"x": normal(3), "m": flags(0, 1, 1)}, ["out"], gradient=True),
    case("BooleanMask", {"x": X, "m": flags(0, 0, 0, 0)}, ["out", "rows"]),
    case("BooleanMask", {"x": ONE, "m": flags(0, 1)}, ["out"]),
    case(
        "BooleanUnmask",
        {"m": flags(1, 0, 1), "x": f32(5, 6), "n": flags(0, 1, 0), "y": f32(7)},
        ["out"],
    ),
    case("Unique", {"x": i32(3, 1, 3, 2)}, ["out", "places"]),
    case("Unique", {"x": i64(3, 1, 3)}, ["out"]),
    case("Unique", {"x": np.zeros(0, np.int64)}, ["out", "places"]),
    case(
        "SparseToDenseMask",
        {"i": i32(2, 4, 9), "x": normal(3), "d": HALF},
        ["out"],
        gradient=True,
        mask=[4, 2, 5],
    ),
    case(
        "SparseToDenseMask",
        {"i": i64(2, 4, 9, 4), "x": normal(4, 2), "d": f32(7, 8), "n": i32(3, 1)},
        ["out", "there"],
        gradient=["out"],
        mask=[4, 2],
        return_presence_mask=1,
    ),
    case(
        "SparseToDenseMask",
        {"i": i32(2, 2), "x": normal(2), "d": HALF},
        ["out"],
        gradient=True,
        mask=[2],
    ),
]
