"""Host memory that is freed and allocated again at every training step.

XLA:CPU allocates the temporary memory of a program for each run, and frees it afterwards. glibc returns allocations of more
than 32 MB to the system each time, and the next run has a page fault for every 4 KiB. That takes a tenth of the time of a
training step that needs 50 MB (docs/notes/cpu_log.md).
"""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1

kept = False  # whether this process keeps its memory


def keep() -> bool:
    """Lets this process keep the memory that it frees, for its next allocation. Returns False if the C library cannot.

    This affects the whole process, which keeps its peak memory until it ends. So a program should call it at its start,
    before JAX runs anything, as the command `jrnn` does. A library should not.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    global kept
    # One arena, because others cannot grow beyond 64 MB; no separate mappings for large allocations; no trimming.
    kept = all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _NEVER)])
    return kept
