"""Rearrangements of jrnn/nets/ops/images/image_layout.py."""

from caffe2_cases import case, normal

CASES = [
    case("NCHW2NHWC", {"x": normal(2, 3, 2, 4)}, ["out"], gradient=True),
    case("NCHW2NHWC", {"x": normal(2, 3, 4)}, ["out"], gradient=True),
    case("NHWC2NCHW", {"x": normal(2, 3, 2, 4)}, ["out"], gradient=True),
    case("NHWC2NCHW", {"x": normal(2, 3, 2, 4, 2)}, ["out"], gradient=True),
    case("ChannelShuffle", {"x": normal(2, 6, 2, 2)}, ["out"], gradient=True, group=3),
    case(
        "ChannelShuffle", {"x": normal(1, 2, 2, 6)}, ["out"], gradient=True, group=2, order="NHWC"
    ),
    case("ChannelShuffle", {"x": normal(2, 4)}, ["out"], gradient=True),
    case("Im2Col", {"x": normal(2, 2, 4, 3)}, ["out"], gradient=True, kernel=2, stride=2, pad=1),
    case(
        "Im2Col",
        {"x": normal(2, 4, 5, 2)},
        ["out"],
        gradient=True,
        kernel_h=2,
        kernel_w=3,
        dilation=2,
        order="NHWC",
    ),
    case(
        "Col2Im",
        {"x": normal(1, 8, 3, 3), "image": normal(1, 2, 4, 4)},
        ["out"],
        gradient=True,
        kernel=2,
    ),
    case(
        "Col2Im",
        {"x": normal(1, 2, 2, 8), "image": normal(1, 4, 4, 2)},
        ["out"],
        gradient=True,
        kernel=2,
        stride=2,
        order="NHWC",
    ),
    case("SpaceToBatch", {"x": normal(2, 3, 4, 4)}, ["out"], gradient=True),
    case("SpaceToBatch", {"x": normal(1, 2, 4, 6)}, ["out"], gradient=True, block_size=2, pad=2),
    case("SpaceToBatch", {"x": normal(1, 2, 2, 2)}, ["out"], gradient=True, block_size=3, pad=2),
    case("BatchToSpace", {"x": normal(4, 3, 2, 2)}, ["out"], gradient=True),
    case("BatchToSpace", {"x": normal(18, 1, 2, 3)}, ["out"], gradient=True, block_size=3, pad=1),
    case(
        "DepthConcat", {"a": normal(2, 3, 2), "b": normal(2, 1, 2)}, ["out", "dims"], gradient=True
    ),
    case(
        "DepthConcat",
        {"a": normal(1, 2, 2, 3), "b": normal(1, 2, 2, 2)},
        ["out", "dims"],
        gradient=True,
        order="NHWC",
    ),
    case("DepthSplit", {"x": normal(2, 4, 2)}, ["left", "right"], gradient=["left", "right"]),
]
