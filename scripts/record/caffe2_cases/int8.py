"""Quantized tensors: jrnn/nets/ops/contrib/int8.py. They cannot be recorded, so floats surround them."""

import numpy as np

from caffe2_cases import case, integers, normal

CASES = []
SAME = dict(Y_scale=0.02, Y_zero_point=120)


def stored(name, *shape, scale=0.02, zero=120, low=0, high=256, seed=0):
    """An operator that fills a tensor with random bytes."""
    values = integers(low, high, *shape, seed=seed).astype(np.uint8).tobytes()
    return (
        "Int8GivenTensorFill",
        [],
        [name],
        dict(shape=list(shape), values=values, Y_scale=scale, Y_zero_point=zero),
    )


def whole(name, *values, scale=0.001):
    return (
        "Int8GivenIntTensorFill",
        [],
        [name],
        dict(shape=[len(values)], values=list(values), Y_scale=scale),
    )


def quantized(type, before, outputs=("q",), **args):
    """An operator that reads what the operators `before` it fill, and its result in floats."""
    outputs = list(outputs)
    after = [("Int8Dequantize", ["q"], ["out"], {})]
    if type == "Int8Dequantize":
        outputs, after = ["out"], []
    names = [op[2][0] for op in before]
    CASES.append(case(type, {}, outputs, reads=names, before=before, after=after, **args))


for scale, zero in ((0.05, 100), (0.5, 0), (1.0, 255)):
    x = np.concatenate([4 * normal(40), np.arange(-6, 6, dtype=np.float32) / 4])
    quantize = ("Int8Quantize", ["x"], ["q"], dict(Y_scale=scale, Y_zero_point=zero))
    CASES.append(case("Int8Dequantize", {"x": x}, ["out"], reads=["q"], before=[quantize]))
quantized("Int8Dequantize", [stored("a", 2, 3)])
SCALE = dict(Y_scale=0.03, Y_zero_point=110)
for type in ("Int8Sum", "Int8Add", "Int8SumRelu", "Int8AddRelu"):
    quantized(type, [stored("a", 4, 9), stored("b", 4, 9, scale=0.013, zero=7, seed=1)], **SCALE)
quantized(
    "Int8Sum",
    [stored("a", 30, 9, scale=1.0, zero=0), stored("b", 30, 9, scale=1.0, zero=3, seed=1)],
    Y_scale=2.0,
)
quantized("Int8Relu", [stored("a", 3, 5)], **SAME)
for rows, columns, scale in ((3, 7, 0.1), (2, 100, 0.03), (4, 1, 0.5)):
    quantized(
        "Int8Softmax", [stored("a", rows, columns, scale=scale)], Y_scale=1 / 256, Y_zero_point=0
    )
quantized("Int8Flatten", [stored("a", 2, 3, 4)], **SAME)
quantized("Int8Flatten", [stored("a", 2, 3, 4)], axis=2, **SAME)
quantized("Int8Reshape", [stored("a", 2, 3, 4)], ["q", "old"], shape=[0, -1], **SAME)
quantized("Int8Transpose", [stored("a", 2, 3, 4, 5)], axes=[0, 3, 1, 2], **SAME)
quantized("Int8Slice", [stored("a", 3, 5)], starts=[0, 1], ends=[-1, 4], **SAME)
pair = [stored("a", 2, 2, 2, 3), stored("b", 2, 2, 2, 2, seed=1)]
quantized("Int8Concat", pair, ["q", "sizes"], axis=3, **SAME)
for m, k, n in ((3, 4, 5), (2, 300, 9), (1, 17, 16)):
    bias = whole("b", *range(-400, 400 * n - 400, 400))
    reads = [stored("x", m, k), stored("w", n, k, scale=0.01, zero=130, seed=1), bias]
    quantized("Int8FC", reads, Y_scale=0.02 + 0.002 * k, Y_zero_point=125)
quantized(
    "Int8FC",
    [stored("x", 2, 2, 3), stored("w", 4, 6, seed=1), whole("b", 0, 1, 2, 3)],
    Y_scale=0.03,
    Y_zero_point=90,
)
TIES = [
    stored("x", 40, 2, scale=0.5, zero=128),
    stored("w", 8, 2, scale=0.5, zero=128, seed=1),
    whole("b", *[0] * 8),
]
quantized("Int8FC", TIES, Y_scale=64.0, Y_zero_point=128)
IMAGE = stored("x", 2, 5, 6, 8)
BIAS = whole("b", 100, -200, 3000, 0)
SHARED = dict(order="NHWC", Y_zero_point=120)
filter = stored("w", 4, 3, 2, 8, scale=0.01, zero=131, seed=1)
quantized(
    "Int8Conv",
    [IMAGE, filter, BIAS],
    kernel_h=3,
    kernel_w=2,
    stride=2,
    pad=1,
    Y_scale=0.05,
    **SHARED,
)
filter = stored("w", 4, 3, 3, 4, scale=0.01, zero=131, seed=1)
quantized(
    "Int8Conv", [IMAGE, filter, BIAS], kernel=3, group=2, dilation=2, pad=2, Y_scale=0.1, **SHARED
)
filter, bias = stored("w", 8, 3, 3, 1, scale=0.01, zero=131, seed=1), whole("b", *range(8))
quantized("Int8Conv", [IMAGE, filter, bias], kernel=3, group=8, pad=1, Y_scale=0.04, **SHARED)
for kind in ("", "Relu"):
    quantized("Int8AveragePool" + kind, [IMAGE], order="NHWC", kernel=3, stride=2, **SAME)
    quantized("Int8AveragePool" + kind, [IMAGE], order="NHWC", kernel=3, stride=1, pad=1, **SAME)
    quantized("Int8AveragePool" + kind, [IMAGE], order="NHWC", global_pooling=1, **SAME)
    quantized("Int8MaxPool" + kind, [IMAGE], order="NHWC", kernel=2, stride=2, **SAME)
quantized("Int8ResizeNearest", [IMAGE], width_scale=2.0, height_scale=1.5, **SAME)
