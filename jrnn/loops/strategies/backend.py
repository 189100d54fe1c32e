"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.loops.ir import Loop, Options
from jrnn.loops.strategies import LoopPlan, Node, Target


class Backend(NamedTuple):
    """How loops are planned for some platforms.

    Attributes:
        plan: from a loop, what it is lowered for and the caller's options to a node that runs it, or to the reason why it is
            left to `jax.lax.scan`, or to a `LoopPlan`, which says more.
        platforms: the platforms of JAX.
    """

    plan: Callable[..., Node | str | LoopPlan]
    platforms: tuple[str, ...] = ()

    def planned(self, loop: Loop, target: Target, options: Options) -> LoopPlan:
        """Returns the plan of a loop."""
        if jaxprs.is_known(loop.length) and loop.length == 0:
            return LoopPlan.left(target, loop, "it has no steps")
        if options.executor == "auto" and not options.strict and _has_one_step(loop):
            return LoopPlan.left(target, loop, "it has one step")
        plan = self.plan(loop, target, options)
        if isinstance(plan, str):
            return LoopPlan.left(target, loop, plan)
        return plan if isinstance(plan, LoopPlan) else LoopPlan(target, loop, plan, plan.way)


def _has_one_step(loop: Loop) -> bool:
    return jaxprs.is_known(loop.length) and loop.length == 1
