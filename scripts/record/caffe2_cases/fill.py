"""Constant fills and ranges."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal

STRINGS = {"values": [b"a", b"bcd"], "shape": [2]}
CASES = [
    case("ConstantFill", {}, ["out"]),
    case("ConstantFill", {}, ["out"], shape=[2, 3], value=1.5),
    case("ConstantFill", {}, ["out"], shape=[2], value=3),
    case("ConstantFill", {}, ["out"], shape=[2], value=b"ab", dtype=4),
    case("ConstantFill", {}, ["out"], shape=[0, 3]),
    case("ConstantFill", {"x": normal(2, 3)}, ["out"], value=1.0),
    case("ConstantFill", {"x": normal(2, 3)}, ["out"], extra_shape=[2]),
    case("ConstantFill", {"x": i64(2, 3)}, ["out"], input_as_shape=1),
    case("ConstantFill", {"x": i64(2, 3)}, ["out"], input_as_shape=1, extra_shape=[2], dtype=2),
    case("ConstantFill", {"x": normal(2), "v": f32(7)}, ["out"]),
    case("GivenTensorFill", {}, ["out"], values=[1.5, -2.0], shape=[2]),
    case("GivenTensorFill", {}, ["out"], values=[1, 2], shape=[2, 1], dtype=2),
    case("GivenTensorFill", {}, ["out"], values=[1, 0], shape=[2], dtype=5),
    case("GivenTensorFill", {}, ["out"], dtype=4, **STRINGS),
    case("GivenTensorFill", {}, ["out"], values=[], shape=[0, 2]),
    case("GivenTensorFill", {"x": normal(1, 2)}, ["out"], values=[1.0, 2.0]),
    case("GivenTensorIntFill", {}, ["out"], values=[1, 2], shape=[2]),
    case("GivenTensorInt16Fill", {}, ["out"], values=[1, 2], shape=[2]),
    case("GivenTensorInt64Fill", {}, ["out"], values=[1, 2**40], shape=[2]),
    case("GivenTensorBoolFill", {}, ["out"], values=[2, 0], shape=[2]),
    case("GivenTensorDoubleFill", {}, ["out"], values=[0.1, 2.0], shape=[1, 2]),
    case("GivenTensorStringFill", {}, ["out"], **STRINGS),
    case("GivenTensorByteStringToUInt8Fill", {}, ["out"], values=[b"ab"], shape=[2]),
    case("GivenTensorByteStringToUInt8Fill", {}, ["out"], values=[b"abc"], shape=[1]),
    case("DiagonalFill", {}, ["out"], shape=[3, 2], value=2.5),
    case("DiagonalFill", {}, ["out"], shape=[2, 3], value=2),
    case("DiagonalFill", {}, ["out"], shape=[2, 2, 2], value=1.0),
    case("DiagonalFill", {"x": normal(2, 2)}, ["out"], value=3, dtype=2),
    case("RangeFill", {}, ["out"], shape=[2, 3]),
    case("Range", {"stop": np.array(4, np.int64)}, ["out"]),
    case("Range", {"start": i32(2), "stop": i32(5)}, ["out"]),
    case("Range", {"start": i64(9), "stop": i64(2), "step": i64(-3)}, ["out"]),
    case("Range", {"start": f32(1), "stop": f32(2), "step": f32(0.3)}, ["out"]),
    case("Range", {"start": f32(9), "stop": f32(2), "step": f32(-2)}, ["out"]),
    case("Range", {"start": i64(3), "stop": i64(1)}, ["out"]),
    case("Range", {"start": i32(-4), "stop": i32(0), "step": i32(-5)}, ["out"]),
]
for dtype in (1, 2, 5, 6, 8, 9, 10, 13):
    CASES += [
        case(
            "ConstantFill",
            {},
            ["out"],
            shape=[2],
            dtype=dtype,
            value=1.0 if dtype in (1, 13) else 1,
        )
    ]
