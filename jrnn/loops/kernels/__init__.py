"""A loop as one kernel: `native` for CPUs, in C++, and `unrolled`, tiny loops of which XLA makes one.

In: a `Loop`. Out: a node that runs all of it in one call, or the reason why none does. Read `native/steps.py` first.
"""
