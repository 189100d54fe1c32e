"""The operators of ONNX that jrnn reads; importing this package fills `jrnn.onnx.graph.OPERATORS`."""

from jrnn.onnx.ops import contract, control, elementwise, quantized, recurrent, resize, shapes, windows
