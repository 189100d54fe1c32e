"""ONNX models in and out: `jrnn.from_onnx` and `jrnn.to_onnx`; needs the extra `onnx`, see docs/onnx.md.

In: a model file; or a JAX function with examples. Out: an `OnnxModel` to call or to train; or a model. Read `read.py`
first.
"""

from jrnn.onnx import (  # these fill the tables of operators and of rules
    attention_loops,
    bodies,
    ops,
    places,
    primitives,
    window_rules,
)
from jrnn.onnx.read import OnnxModel, Spec, from_onnx
from jrnn.onnx.write import to_onnx

__all__ = ["OnnxModel", "Spec", "from_onnx", "to_onnx"]
