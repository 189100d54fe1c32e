"""What a program sets up for its process before JAX starts: a CPU as several devices, and memory that is retained.

XLA:CPU runs a loop of small contractions on one core. If the batch is divided among devices, JAX runs one loop per device.
docs/benchmarks.md has the gain, and the size from which on it costs time.

XLA:CPU allocates the temporary memory of a program for each run, and frees it afterwards. glibc returns allocations of more
than 32 MB to the system each time, and the next run has a page fault for every 4 KiB. That takes a tenth of the time of a
training step that needs 50 MB (docs/notes/cpu_log.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

import jax

_FLAG = "xla_force_host_platform_device_count"
# From glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8
_NEVER = 2**31 - 1

retains_memory = False  # whether this process retains freed memory


def divide_cpu(count: int) -> bool:
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


def retain_memory() -> bool:
    """Lets this process retain the memory that it frees, for its next allocation. Returns False if the C library cannot.

    This affects the whole process, which retains its peak memory until it ends. So a program should call it at its start,
    before JAX runs anything, as the command `jrnn` does. A library should not.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    global retains_memory
    # One arena, because others cannot grow beyond 64 MB; no separate mappings for large allocations; no trimming.
    retains_memory = all(
        [mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _NEVER)]
    )
    return retains_memory
