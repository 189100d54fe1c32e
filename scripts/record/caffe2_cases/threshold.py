"""Activations with a threshold of jrnn/nets/ops/activation.py; inputs lie on the thresholds, too."""

from caffe2_cases import case, f32, normal

CASES = [
    case("ReluN", {"x": f32(-1, 0, 0.5, 6, 7)}, ["out"], gradient=True),
    case("ReluN", {"x": normal(2, 3)}, ["x"], gradient=True, n=0.5),
    case("ThresholdedRelu", {"x": f32(-1, 0, 0.5, 1, 1.5)}, ["out"], gradient=True),
    case("ThresholdedRelu", {"x": normal(2, 3)}, ["x"], gradient=True, alpha=0.25),
    case("ThresholdedRelu", {"x": f32(-1, -0.4, 0, 0.5)}, ["out"], alpha=-0.5),
]
