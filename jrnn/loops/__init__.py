"""The executor behind `jrnn.scan`. It is pure JAX and does not depend on nets."""

from jrnn.loops import host_devices, host_memory
from jrnn.loops.cudnn import LstmStep
from jrnn.loops.executors import EXECUTORS
from jrnn.loops.explain import Explanation, ProgramExplanation, explain, explain_scan
from jrnn.loops.optimize import optimize_scans, plain_scans
from jrnn.loops.scan import scan
from jrnn.loops.trips import CHECKPOINTED, Trips
from jrnn.loops.while_loop import while_loop

__all__ = [
    "Explanation",
    "LstmStep",
    "ProgramExplanation",
    "Trips",
    "explain",
    "explain_scan",
    "host_devices",
    "host_memory",
    "optimize_scans",
    "plain_scans",
    "scan",
    "while_loop",
]
