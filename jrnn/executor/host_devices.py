"""A CPU as several JAX devices, so that each of its cores runs the loop over a part of the batch.

XLA:CPU runs a loop of small contractions on one core. Divided among devices, a batch has as many loops; JAX's own runtime
divides the work where the data lies so (docs/benchmarks.md says what it gives, and from which size on it costs).
"""

from __future__ import annotations

import os

import jax

_FLAG = "xla_force_host_platform_device_count"


def divide(count: int) -> bool:
    """Lets the CPU count as `count` devices; False where XLA_FLAGS say already how many, or JAX has begun.

    It holds for all that the process does, so a program asks for it, at its start, before JAX has run anything: the command
    `jrnn train --devices N` does. Data must then be put on the devices in parts, and weights on all (docs/scaling.md).
    """
    if _FLAG in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True
