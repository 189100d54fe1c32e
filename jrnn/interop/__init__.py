"""Weights of other systems' recurrent layers, to and from PyTorch's names and layout.

In: parameters of a layer of another system. Out: a state dict with PyTorch's names, and back. Read `torch_weights.py`
first.
"""

from jrnn.interop.caffe2_cells import from_caffe2, to_caffe2
from jrnn.interop.flax_cells import from_flax, to_flax
from jrnn.interop.rnn_layers import (
    from_arraymancer,
    from_keras,
    from_onnx_arrays,
    to_arraymancer,
    to_keras,
    to_onnx_arrays,
)
from jrnn.interop.torch_weights import load_state_dict, save_state_dict
from jrnn.interop.whole_modules import LoadReport, load_module
from jrnn.nn.conventions import CONVENTIONS, Convention, convention, reorder

__all__ = [
    "CONVENTIONS",
    "Convention",
    "LoadReport",
    "convention",
    "from_arraymancer",
    "from_caffe2",
    "from_flax",
    "from_keras",
    "from_onnx_arrays",
    "load_module",
    "load_state_dict",
    "reorder",
    "save_state_dict",
    "to_arraymancer",
    "to_caffe2",
    "to_flax",
    "to_keras",
    "to_onnx_arrays",
]
