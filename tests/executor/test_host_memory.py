"""Memory that was freed is had again without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jrnn.executor import host_memory

COUNT = """
import resource, sys, numpy as np
if sys.argv[1:]:
    import runpy
    assert runpy.run_path(sys.argv[1])["keep"]()
for turn in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(10_000_000)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is about glibc")
def test_memory_is_kept():
    def faults(*args):
        return int(subprocess.check_output([sys.executable, "-c", COUNT, *args], text=True))

    assert faults(host_memory.__file__) < faults() / 4
