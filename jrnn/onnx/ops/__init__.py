"""The operators of ONNX that jrnn reads; importing this package fills `jrnn.onnx.graph.OPERATORS`.

In: arrays and attributes of a node. Out: arrays. Read `elementwise_nodes.py` first.
"""

from jrnn.onnx.ops import (
    contract,
    control_nodes,
    elementwise_nodes,
    microsoft,
    quantized,
    recurrent,
    resize,
    shapes,
    signals,
    windows,
)
