"""The executor behind `jrnn.scan`. It is pure JAX and does not depend on nets.

What a plain scan does not need loads when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jrnn.loops.explain.explain import Explanation, ProgramExplanation, explain, explain_scan
from jrnn.loops.explain.report import LoopReport, Report, report
from jrnn.loops.newton import Newton, ScanStatistics
from jrnn.loops.scan.executors import EXECUTORS
from jrnn.loops.scan.optimize import optimize_scans, plain_scans
from jrnn.loops.scan.scan import scan
from jrnn.loops.while_loops.while_loop import while_loop

if TYPE_CHECKING:  # the names of _HOMES for type checkers
    from jrnn.loops import host_devices, host_memory
    from jrnn.loops.newton.api import scan_statistics
    from jrnn.loops.online import OnlineGradient, OnlineState, online_gradient
    from jrnn.loops.scan.cudnn import LstmStep
    from jrnn.loops.while_loops.trips import CHECKPOINTED, Trips

_HOMES = {
    "LstmStep": "scan.cudnn",
    "scan_statistics": "newton.api",
    "OnlineGradient": "online",
    "OnlineState": "online",
    "online_gradient": "online",
    "CHECKPOINTED": "while_loops.trips",
    "Trips": "while_loops.trips",
}

__all__ = [
    "Explanation",
    "LoopReport",
    "LstmStep",
    "Newton",
    "OnlineGradient",
    "OnlineState",
    "ProgramExplanation",
    "Report",
    "ScanStatistics",
    "Trips",
    "explain",
    "explain_scan",
    "host_devices",
    "host_memory",
    "online_gradient",
    "optimize_scans",
    "plain_scans",
    "report",
    "scan",
    "scan_statistics",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name in ("host_devices", "host_memory"):
        return import_module(f"jrnn.loops.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jrnn.loops' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"jrnn.loops.{_HOMES[name]}"), name)
    return value
