"""The public functions `scan`, `optimize_scans` and `plain_scans`, the names of executors, and what a process sets up.

In: the arguments of `scan`. Out: a tagged `jax.lax.scan`. Read `scan.py` first.
"""

from jrnn.lazy import attributes

__getattr__, __dir__ = attributes(__name__, {})
