"""Borders and sizes of images of jrnn/nets/ops/contrib/image.py."""

from caffe2_cases import case, f32, normal

CASES = []
for mode in ("constant", "reflect", "edge"):
    CASES += [
        case(
            "PadImage",
            {"x": normal(2, 2, 3, 4)},
            ["out"],
            gradient=True,
            mode=mode,
            pad=1,
            value=2.0,
        ),
        case(
            "PadImage",
            {"x": normal(1, 3, 4, 2)},
            ["out"],
            gradient=True,
            mode=mode,
            pad_t=1,
            pad_l=0,
            pad_b=2,
            pad_r=3,
            order="NHWC",
        ),
        case(
            "PadImage",
            {"x": normal(1, 1, 3, 3)},
            ["out"],
            gradient=True,
            mode=mode,
            pads=[3, 2, 0, 1],
        ),
    ]
for resize in ("ResizeNearest", "UpsampleBilinear"):
    CASES += [
        case(resize, {"x": normal(1, 2, 3, 4), "scales": f32(1.5, 2)}, ["out"]),
        case(
            resize,
            {"x": normal(1, 2, 3, 4)},
            ["out"],
            gradient=True,
            width_scale=2.0,
            height_scale=1.7,
        ),
        case(
            resize,
            {"x": normal(1, 2, 5, 4)},
            ["out"],
            gradient=True,
            width_scale=0.6,
            height_scale=0.5,
        ),
        case(resize, {"x": normal(1, 2, 5, 4)}, ["out"], gradient=True, height_scale=0.2),
    ]
CASES += [
    case(
        "ResizeNearest",
        {"x": normal(1, 3, 4, 2)},
        ["out"],
        gradient=True,
        width_scale=1.3,
        height_scale=2.0,
        order="NHWC",
    ),
    case(
        "ResizeNearest3D",
        {"x": normal(1, 2, 2, 2, 3)},
        ["out"],
        gradient=True,
        width_scale=2.0,
        height_scale=2.0,
        temporal_scale=2.0,
    ),
    case(
        "ResizeNearest3D",
        {"x": normal(1, 2, 2, 2, 3)},
        ["out"],
        gradient=True,
        width_scale=2.0,
        height_scale=2.0,
    ),
]
