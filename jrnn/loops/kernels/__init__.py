"""Kernels that run a whole loop: `native` for CPUs, in C++."""

from jrnn.loops.kernels.refused import Refused

__all__ = ["Refused"]
