"""What a loop is planned for. A backend is one file here: a function `(loop, target, options) -> LoopPlan`."""

from __future__ import annotations

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop
from jrnn.executor.mark import Options
from jrnn.executor.plan import LoopPlan, Target
from jrnn.executor.targets import accelerator, cpu, gpu, tpu

_TARGETS = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """The plan of a loop for a target."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    asked = tpu if options.executor == tpu.KERNEL else None  # interpreted where the platform is another
    return (asked or _TARGETS.get(target.platform, accelerator)).plan(loop, target, options)
