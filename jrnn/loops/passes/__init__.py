"""The passes over a loop. A pass is a pure function of a `Loop`; `fission` splits the result into parts.

In: a `Loop`. Out: an equal `Loop` that is cheaper, or its parts before, in and after the loop. Read `fission.py` first.
"""

from jrnn.loops.passes.fission import Fission, Moves, movable, split
from jrnn.loops.passes.gates import join_activations, slice_operands
from jrnn.loops.passes.products import reads_rows, transpose_constant_rhs
from jrnn.loops.passes.simplify import common_subexpressions, compose_views, pads_to_concatenate
from jrnn.loops.passes.sums import WideSums, widen_sums

__all__ = [
    "Fission",
    "Moves",
    "WideSums",
    "common_subexpressions",
    "compose_views",
    "join_activations",
    "movable",
    "pads_to_concatenate",
    "reads_rows",
    "slice_operands",
    "split",
    "transpose_constant_rhs",
    "widen_sums",
]
