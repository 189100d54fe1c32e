"""Features of ranking models: jrnn/nets/ops/contrib/features.py."""

import numpy as np

from caffe2_cases import case, f32, i64, normal, positive

RANGES = np.array([[[0, 1], [2, 2]], [[4, 1], [5, 0]], [[1, 5], [0, 0]]], np.int32)
PAIRS = {"lengths": i64(2, 0, 1), "indices": i64(0, 3, 2)}
CASES = [
    case("Bucketize", {"x": f32(-1, 0.1, 0.2, 2.5, 9, 2.4999)}, ["out"], boundaries=[0.1, 2.5]),
    case("Bucketize", {"x": normal(2, 3)}, ["out"], boundaries=[-0.5, 0.0, 0.0, 0.5]),
    case("Bucketize", {"x": normal(2, 3)}, ["out"]),
    case("BatchBoxCox", {"data": normal(4, 3), "a": f32(0, 1, -0.5), "b": f32(1, 2, 4)}, ["out"]),
    case(
        "BatchBoxCox",
        {"data": positive(3, 2).astype(np.float64), "a": np.array([0, 3.0]), "b": np.zeros(2)},
        ["out"],
    ),
    case("BatchBoxCox", {"data": -positive(2, 2), "a": f32(0, 0.5), "b": f32(0, 0)}, ["out"]),
    case(
        "BatchSparseToDense",
        {**PAIRS, "values": normal(3)},
        ["out"],
        gradient=True,
        dense_last_dim=5,
        default_value=-1.0,
    ),
    case("BatchSparseToDense", {**PAIRS, "values": normal(3), "shape": normal(3, 4)}, ["out"]),
    case(
        "BatchSparseToDense",
        {"l": i64(0, 0), "i": i64(), "values": f32()},
        ["out"],
        dense_last_dim=2,
    ),
    case("BatchDenseToSparse", {**PAIRS, "dense": normal(3, 4)}, ["out"], gradient=True),
    case("GatherRanges", {"data": normal(6), "ranges": RANGES}, ["out", "count"]),
    case(
        "GatherRanges",
        {"data": i64(5, 4, 3, 2, 1, 0), "ranges": RANGES.astype(np.int64)},
        ["out", "count"],
    ),
    case(
        "GatherRanges",
        {"data": np.array([b"a", b"bc"]), "ranges": RANGES[1:2, 1:] - [5, 0] + [0, 1]},
        ["out", "count"],
    ),
    case("Summarize", {"x": normal(3, 4)}, ["out"]),
    case("Summarize", {"x": f32(2.5)}, ["out"]),
]
