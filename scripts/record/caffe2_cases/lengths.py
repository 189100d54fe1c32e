"""Operators on segments."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

ROWS = normal(5, 2)
TIED = f32(3, 3, 1, -2, -2).reshape(5, 1)
CASES = []
for type in ("LengthsSum", "LengthsMean", "LengthsMax"):
    CASES += [
        case(type, {"x": ROWS, "n": i32(2, 0, 3)}, ["y"], gradient=True),
        case(type, {"x": TIED, "n": i32(3, 2, 0)}, ["y"], gradient=True),
        case(type, {"x": normal(5, 2, 2), "n": i32(1, 4)}, ["y"], gradient=True),
        case(type, {"x": normal(4), "n": i32(1, 3)}, ["y"], gradient=True),
        case(type, {"x": normal(0, 2), "n": i32(0, 0)}, ["y"]),
    ]
CASES += [
    case("LengthsSumGradient", {"y_grad": normal(2, 2), "n": i32(2, 1)}, ["x_grad"]),
    case("LengthsMeanGradient", {"y_grad": normal(2, 2), "n": i32(2, 0)}, ["x_grad"]),
    case(
        "LengthsWeightedSum", {"x": ROWS, "w": normal(5), "n": i32(2, 0, 3)}, ["y"], gradient=True
    ),
    case(
        "LengthsWeightedSum",
        {"x": ROWS, "w": normal(5), "n": i32(2, 0, 3)},
        ["y"],
        gradient=True,
        grad_on_weights=1,
    ),
    case(
        "LengthsWeightedSum", {"x": normal(3), "w": normal(3), "n": i32(2, 1)}, ["y"], gradient=True
    ),
    case("LengthsTile", {"x": normal(3, 2), "n": i32(2, 0, 1)}, ["y"], gradient=True),
    case("LengthsTile", {"x": i64(7, 8), "n": i32(2, 1)}, ["y"]),
    case("LengthsGather", {"x": ROWS, "n": i32(2, 0, 3), "k": i32(2, 0, 0, 1)}, ["y"]),
    case("LengthsGather", {"x": i32(1, 2, 3), "n": i32(2, 1), "k": i64(1)}, ["y"]),
    case("LengthsPad", {"x": ROWS, "n": i32(2, 0, 3)}, ["y"], target_length=3),
    case(
        "LengthsPad", {"x": i32(1, 2, 3), "n": i32(2, 1)}, ["y"], target_length=4, padding_value=5.0
    ),
    case("LengthsRangeFill", {"n": i32(2, 0, 3)}, ["y"]),
    case("LengthsRangeFill", {"n": np.zeros(0, np.int32)}, ["y"]),
    case("LengthsToRanges", {"n": i32(2, 0, 3)}, ["y"]),
    case("LengthsToSegmentIds", {"n": i32(2, 0, 3)}, ["y"]),
    case("LengthsToShape", {"n": i32(3, 3)}, ["y"]),
    case("LengthsToOffsets", {"n": i32(2, 0, 3)}, ["y"]),
    case("LengthsToOffsets", {"n": i32(2, 0, 3)}, ["y"], include_last_offset=1),
    case("LengthsToWeights", {"n": i32(2, 0, 3)}, ["y"]),
    case("LengthsToWeights", {"n": i32(2, 1)}, ["y"], power=2.0),
    case("SegmentIdsToLengths", {"s": i32(0, 0, 2, 2)}, ["y"]),
    case("SegmentIdsToLengths", {"s": i64(0, 2), "x": normal(5)}, ["y"]),
    case("SegmentIdsToLengths", {"s": np.zeros(0, np.int32)}, ["y"]),
    case("SegmentIdsToRanges", {"s": i32(0, 0, 2, 2)}, ["y"]),
    case("SegmentIdsToRanges", {"s": i32(0, 0, 2), "x": normal(5)}, ["y"]),
]
