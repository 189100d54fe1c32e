"""Kernels that run a whole loop: `native` for CPUs, in C++.

In: a `Loop`. Out: a node that runs all of it in one call, or the reason why none does. Read `native/steps.py` first.
"""
