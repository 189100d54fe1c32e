"""Features from numbers of jrnn/nets/ops/contrib/features.py, and 16-bit floats of low_precision.py."""

import numpy as np
from caffe2.python import utils

from caffe2_cases import case, f32, i32, i64, normal, positive

TWO = dict(
    bounds=[0.0, 0.5, 2.0, 0.0, 0.3, 0.65],
    slopes=[1.0, 10.0, 2.0, 4.0],
    intercepts=[0.0, 100.0, 5.0, 6.0],
)
ONE = dict(bounds=[0.0, 0.5, 2.0], slopes=[1.0, 10.0], intercepts=[0.0, 100.0])
POINTS = np.array(
    [[-1, -1], [0, 0], [0.1, 0.2], [0.5, 0.3], [0.6, 0.65], [2, 0.5], [3, 3]], np.float32
)

CASES = [
    case(
        "SinusoidPositionEncoding",
        {"x": np.repeat(i64(1, 2, 30), 2).reshape(3, 2)},
        ["out"],
        embedding_size=5,
    ),
    case(
        "SinusoidPositionEncoding",
        {"x": i32(3, 7).reshape(2, 1)},
        ["out"],
        embedding_size=1,
        alpha=50.0,
        amplitude=2.0,
    ),
    case("SinusoidPositionEncoding", {"x": i32(3, 9).reshape(1, 2)}, ["out"]),
    case("PiecewiseLinearTransform", {"x": POINTS}, ["out"], **TWO),
    case("PiecewiseLinearTransform", {"x": POINTS[:, :1].copy()}, ["out"], **ONE),
    case("PiecewiseLinearTransform", {"x": POINTS}, ["out"], binary=1, **ONE),
    case("PiecewiseLinearTransform", {"x": POINTS[:, 0].copy()}, ["out"], binary=1, **ONE),
    case(
        "PiecewiseLinearTransform",
        {
            "x": positive(3, 1),
            "bounds": f32(0, 1, 2),
            "slopes": f32(1, 2),
            "intercepts": f32(0.5, 3),
        },
        ["out"],
    ),
    case("FloatToHalf", {"x": f32(1e6, -1e6, 0.1, 1e-9, 65519, 65520)}, ["out"], gradient=True),
    case("FloatToHalf", {"x": f32(1e6, -1e6, 0.1, 65519)}, ["out"], clip=1),
    case("HalfToFloat", {"x": normal(2, 3).astype(np.float16)}, ["out"], gradient=True),
    case("AliasWithName", {"x": normal(2, 3)}, ["out"], arg=[utils.MakeArgument("name", "other")]),
]
