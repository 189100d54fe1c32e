"""Caffe2's nets: records, wire format, operators, building, running and differentiating, cells. `ir.py` has the records.

In: nets: files, records, or calls of a builder. Out: blobs, JAX functions and backward nets. Read `ir.py` first.
"""

from typing import TYPE_CHECKING

from jrnn.lazy import attributes

if TYPE_CHECKING:  # the names of _HOMES for type checkers
    from jrnn.nets.autodiff import add_gradients as add_gradients
    from jrnn.nets.builder import NetBuilder as NetBuilder
    from jrnn.nets.gradient_maker import GradientSlice as GradientSlice
    from jrnn.nets.ir import Net as Net
    from jrnn.nets.ir import Op as Op
    from jrnn.nets.lowering import infer_shapes as infer_shapes
    from jrnn.nets.lowering import run_net as run_net
    from jrnn.nets.lowering import to_jax as to_jax
    from jrnn.nets.proto import format_net as format_net
    from jrnn.nets.proto import read_net as read_net
    from jrnn.nets.proto import serialize_net as serialize_net
    from jrnn.nets.proto import write_net as write_net
    from jrnn.nets.recurrent_networks import recurrent_net as recurrent_net
    from jrnn.nets.recurrent_networks import retrieve_step_blobs as retrieve_step_blobs
    from jrnn.nets.recurrent_networks import unrolled_net as unrolled_net

_HOMES = {
    "autodiff": ["add_gradients"],
    "builder": ["NetBuilder"],
    "gradient_maker": ["GradientSlice"],
    "ir": ["Net", "Op"],
    "lowering": ["infer_shapes", "run_net", "to_jax"],
    "proto": ["format_net", "read_net", "serialize_net", "write_net"],
    "recurrent_networks": ["recurrent_net", "retrieve_step_blobs", "unrolled_net"],
}
__getattr__, __dir__ = attributes(__name__, _HOMES)
__all__ = sorted(name for names in _HOMES.values() for name in names)
