"""A loop as one kernel: `native` for CPUs, in C++, and `unrolled`, for tiny loops that XLA compiles to one.

In: a `Loop`. Out: a node that runs all of it in one call, or the reason why none does. Read `native/steps.py` first.
"""
