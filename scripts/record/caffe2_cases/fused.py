"""Fused and packed operators: jrnn/nets/ops/contrib/conv.py and low_precision.py."""

from caffe2_cases import case, normal

PACK = (("FbGemmPack", ["w"], ["packed"], {}),)
TRANSPOSED = (("FbGemmPackTranspose", ["w"], ["packed"], {}),)
IMAGE = {"x": normal(2, 4, 4, 5), "w": normal(6, 4, 3, 2), "b": normal(6)}


def packed(x, w, before=PACK, **args):
    blobs = {"x": normal(*x), "w": normal(*w), "b": normal(w[1 if before is TRANSPOSED else 0])}
    return case("FbFCPacked", blobs, ["out"], reads=["x", "packed", "b"], before=before, **args)


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
    packed((3, 4), (5, 4)),
    packed((2, 3, 4), (5, 4), axis=2),
    packed((2, 1, 2, 2), (3, 4)),
    packed((3, 4), (4, 5), TRANSPOSED),
]
