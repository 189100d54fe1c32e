"""The executor behind `jrnn.scan`. It patches JAX's rules for loops, and does not depend on nets.

In: a step, its carry and its inputs. Out: the results of a loop that runs in another form. Read `scan/scan.py` first.

What a plain scan does not need loads when it is first used.
"""

from typing import TYPE_CHECKING

from jrnn.lazy import attributes
from jrnn.loops import install
from jrnn.loops.newton import Newton, ScanStatistics
from jrnn.loops.scan.executors import COMPARED_EXECUTORS
from jrnn.loops.scan.scan import scan
from jrnn.loops.wrappers.compiled_calls import compiled_once
from jrnn.loops.wrappers.recompute import Recompute, hashable

if TYPE_CHECKING:  # the names of _HOMES for type checkers
    from jrnn.loops.derivatives.online import OnlineGradient, OnlineState, online_gradient
    from jrnn.loops.explanations.explain import Explanation, explain
    from jrnn.loops.newton.api import scan_statistics
    from jrnn.loops.scan import host
    from jrnn.loops.scan.optimize import optimize_scans, plain_scans, unverified
    from jrnn.loops.while_loops.trips import CHECKPOINTED, Trips
    from jrnn.loops.while_loops.while_loop import while_loop

_HOMES = {  # module -> the names in it that load lazily
    "explanations.explain": ("Explanation", "explain"),
    "newton.api": ("scan_statistics",),
    "derivatives.online": ("OnlineGradient", "OnlineState", "online_gradient"),
    "scan": ("host",),
    "scan.optimize": ("optimize_scans", "plain_scans", "unverified"),
    "while_loops.trips": ("CHECKPOINTED", "Trips"),
    "while_loops.while_loop": ("while_loop",),
}
install.install()
__getattr__, __dir__ = attributes(__name__, _HOMES)

__all__ = [
    "Explanation",
    "Newton",
    "OnlineGradient",
    "OnlineState",
    "ScanStatistics",
    "Trips",
    "explain",
    "host",
    "online_gradient",
    "optimize_scans",
    "plain_scans",
    "scan",
    "scan_statistics",
    "unverified",
    "while_loop",
]
