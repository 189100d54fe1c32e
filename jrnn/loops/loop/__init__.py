"""A loop as data, its mark, what is heard of it, and the check that a derived form of it agrees with it."""

from jrnn.loops.loop.mark import Options
from jrnn.loops.loop.record import Loop, Results, loop_of, strict_passes

__all__ = ["Loop", "Options", "Results", "loop_of", "strict_passes"]
