"""The backends that a loop is planned for, one file each. A backend proposes nodes (`plans/`); `BACKENDS` is the table."""

from __future__ import annotations

from collections.abc import Callable

from jrnn import jaxprs
from jrnn.loops.backends import accelerator, cpu, gpu, tpu
from jrnn.loops.loop import Loop
from jrnn.loops.mark import Options
from jrnn.loops.plans import LoopPlan, Target

# The platform, or the executor that chooses the backend on every platform.
BACKENDS: dict[str, Callable[[Loop, Target, Options], LoopPlan]] = {
    "cpu": cpu.plan,
    "cuda": gpu.plan,
    "rocm": gpu.plan,
    "tpu": tpu.plan,
    tpu.KERNEL: tpu.plan,
}


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of a loop."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    of_platform = BACKENDS.get(target.platform, accelerator.plan)
    return BACKENDS.get(options.executor, of_platform)(loop, target, options)
