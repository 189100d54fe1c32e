"""The backends that a loop is planned for: one file each, with a function `plan(loop, target, options) -> LoopPlan`."""

from __future__ import annotations

from jrnn import jaxprs
from jrnn.loops.backends import accelerator, cpu, gpu, tpu
from jrnn.loops.loop import Loop
from jrnn.loops.mark import Options
from jrnn.loops.plans.plan import LoopPlan, Target

_TARGETS = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
_BY_NAME = {tpu.KERNEL: tpu}  # executors with a plan of their own; the kernel is interpreted on other platforms


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    platforms = _TARGETS.get(target.platform, accelerator)
    return _BY_NAME.get(options.executor, platforms).plan(loop, target, options)
