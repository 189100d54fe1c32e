"""The public functions `scan`, `optimize_scans` and `plain_scans`: a pipeline of wrappers, and the table of executors.

In: the arguments of `scan`. Out: a tagged `jax.lax.scan`. Read `scan.py` first.
"""
