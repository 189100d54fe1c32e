"""The recurrent executor behind `jrnn.scan`: pure JAX, it knows nothing of nets."""

from jrnn.executor import host_devices, host_memory
from jrnn.executor.explain import Explanation, explain_scan
from jrnn.executor.lstm_step import LstmStep
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
