"""A loop as data, its mark, what is heard of it, and the check that a derived form of it agrees with it."""

from jrnn.loops.loop.flat import FlatScan, promoted
from jrnn.loops.loop.mark import Options
from jrnn.loops.loop.record import Loop, Results, RunLoop, ScanParams, strict_passes

__all__ = ["FlatScan", "Loop", "Options", "Results", "RunLoop", "ScanParams", "promoted", "strict_passes"]
