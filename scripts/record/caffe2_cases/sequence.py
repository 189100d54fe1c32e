"""Masking, reversing, packing and unpacking sequences."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

X = normal(2, 3)
CUBE = normal(2, 2, 3)
CASES = [
    case("SequenceMask", {"x": X, "n": i32(1, 2)}, ["y"], gradient=True, mode="sequence"),
    case(
        "SequenceMask",
        {"x": X, "n": i32(0, 5)},
        ["y"],
        gradient=True,
        mode="sequence",
        fill_val=-9.0,
    ),
    case("SequenceMask", {"x": CUBE, "n": i32(1, 4)}, ["y"], gradient=True, mode="sequence"),
    case(
        "SequenceMask",
        {"x": CUBE, "n": i32(1, 2, 0, 3)},
        ["y"],
        gradient=True,
        mode="sequence",
        axis=2,
    ),
    case(
        "SequenceMask",
        {"x": CUBE, "n": i32(1, 0)},
        ["y"],
        gradient=True,
        mode="sequence",
        repeat_from_axis=-1,
    ),
    case(
        "SequenceMask",
        {"x": CUBE, "n": i32(1, 2)},
        ["y"],
        gradient=True,
        mode="sequence",
        axis=2,
        batch=0,
    ),
    case(
        "SequenceMask",
        {"x": normal(1, 2, 2, 2), "n": i32(1, 0)},
        ["y"],
        mode="sequence",
        axis=3,
        batch=1,
    ),
    case("SequenceMask", {"x": X, "n": i32(1, 2)}, ["y"], mode="sequence", grad=1),
    case(
        "SequenceMask",
        {"x": normal(2, 5), "n": i32(1, 3)},
        ["y"],
        gradient=True,
        mode="window",
        radius=1,
    ),
    case("SequenceMask", {"x": normal(2, 5), "n": i32(1, 3)}, ["y"], mode="window", radius=0),
    case(
        "SequenceMask",
        {"x": CUBE, "n": i32(1, 0)},
        ["y"],
        mode="window",
        radius=0,
        axis=2,
        batch=0,
        fill_val=7.0,
    ),
]
for mode in ("upper", "lower", "upperdiag", "lowerdiag"):
    CASES += [
        case("SequenceMask", {"x": normal(3, 3)}, ["y"], gradient=True, mode=mode),
        case("SequenceMask", {"x": CUBE}, ["y"], mode=mode),
        case(
            "SequenceMask",
            {"x": CUBE},
            ["y"],
            gradient=True,
            mode=mode,
            axis=2,
            batch=0,
            fill_val=-9.0,
        ),
    ]
ROWS = normal(5, 2)
STEPS = normal(3, 2, 2)
CASES += [
    case("ReversePackedSegs", {"x": STEPS, "n": i32(2, 3)}, ["y"], gradient=True),
    case("ReversePackedSegs", {"x": STEPS, "n": i64(0, 1)}, ["y"], gradient=True),
    case(
        "ReversePackedSegs",
        {"x": np.arange(6, dtype=np.int32).reshape(3, 2, 1), "n": i32(2, 3)},
        ["y"],
    ),
    case("PackSegments", {"n": i32(2, 0, 3), "x": ROWS}, ["y"], gradient=True),
    case("PackSegments", {"n": i32(2, 0, 3), "x": ROWS}, ["y"], max_length=2),
    case("PackSegments", {"n": i64(2, 3), "x": ROWS}, ["y"], gradient=True, max_length=4),
    case(
        "PackSegments",
        {"n": i32(2, 3), "x": ROWS},
        ["y", "mask"],
        gradient=True,
        return_presence_mask=1,
        pad_minf=1,
    ),
    case("PackSegments", {"n": i32(2, 1), "x": i32(1, 2, 3)}, ["y"], pad_minf=1),
    case("PackSegments", {"n": i32(1, 2), "x": np.array([b"a", b"bc", b"d"])}, ["y"]),
    case("PackSegments", {"n": i32(0, 0), "x": normal(0, 2)}, ["y"]),
    case(
        "PackSegments",
        {"n": i32(2, 3), "x": f32(1, 2, 3, 4, 5)},
        ["y", "mask"],
        return_presence_mask=1,
        max_length=2,
    ),
    case("UnpackSegments", {"n": i32(2, 3), "x": normal(2, 3, 2)}, ["y"], gradient=True),
    case(
        "UnpackSegments", {"n": i32(2, 3), "x": normal(2, 3, 2)}, ["y"], gradient=True, max_length=3
    ),
    case("UnpackSegments", {"n": i32(2, 4), "x": normal(2, 3, 2)}, ["y"], max_length=3),
    case(
        "UnpackSegments", {"n": i64(1, 2), "x": np.arange(4, dtype=np.int64).reshape(2, 2)}, ["y"]
    ),
    case("PackRNNSequence", {"x": ROWS, "n": i32(2, 0, 3)}, ["y"], gradient=True),
    case("PackRNNSequence", {"x": normal(3, 1, 2), "n": i32(2, 1)}, ["y"], gradient=True),
    case("UnpackRNNSequence", {"x": STEPS, "n": i32(1, 3)}, ["y"], gradient=True),
    case("VariableLengthSequencePadding", {"x": STEPS, "n": i32(1, 3)}, ["x"]),
]
