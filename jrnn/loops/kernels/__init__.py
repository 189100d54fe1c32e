"""Kernels that run a whole loop: `persistent` for TPUs, in tiles, and `native` for CPUs, in C++."""

from jrnn.loops.kernels.refused import Refused

__all__ = ["Refused"]
