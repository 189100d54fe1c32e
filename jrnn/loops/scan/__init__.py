"""The public functions `scan`, `optimize_scans` and `plain_scans`, and the names of executors.

In: the arguments of `scan`. Out: a tagged `jax.lax.scan`. Read `scan.py` first.
"""
