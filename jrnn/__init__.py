"""jrnn: a JAX-compiled functional engine for recurrent networks, wire-compatible with Caffe2's.

The names here are the public ones; see the README for a first run.
"""

from . import ops as ops  # fills the table of operators
from .autodiff import GradientSlice, add_gradients
from .executor import scan
from .ir import Net, Op
from .lowering import infer_shapes, run_net, to_jax

__all__ = [
    "GradientSlice",
    "Net",
    "Op",
    "add_gradients",
    "infer_shapes",
    "run_net",
    "scan",
    "to_jax",
]
