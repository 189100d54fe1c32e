"""Reshape, Squeeze, ExpandDims, Transpose, Slice, Shape and ResizeLike."""

import numpy as np

from caffe2_cases import case, i32, i64, integers, normal

EMPTY = np.zeros((0, 3), np.float32)
CASES = [
    case("Reshape", {"x": normal(2, 3)}, ["y", "old"], gradient=True, shape=[3, -1]),
    case("Reshape", {"x": normal(2, 3, 4)}, ["y", "old"], gradient=True, shape=[0, -1, 2, 1]),
    case("Reshape", {"x": normal(2, 3), "shape": i64(3, 2)}, ["y", "old"], gradient=True),
    case("Reshape", {"x": normal(2, 3), "shape": i32(-1)}, ["y", "old"]),
    case("Reshape", {"x": EMPTY}, ["y", "old"], gradient=True, shape=[3, -1]),
    case("Reshape", {"x": EMPTY}, ["y", "old"], shape=[0, -1]),
    case("Reshape", {"x": normal(1)}, ["y", "old"], shape=[]),
    case("Reshape", {"x": integers(0, 9, 2, 3)}, ["y", "old"], shape=[6]),
    case("Squeeze", {"x": normal(1, 2, 1)}, ["y"], gradient=True, dims=[0, 2]),
    case("Squeeze", {"x": normal(1, 2, 1)}, ["y"], dims=[2]),
    case("ExpandDims", {"x": normal(2)}, ["y"], gradient=True, dims=[0, 2]),
    case("ExpandDims", {"x": normal(2, 3)}, ["y"], gradient=True, dims=[1]),
    case("Transpose", {"x": normal(2, 3)}, ["y"], gradient=True),
    case("Transpose", {"x": normal(2, 3, 4)}, ["y"], gradient=True, axes=[1, 2, 0]),
    case("Transpose", {"x": integers(0, 9, 2, 3)}, ["y"]),
    case("Slice", {"x": normal(4, 2)}, ["y"], gradient=True, starts=[1], ends=[3]),
    case("Slice", {"x": normal(2, 4)}, ["y"], gradient=True, starts=[0, -3], ends=[-1, -2]),
    case("Slice", {"x": normal(4)}, ["y"], gradient=True, starts=[7], ends=[9]),
    case(
        "Slice", {"x": normal(3, 3), "starts": i64(0, 1), "ends": i64(-1, 2)}, ["y"], gradient=True
    ),
    case("Slice", {"x": EMPTY}, ["y"], starts=[0, 1], ends=[1, 2]),
    case("Slice", {"x": i64(5, 6, 7)}, ["y"], starts=[1], ends=[-1]),
    case("Shape", {"x": normal(2, 3)}, ["y"]),
    case("Shape", {"x": normal(2, 3, 4)}, ["y"], axes=[2, 0, 0]),
    case("ResizeLike", {"x": normal(2, 3), "like": i32(1, 2, 3, 4, 5, 6).reshape(3, 2)}, ["y"]),
]
