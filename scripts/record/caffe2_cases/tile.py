"""Repeating, expanding, flattening, and questions about sizes."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

EMPTY = np.zeros((0, 2), np.float32)
CASES = [
    case("Tile", {"x": normal(2, 3)}, ["out"], gradient=True, tiles=2, axis=0),
    case("Tile", {"x": normal(2, 3)}, ["out"], gradient=True, tiles=3, axis=-1),
    case("Tile", {"x": normal(2, 3), "n": i32(2), "a": i32(1)}, ["out"], gradient=True),
    case("Tile", {"x": normal(2, 3), "n": i32(2)}, ["out"], axis=1),
    case("Tile", {"x": i64(1, 2)}, ["out"], tiles=2, axis=0),
    case("Tile", {"x": np.array([b"a", b"bc"])}, ["out"], tiles=2, axis=0),
    case("NumpyTile", {"x": normal(2, 3), "n": i64(2, 1)}, ["out"]),
    case("NumpyTile", {"x": i32(1, 2), "n": i64(3)}, ["out"]),
    case("Expand", {"x": normal(2, 1), "shape": i64(1, 3)}, ["out"], gradient=True),
    case("Expand", {"x": normal(2, 1), "shape": i64(3)}, ["out"], gradient=True),
    case("Expand", {"x": normal(2), "shape": i64(3, 1, 2)}, ["out"], gradient=True),
    case("Expand", {"x": normal(2), "shape": i64(1)}, ["out"]),
    case("Flatten", {"x": normal(2, 3, 2)}, ["out"], gradient=True),
    case("Flatten", {"x": normal(2, 3, 2)}, ["out"], gradient=True, axis=2),
    case("Flatten", {"x": normal(2, 3, 2)}, ["out"], axis=0),
    case("Flatten", {"x": normal(2, 3)}, ["out"], axis=2),
    case("FlattenToVec", {"x": normal(2, 3)}, ["out"], gradient=True),
    case("FlattenToVec", {"x": EMPTY}, ["out"]),
    case("PrependDim", {"x": normal(6, 2)}, ["out"], gradient=True, dim_size=3),
    case("MergeDim", {"x": normal(2, 3, 2)}, ["out"]),
    case("MergeDim", {"x": normal(2, 3)}, ["out"]),
    case("Size", {"x": normal(2, 3)}, ["out"]),
    case("IsEmpty", {"x": normal(2, 3)}, ["out"]),
    case("IsEmpty", {"x": EMPTY}, ["out"]),
    case("HasElements", {"x": EMPTY}, ["out"]),
    case("HasElements", {"x": EMPTY, "y": f32(1)}, ["out"]),
]
