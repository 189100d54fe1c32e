"""The passes over a loop, one a file. A pass is a pure function of a `Loop`; `fission` takes the result apart."""

from jrnn.executor.passes.batch_first import batch_first
from jrnn.executor.passes.columns import columns
from jrnn.executor.passes.cotangents import concatenate_cotangents
from jrnn.executor.passes.duplicates import distinct
from jrnn.executor.passes.fission import Fission, split
from jrnn.executor.passes.gates import activate_together, slice_apart
from jrnn.executor.passes.packed import Packed, pack_stacks
from jrnn.executor.passes.stages import Staged, one_kernel_a_stage
from jrnn.executor.passes.views import direct_views
from jrnn.executor.passes.wide_sums import WideSums, widen_sums

__all__ = [
    "Fission",
    "Packed",
    "Staged",
    "WideSums",
    "activate_together",
    "batch_first",
    "columns",
    "concatenate_cotangents",
    "direct_views",
    "distinct",
    "one_kernel_a_stage",
    "pack_stacks",
    "slice_apart",
    "split",
    "widen_sums",
]
