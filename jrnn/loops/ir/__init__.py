"""A loop as data, its tag, the observers of lowered loops, and the check that a derived form of it agrees with it.

In: a scan equation of JAX. Out: a `Loop` with its tag, and what observers hear of it. Read `loop.py` first.
"""

from jrnn.loops.ir.loop import (
    Adapter,
    Length,
    Loop,
    Results,
    RunLoop,
    Values,
    checked_passes,
    strict_passes,
)
from jrnn.loops.ir.scans import (
    FlatScan,
    RunSome,
    ScanParams,
    StepFn,
    Tree,
    promoted,
    recomputed,
    scan_in_chunks,
    scan_in_segments,
    traced_loops,
)
from jrnn.loops.ir.tag import AUTO, Options, Provenance, Tag
from jrnn.loops.ir.unsupported import CARRY, Unsupported

__all__ = [
    "AUTO",
    "CARRY",
    "Adapter",
    "FlatScan",
    "Length",
    "Loop",
    "Options",
    "Provenance",
    "Results",
    "RunLoop",
    "RunSome",
    "ScanParams",
    "StepFn",
    "Tag",
    "Tree",
    "Unsupported",
    "Values",
    "checked_passes",
    "promoted",
    "recomputed",
    "scan_in_chunks",
    "scan_in_segments",
    "strict_passes",
    "traced_loops",
]
