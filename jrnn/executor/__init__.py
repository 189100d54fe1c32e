"""The executor behind `jrnn.scan`. It is pure JAX and does not depend on nets."""

from jrnn.executor import host_devices, host_memory
from jrnn.executor.cudnn import LstmStep
from jrnn.executor.explain import Explanation, explain_scan
from jrnn.executor.scan import EXECUTORS, optimize_scans, scan
from jrnn.executor.while_loop import CHECKPOINTED, Trips, while_loop

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
