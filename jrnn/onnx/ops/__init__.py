"""The operators of ONNX that jrnn reads; importing this package fills `jrnn.onnx.graph.OPERATORS`.

In: arrays and attributes of a node. Out: arrays. Read `elementwise.py` first.
"""

from jrnn.onnx.ops import (
    contract,
    control,
    elementwise,
    microsoft,
    quantized,
    recurrent,
    resize,
    shapes,
    signals,
    windows,
)
