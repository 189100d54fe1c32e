"""The passes over a loop. A pass is a pure function of a `Loop`; `split` divides the result into parts.

In: a `Loop`. Out: an equal `Loop` that is cheaper, or its parts before, in and after the loop. Read `split_loop.py` first.
"""

from jrnn.loops.passes.gates import slice_operands
from jrnn.loops.passes.moves import NOTHING_MOVES, Moves
from jrnn.loops.passes.simplify import common_subexpressions, compose_views, pads_to_concatenate
from jrnn.loops.passes.split_loop import SplitLoop, movable, split
from jrnn.loops.passes.transposed_weights import reads_rows, transpose_constant_rhs
from jrnn.loops.passes.wide_sums import widen_sums

__all__ = [
    "NOTHING_MOVES",
    "Moves",
    "SplitLoop",
    "common_subexpressions",
    "compose_views",
    "movable",
    "pads_to_concatenate",
    "reads_rows",
    "slice_operands",
    "split",
    "transpose_constant_rhs",
    "widen_sums",
]
