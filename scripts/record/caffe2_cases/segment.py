"""Reductions into segments, and embedding bags."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

X = normal(4, 2)
NONE = normal(0, 2)
EMPTY = np.zeros(0, np.int32)
CASES = []
for family, ids in (("Unsorted", i32(2, 0, 2, 0)), ("Sorted", i32(0, 0, 1, 2))):
    for kind in ("Sum", "Mean"):
        type = family + "Segment" + kind
        CASES += [
            case(type, {"x": X, "s": ids}, ["out"], gradient=True),
            case(type, {"x": normal(4), "s": ids}, ["out"], gradient=True),
            case(type, {"x": NONE, "s": EMPTY}, ["out"]),
            case("Sparse" + type, {"x": X, "i": i32(3, 0, 3, 1), "s": ids}, ["out"], gradient=True),
        ]
    type = family + "SegmentWeightedSum"
    CASES += [
        case(type, {"x": X, "w": normal(4), "s": ids}, ["out"], gradient=True),
        case(
            "Sparse" + type,
            {"x": X, "w": normal(4), "i": i64(3, 0, 3, 1), "s": ids},
            ["out"],
            gradient=True,
        ),
    ]
CASES += [
    case(
        "UnsortedSegmentSum", {"x": X, "s": i32(2, 0, 2, 0)}, ["out"], gradient=True, num_segments=4
    ),
    case(
        "UnsortedSegmentMean",
        {"x": X, "s": i32(2, 0, 2, 0)},
        ["out"],
        gradient=True,
        num_segments=4,
    ),
]
for kind in ("Sum", "Mean", "Max", "LogSumExp", "LogMeanExp"):
    type = "SortedSegmentRange" + kind
    CASES += [
        case(type, {"x": X, "s": i32(0, 0, 1, 2)}, ["out"], gradient=True),
        case(
            type, {"x": f32(3, 3, 1, 5).reshape(4, 1), "s": i32(0, 0, 0, 1)}, ["out"], gradient=True
        ),
    ]
BAG = {"i": i64(0, 3, 1), "n": i32(2, 0, 1)}
for kind in ("Sum", "Mean"):
    type = "SparseLengths" + kind
    CASES += [
        case(type, {"x": X, **BAG}, ["out"], gradient=True),
        case(type, {"x": normal(4), "i": i32(0, 3, 1), "n": i32(1, 2)}, ["out"], gradient=True),
        case(type, {"x": X.astype("f2"), **BAG}, ["out"]),
        case(type, {"x": X, "i": EMPTY, "n": i32(0, 0)}, ["out"]),
        case(type + "Gradient", {"g": normal(2, 2), "n": i32(2, 1)}, ["out"]),
    ]
CASES += [
    case("SparseLengthsWeightedSum", {"x": X, "w": normal(3), **BAG}, ["out"], gradient=True),
    case(
        "SparseLengthsWeightedSum",
        {"x": X, "w": normal(3), **BAG},
        ["out"],
        gradient=True,
        grad_on_weights=1,
    ),
    case(
        "SparseLengthsWeightedSumGradient",
        {"w": normal(3), "g": normal(2, 2), "n": i32(2, 1)},
        ["out"],
    ),
]
