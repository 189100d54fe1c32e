"""Normalization of channels of jrnn/nets/ops/images/channel_norm.py. SpatialBN's is_test gradient and
LRN's for an even size are left out: Caffe2's are wrong."""

import numpy as np

from caffe2_cases import case, normal, positive

CASES = []


def batch(x, channels, gradient=True, sums=False, **args):
    blobs = {
        "x": normal(*x),
        "scale": positive(channels),
        "bias": normal(channels),
        "mean": normal(channels, seed=1),
    }
    blobs["var"] = positive(channels, seed=1)
    if sums:
        blobs["sums"], blobs["squares"] = normal(channels, seed=2), 20 * positive(channels, seed=2)
    outputs = ["out"] if args["is_test"] else ["out", "mean", "var", "saved_mean", "saved_rstd"]
    return case("SpatialBN", blobs, outputs, gradient=gradient, **args)


CASES += [
    batch((3, 4, 2, 3), 4, is_test=0),
    batch((3, 2, 3, 4), 4, is_test=0, order="NHWC", epsilon=1e-3, momentum=0.6),
    batch((6, 3), 3, is_test=0, gradient=False),
    batch((2, 3, 2, 2, 2), 3, is_test=0),
    batch((0, 3, 2, 2), 3, is_test=0),
    batch((2, 3, 4), 3, is_test=0, gradient=False, sums=True, num_batches=2),
    batch((2, 3, 2, 2), 3, is_test=1, gradient=False, epsilon=1e-2),
    batch((2, 2, 3), 3, is_test=1, gradient=False, order="NHWC"),
    case(
        "SpatialBNGradient",
        {
            "x": normal(2, 3, 4),
            "s": positive(3),
            "dy": normal(2, 3, 4, seed=1),
            "m": normal(3),
            "r": positive(3, seed=1),
            "ds": normal(3, seed=2),
            "db": normal(3, seed=3),
        },
        ["dx", "dscale", "dbias"],
        num_batches=2,
    ),
    case(
        "LRN",
        {"x": normal(2, 5, 2, 2)},
        ["out"],
        gradient=True,
        size=3,
        alpha=0.5,
        beta=0.75,
        bias=2.0,
    ),
    case(
        "LRN",
        {"x": normal(2, 2, 2, 5)},
        ["out", "scale"],
        gradient=True,
        size=3,
        alpha=1.0,
        beta=0.5,
        order="NHWC",
    ),
    case(
        "LRN",
        {"x": normal(1, 1, 2, 5)},
        ["out", "scale"],
        size=4,
        alpha=1.0,
        beta=0.5,
        order="NHWC",
    ),
    case("LRN", {"x": normal(1, 3, 2, 2)}, ["out"], gradient=True, size=9, alpha=0.1, beta=1.0),
    case(
        "LRN",
        {"x": np.zeros((1, 3, 2, 2), np.float32)},
        ["out"],
        gradient=True,
        size=3,
        alpha=0.1,
        beta=1.0,
    ),
    case(
        "AffineChannel",
        {"x": normal(2, 3, 2), "s": normal(3), "b": normal(3, seed=1)},
        ["out"],
        gradient=True,
    ),
    case(
        "AffineChannel",
        {"x": normal(2, 2, 2, 3), "s": normal(3), "b": normal(3, seed=1)},
        ["out"],
        gradient=True,
        order="NHWC",
        is_learnable=1,
    ),
    case("AffineChannel", {"x": normal(4, 3), "s": normal(3), "b": normal(3, seed=1)}, ["x"]),
]
