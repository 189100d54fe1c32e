"""Activations of jrnn/nets/ops/activation.py, at zero and at the ends of their ranges too."""

import numpy as np

from caffe2_cases import case, f32, normal

EDGES = f32(-3, -1, -0.5, -0.0, 0.0, 0.5, 1, 3)
CASES = []
for type, args in (
    ("Clip", {}),
    ("Clip", {"min": -1.0, "max": 0.5}),
    ("HardSigmoid", {}),
    ("HardSigmoid", {"alpha": 0.5, "beta": 0.5}),
    ("LeakyRelu", {}),
    ("LeakyRelu", {"alpha": 0.3}),
    ("Elu", {}),
    ("Elu", {"alpha": 2.0}),
    ("Selu", {}),
    ("Selu", {"alpha": 1.5, "scale": 1.125}),
    ("Softplus", {}),
    ("Softsign", {}),
    ("Swish", {}),
    ("Mish", {}),
    ("Gelu", {}),
    ("Gelu", {"fast_gelu": 1}),
):
    CASES += [
        case(type, {"x": normal(2, 3)}, ["out"], gradient=True, **args),
        case(type, {"x": EDGES}, ["out"], gradient=True, **args),
    ]
CASES += [
    case("Clip", {"x": EDGES}, ["out"], min=2.0, max=0.5),
    case("Swish", {"x": np.zeros((0, 2), np.float32)}, ["out"], gradient=True),
    case("PRelu", {"x": normal(2, 3, 2), "w": normal(3)}, ["out"], gradient=True),
    case("PRelu", {"x": EDGES.reshape(2, 4), "w": normal(1)}, ["out"], gradient=True),
    case("PRelu", {"x": normal(2, 2, 3), "w": normal(3)}, ["out"], gradient=True, order="NHWC"),
    case("Glu", {"x": normal(2, 4)}, ["out"]),
    case("Glu", {"x": normal(4, 3)}, ["out"], dim=0),
]
