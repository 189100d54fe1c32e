"""Memory of the host that is freed and asked for again at every step of a training.

XLA:CPU asks for the temporary memory of a program when it runs it, and frees it afterwards. glibc gives what is larger than
32 MB back to the system each time, and the next run meets a page fault for every 4 KiB: a tenth of the time of a
training step that needs 50 MB (docs/notes/cpu_log.md).
"""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1

kept = False  # whether this process keeps its memory


def keep() -> bool:
    """Lets this process keep the memory that it frees, for its next request; False where the C library cannot.

    It holds for all that the process does, and a process keeps its peak until it ends. So a program asks for it, at its
    start, before JAX has run anything: the command `jrnn` does. A library should not.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    global kept
    # One arena, as others cannot grow beyond 64 MB; no mappings of their own for large requests; no trimming.
    kept = all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _NEVER)])
    return kept
