"""The backends that a loop is planned for, one file each. A backend proposes nodes (`plans/`); `BACKENDS` is the table."""

from __future__ import annotations

from collections.abc import Callable

from jrnn import jaxprs
from jrnn.loops.backends import accelerator, cpu, gpu, tpu
from jrnn.loops.costs import tuned
from jrnn.loops.costs.candidates import REFERENCE
from jrnn.loops.loop import Loop, Options
from jrnn.loops.plans import LoopPlan, Target

PLANNED = "as planned"  # the way that a backend chose, where it compares no candidates

# The platform, or the executor that chooses the backend on every platform.
BACKENDS: dict[str, Callable[[Loop, Target, Options], LoopPlan]] = {
    "cpu": cpu.plan,
    "cuda": gpu.plan,
    "rocm": gpu.plan,
    "tpu": tpu.plan,
    tpu.KERNEL: tpu.plan,
}


def plan(loop: Loop, target: Target, options: Options, take: str | None = None) -> LoopPlan:
    """Returns the plan of a loop: the way `take` if there is such a one, or else the one that is estimated to be best."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    backend = BACKENDS.get(options.executor, BACKENDS.get(target.platform, accelerator.plan))
    if backend is cpu.plan:
        return cpu.plan(loop, target, options, take)
    if take == REFERENCE:
        return LoopPlan.left(target, loop, tuned.NOTE + take)
    return backend(loop, target, options)


def ways(planned: LoopPlan, options: Options) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Returns the names of all ways to run the loop of a plan, that of the plan first; and `Question.held`."""
    if planned.target.platform != "cpu" or planned.choice is None or planned.loop is None:
        return tuple(dict.fromkeys([PLANNED if planned.executor != REFERENCE else REFERENCE, REFERENCE])), (0, 0)
    others, held = cpu.ways(planned.loop, planned.target, options)
    others.sort(key=lambda way: way.estimate.seconds)
    return tuple(dict.fromkeys([planned.choice.chosen.way, REFERENCE, *(way.way for way in others)])), held
