"""A CPU as several JAX devices, so that each of its cores runs the loop over a part of the batch.

XLA:CPU runs a loop of small contractions on one core. If the batch is divided among devices, JAX runs one loop per device.
docs/benchmarks.md has the gain, and the size from which on it costs time.
"""

from __future__ import annotations

import os

import jax

_FLAG = "xla_force_host_platform_device_count"


def divide(count: int) -> bool:
    """Makes the CPU count as `count` devices. Returns False if XLA_FLAGS sets their number, or if JAX has started.

    This affects the whole process, so a program should call it at its start, before JAX runs anything, as the command
    `jrnn train --devices N` does. Then divide the data among the devices, and copy the weights to all (docs/scaling.md).
    """
    if _FLAG in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True
