"""The executor behind `jrnn.scan`. It is pure JAX and does not depend on nets."""

from jrnn.loops import host_devices, host_memory
from jrnn.loops.cudnn import LstmStep
from jrnn.loops.explain import Explanation, explain_scan
from jrnn.loops.scan import EXECUTORS, optimize_scans, scan
from jrnn.loops.while_loop import CHECKPOINTED, Trips, while_loop

__all__ = [
    "Explanation",
    "LstmStep",
    "Trips",
    "explain_scan",
    "host_devices",
    "host_memory",
    "optimize_scans",
    "scan",
    "while_loop",
]
