"""The backends that a loop is planned for: one file each, with a function `plan(loop, target, options) -> LoopPlan`."""

from __future__ import annotations

from jrnn import jaxprs
from jrnn.loops import tuned
from jrnn.loops.costs import REFERENCE
from jrnn.loops.loop import Loop
from jrnn.loops.mark import Options
from jrnn.loops.plan import LoopPlan, Target
from jrnn.loops.targets import accelerator, cpu, gpu, tpu

PLANNED = "as planned"  # the way that a target chose, where it compares no candidates
_TARGETS = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
_BY_NAME = {tpu.KERNEL: tpu}  # executors with a plan of their own; the kernel is interpreted on other platforms


def plan(loop: Loop, target: Target, options: Options, take: str | None = None) -> LoopPlan:
    """Returns the plan of a loop: the way `take` if there is such a one, or else the one that is estimated to be best."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    backend = _BY_NAME.get(options.executor, _TARGETS.get(target.platform, accelerator))
    if backend is cpu:
        return cpu.plan(loop, target, options, take)
    if take == REFERENCE:
        return LoopPlan.left(target, loop, tuned.NOTE + take)
    return backend.plan(loop, target, options)


def ways(planned: LoopPlan, options: Options) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Returns the names of all ways to run the loop of a plan, that of the plan first; and `Question.held`."""
    if planned.target.platform != "cpu" or planned.choice is None or planned.loop is None:
        return tuple(dict.fromkeys([PLANNED if planned.executor != REFERENCE else REFERENCE, REFERENCE])), (0, 0)
    others, held = cpu.ways(planned.loop, planned.target, options)
    others.sort(key=lambda way: way.estimate.seconds)
    return tuple(dict.fromkeys([planned.choice.chosen.way, REFERENCE, *(way.way for way in others)])), held
