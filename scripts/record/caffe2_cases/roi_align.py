"""Averages over regions: jrnn/nets/ops/contrib/image.py."""

import numpy as np

from caffe2_cases import case, f32, normal

ROIS = np.array(
    [
        [1, 0, 0, 7, 5],
        [0, 2.3, 1.1, 9.7, 8.2],
        [1, -3, -2, 20, 30],
        [0, 4, 4, 4, 4],
        [0, 30, 30, 40, 40],
    ],
    "f4",
)
CASES = []
for args in (
    dict(pooled_h=2, pooled_w=3, sampling_ratio=2),
    dict(pooled_h=3, pooled_w=2, spatial_scale=0.5),
    dict(spatial_scale=0.25, sampling_ratio=1),
):
    blobs = {"x": normal(2, 3, 5, 6), "rois": ROIS}
    CASES.append(case("RoIAlign", blobs, ["out"], gradient=True, **args))
CASES += [
    case(
        "RoIAlign",
        {"x": normal(1, 2, 4, 4), "rois": ROIS[:3, 1:]},
        ["out"],
        pooled_h=2,
        pooled_w=2,
        sampling_ratio=2,
    ),
    case(
        "RoIAlign",
        {"x": normal(2, 5, 6, 3), "rois": ROIS},
        ["out"],
        pooled_h=2,
        pooled_w=2,
        order="NHWC",
    ),
    case(
        "RoIAlign",
        {"x": normal(1, 2, 4, 4), "rois": f32().reshape(0, 5)},
        ["out"],
        pooled_h=2,
        pooled_w=3,
    ),
]
