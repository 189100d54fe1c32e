"""How much memory is free: what is read from a file, or made, must fit there."""

from __future__ import annotations

import os

import jax

from jrnn.errors import DataError
from jrnn.files.reading import read_text

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def available() -> int:
    """Returns how many bytes of memory are free: of the machine, or of its largest accelerator if that has more."""
    accelerators = (d for d in jax.local_devices() if d.platform != "cpu")
    limits: list[int] = [(d.memory_stats() or {}).get("bytes_limit", 0) for d in accelerators]
    return max(free(), 0, *limits)


def free() -> int:
    """Returns how many bytes of the machine's memory are free, at most what a container may use."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/proc/meminfo", *_LIMITS):
        try:
            text = read_text(path, DataError)
        except DataError:
            continue
        if path == "/proc/meminfo":
            lines = (line.split() for line in text.splitlines() if line.startswith("MemAvailable:"))
            bounds += [int(words[1]) * 1024 for words in lines]
        elif text.strip().isdigit():
            bounds.append(int(text))
    return min(bounds)
