"""Loops whose derivative is cheaper: steps with fewer residuals, and checkpointed steps in segments.

In: a step, or a loop, that JAX is about to differentiate. Out: one that stores less. Read `residuals.py` first.

`differentiate.py`, above this room, says when each is used.
"""
