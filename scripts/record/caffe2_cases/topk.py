"""The k largest elements."""

import numpy as np

from caffe2_cases import case, f32, i64, normal

CASES = [
    case("TopK", {"x": normal(2, 5)}, ["values", "indices", "flat"], gradient=["values"], k=2),
    case(
        "TopK",
        {"x": normal(3, 4, 2)},
        ["values", "indices", "flat"],
        gradient=["values"],
        k=2,
        axis=1,
    ),
    case("TopK", {"x": f32(1, 3, 3, 2)}, ["values", "indices"], gradient=["values"], k=3),
    case("TopK", {"x": normal(2, 2)}, ["values", "indices", "flat"], gradient=["values"], k=3),
    case("TopK", {"x": normal(2, 2)}, ["values", "indices", "flat"], k=4, axis=0),
    case("TopK", {"x": normal(2, 5), "k": np.array([3], np.int64)}, ["values", "indices"]),
    case("TopKGradient", {"g": f32(5, 6, 0), "i": i64(1, 2, -1), "x": normal(4)}, ["out"], k=3),
]
