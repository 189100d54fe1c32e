"""ONNX models in and out: `jrnn.from_onnx` and `jrnn.to_onnx`; needs the extra `onnx`, see docs/onnx.md."""

from jrnn.onnx.model import OnnxModel, Spec, from_onnx

__all__ = ["OnnxModel", "Spec", "from_onnx"]
