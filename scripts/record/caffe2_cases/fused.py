"""Fused operators: jrnn/nets/ops/images/convolution.py."""

from caffe2_cases import case, normal

IMAGE = {"x": normal(2, 4, 4, 5), "w": normal(6, 4, 3, 2), "b": normal(6)}


CASES = [
    case("ConvRelu", IMAGE, ["out"], kernel_h=3, kernel_w=2, stride=2, pad=1),
    case(
        "ConvRelu",
        {"x": normal(1, 4, 4, 2), "w": normal(3, 3, 3, 2)},
        ["out"],
        kernel=3,
        order="NHWC",
    ),
    case(
        "ConvRelu",
        {"x": normal(1, 4, 4, 4), "w": normal(4, 2, 3, 3), "b": normal(4)},
        ["out"],
        kernel=3,
        group=2,
    ),
]
