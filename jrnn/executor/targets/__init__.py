"""What a loop is planned for. A backend is one file here: a function `(loop, target, options) -> Plan`."""

from __future__ import annotations

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop
from jrnn.executor.mark import Options
from jrnn.executor.plan import Plan, Target
from jrnn.executor.targets import accelerator, cpu, gpu

_TARGETS = {"cpu": cpu, "cuda": gpu, "rocm": gpu}


def plan(loop: Loop, target: Target, options: Options) -> Plan:
    """The plan of a loop for a target."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return Plan.left(target, loop, "it has no steps")
    return _TARGETS.get(target.platform, accelerator).plan(loop, target, options)
