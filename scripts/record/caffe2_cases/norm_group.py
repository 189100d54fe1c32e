"""Normalization within each example of jrnn/nets/ops/images/channel_norm.py."""

from caffe2_cases import case, normal, positive

OUTPUTS = ["out", "mean", "rstd"]


def affine(channels):
    return {"scale": positive(channels), "bias": normal(channels)}


CASES = [
    case("InstanceNorm", {"x": normal(2, 3, 4, 2), **affine(3)}, OUTPUTS, gradient=True),
    case(
        "InstanceNorm",
        {"x": normal(2, 4, 2, 3), **affine(3)},
        OUTPUTS,
        gradient=True,
        order="NHWC",
        epsilon=1e-2,
    ),
    case("InstanceNorm", {"x": normal(2, 3, 5), **affine(3)}, ["out"], gradient=True),
    case("InstanceNorm", {"x": normal(2, 3, 2, 2, 2), **affine(3)}, ["out", "mean"], gradient=True),
    case("GroupNorm", {"x": normal(2, 6, 2, 3), **affine(6)}, OUTPUTS, gradient=True, group=3),
    case(
        "GroupNorm",
        {"x": normal(2, 2, 3, 6), **affine(6)},
        OUTPUTS,
        gradient=True,
        group=2,
        order="NHWC",
        epsilon=0.1,
    ),
    case("GroupNorm", {"x": normal(2, 32, 2), **affine(32)}, ["out"]),
    case("GroupNorm", {"x": normal(3, 4), **affine(4)}, OUTPUTS, gradient=True, group=2),
    case("RMSNorm", {"x": normal(3, 5), **affine(5)}, ["out", "rrms"], gradient=True),
    case(
        "RMSNorm",
        {"x": normal(2, 3, 4), **affine(4)},
        ["out", "rrms"],
        gradient=True,
        axis=2,
        eps=0.01,
    ),
    case("RMSNorm", {"x": normal(2, 3, 4), **affine(12)}, ["out", "rrms"], gradient=True),
]
