"""Kernels that run a whole loop.

`forms` and `rules` compute a step with tiles. `tiles` finds the forms of its values. `mosaic` is the kernel for TPUs.
`persistent` checks whether a loop fits, and runs it.
"""

from jrnn.loops.kernels.forms import Refused

__all__ = ["Refused"]
