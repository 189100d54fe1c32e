"""The backends that a loop is planned for: one file each, with a function `plan(loop, target, options) -> LoopPlan`."""

from __future__ import annotations

from jrnn.loops import jaxprs
from jrnn.loops.loop import Loop
from jrnn.loops.mark import Options
from jrnn.loops.plan import LoopPlan, Target
from jrnn.loops.targets import accelerator, cpu, gpu, tpu

_TARGETS = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    by_name = tpu if options.executor == tpu.KERNEL else None  # the kernel is interpreted on other platforms
    return (by_name or _TARGETS.get(target.platform, accelerator)).plan(loop, target, options)
