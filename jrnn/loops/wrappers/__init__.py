"""Wrappers of the step: masks, loops that stop early, and what a reverse pass computes again.

In: a step and options of `scan`. Out: a step with these options applied. Read `masking.py` first.
"""
