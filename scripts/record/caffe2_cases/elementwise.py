"""Activations of jrnn/nets/ops/elementwise.py. Zeros and ties stand among the inputs, where derivatives are a convention."""

import numpy as np

from caffe2_cases import case, f32, normal

CASES = []

for activation in ("Tanh", "Sigmoid", "Relu"):
    CASES += [
        case(activation, {"x": normal(2, 3)}, ["out"], gradient=True),
        case(activation, {"x": f32(-2, -0.0, 0.0, 1e-3, 3, 90, -90)}, ["out"], gradient=True),
        case(activation, {"x": normal(2, 2, 2)}, ["x"], gradient=True),
        case(activation, {"x": np.zeros((0, 3), np.float32)}, ["out"]),
    ]
