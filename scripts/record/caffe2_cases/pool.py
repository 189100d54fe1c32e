"""Pooling of jrnn/nets/ops/images/pooling.py; windows hang over the borders, and elements tie."""

import numpy as np

from caffe2_cases import case, integers, normal

CASES = []
for type in ("MaxPool", "AveragePool", "LpPool"):
    CASES += [
        case(type, {"x": normal(2, 3, 5, 4)}, ["out"], gradient=True, kernel=3, stride=2, pad=1),
        case(
            type,
            {"x": normal(1, 2, 5, 5)},
            ["out"],
            gradient=True,
            kernel_h=2,
            kernel_w=3,
            pad_t=1,
            pad_l=0,
            pad_b=0,
            pad_r=2,
        ),
        case(
            type,
            {"x": normal(1, 5, 4, 2)},
            ["out"],
            gradient=True,
            kernel=2,
            stride=2,
            pad=1,
            order="NHWC",
        ),
        case(type, {"x": normal(2, 2, 3, 4)}, ["out"], gradient=True, global_pooling=1),
        case(
            type,
            {"x": normal(2, 2, 3, 4)},
            ["out"],
            gradient=True,
            global_pooling=1,
            kernel=0,
            stride=1,
            pad=0,
        ),
        case(type, {"x": normal(2, 2, 4, 3)}, ["out"], global_pooling=1, kernel_h=0, kernel_w=0),
        case(
            type, {"x": normal(2, 2, 4, 3)}, ["out"], global_pooling=1, kernels=[0, 5], legacy_pad=3
        ),
        case(
            type, {"x": normal(2, 3, 4, 2)}, ["out"], gradient=True, global_pooling=1, order="NHWC"
        ),
    ]
for type in ("MaxPool", "AveragePool"):
    CASES += [
        case(
            type,
            {"x": normal(1, 1, 5, 5)},
            ["out"],
            gradient=True,
            kernel=3,
            stride=2,
            legacy_pad=2,
        ),
        case(type, {"x": normal(1, 1, 6, 6)}, ["out"], kernel=3, stride=2, legacy_pad=1),
        case(
            type,
            {"x": normal(1, 1, 4, 4)},
            ["out"],
            gradient=True,
            kernel=3,
            stride=2,
            legacy_pad=3,
        ),
        case(
            type,
            {"x": normal(1, 1, 5, 5)},
            ["out"],
            gradient=True,
            kernel=2,
            stride=2,
            pad=1,
            legacy_pad=3,
        ),
        case(type, {"x": normal(1, 1, 5, 5)}, ["out"], kernel=1, stride=4, legacy_pad=2),
        case(
            type,
            {"x": normal(1, 2, 6)},
            ["out"],
            gradient=True,
            kernels=[3],
            strides=[2],
            pads=[1, 0],
        ),
        case(type, {"x": normal(1, 2, 6)}, ["out"], kernel=2),
        case(
            type,
            {"x": normal(1, 3, 3, 4, 2)},
            ["out"],
            gradient=True,
            kernels=[2, 1, 3],
            pads=[1, 0, 1, 0, 0, 2],
            order="NHWC",
        ),
        case(type, {"x": normal(1, 2, 3, 4, 2)}, ["out"], gradient=True, global_pooling=1),
        case(type + "1D", {"x": normal(2, 2, 5)}, ["out"], gradient=True, kernels=[2], strides=[2]),
        case(type + "2D", {"x": normal(2, 2, 4, 4)}, ["out"], gradient=True, kernels=[2, 2]),
        case(
            type + "3D",
            {"x": normal(1, 1, 3, 3, 3)},
            ["out"],
            gradient=True,
            kernels=[2, 2, 2],
            pads=[1, 1, 1, 0, 0, 0],
        ),
        case(type, {"x": np.zeros((0, 1, 3, 3), np.float32)}, ["out"], kernel=2),
    ]
CASES += [
    case(
        "AveragePool",
        {"x": normal(1, 2, 4, 4)},
        ["out"],
        gradient=True,
        kernel=3,
        stride=2,
        pad=1,
        count_include_pad=1,
    ),
    case(
        "AveragePool",
        {"x": normal(1, 1, 4, 4)},
        ["out"],
        gradient=True,
        kernel=3,
        stride=2,
        legacy_pad=3,
        count_include_pad=1,
    ),
    case(
        "MaxPool",
        {"x": integers(0, 3, 2, 2, 4, 4).astype(np.float32)},
        ["out"],
        gradient=True,
        kernel=2,
    ),
    case(
        "MaxPool",
        {"x": integers(0, 3, 2, 2, 4, 4).astype(np.float32)},
        ["out"],
        gradient=True,
        global_pooling=1,
    ),
    case("LpPool", {"x": normal(1, 2, 4, 4)}, ["out"], gradient=True, kernel=2, p=3.0),
    case("LpPool", {"x": normal(1, 2, 4, 4)}, ["out"], gradient=True, kernel=2, p=1.5, stride=2),
]
