"""Wrappers of the step: masks, loops that stop early, and what a reverse pass computes again.

In: a step and options of `scan`. Out: a step that does what they ask for. Read `masking.py` first.
"""
