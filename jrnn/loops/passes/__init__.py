"""The passes over a loop. A pass is a pure function of a `Loop`; `fission` splits the result into parts.

In: a `Loop`. Out: an equal `Loop` that is cheaper, or its parts before, in and after the loop. Read `fission.py` first.
"""

from jrnn.loops.passes.fission import Fission, Moves, movable, split
from jrnn.loops.passes.gates import activate_together, slice_apart
from jrnn.loops.passes.products import columns, reads_rows
from jrnn.loops.passes.simplify import concatenate_cotangents, direct_views, distinct
from jrnn.loops.passes.sums import WideSums, widen_sums

__all__ = [
    "Fission",
    "Moves",
    "WideSums",
    "activate_together",
    "columns",
    "concatenate_cotangents",
    "direct_views",
    "distinct",
    "movable",
    "reads_rows",
    "slice_apart",
    "split",
    "widen_sums",
]
