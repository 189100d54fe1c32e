"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.loops.costs import tuned
from jrnn.loops.costs.candidates import REFERENCE, Candidate
from jrnn.loops.loop import Loop, Options
from jrnn.loops.plans import LoopPlan, Node, Target

PLANNED = "as planned"  # the way that a backend chose, where it compares no candidates


class Backend(NamedTuple):
    """How loops are planned for some platforms.

    Attributes:
        plan: from a loop, what it is lowered for and the caller's options to a node that runs it, or to the reason why it is
            left to `jax.lax.scan`, or to a `LoopPlan`, which says more. With `ways`, also from the way to take, or None for
            the one that is estimated to be best.
        platforms: the platforms of JAX.
        ways: returns all ways to run a loop, and `Question.held`; None if the backend compares no candidates.
    """

    plan: Callable[..., Node | str | LoopPlan]
    platforms: tuple[str, ...] = ()
    ways: Callable[[Loop, Target, Options], tuple[list[Candidate], tuple[int, int]]] | None = None

    def planned(self, loop: Loop, target: Target, options: Options, take: str | None = None) -> LoopPlan:
        """Returns the plan of a loop: the way `take` if there is such a one, or else the one that is estimated best."""
        if jaxprs.is_known(loop.length) and loop.length == 0:
            return LoopPlan.left(target, loop, "it has no steps")
        if take is None and options.executor == "auto" and not options.strict and _has_one_step(loop):
            return LoopPlan.left(target, loop, "it has one step")
        if take == REFERENCE and self.ways is None:
            return LoopPlan.left(target, loop, tuned.NOTE + take)
        plan = self.plan(loop, target, options, *([take] if self.ways is not None else []))
        if isinstance(plan, str):
            return LoopPlan.left(target, loop, plan)
        return plan if isinstance(plan, LoopPlan) else LoopPlan(target, loop, plan, plan.way)

    def ways_of(self, plan: LoopPlan, options: Options) -> tuple[tuple[str, ...], tuple[int, int]]:
        """Returns all ways to run the loop of a plan, its own first; and `Question.held`."""
        if self.ways is None or plan.choice is None or plan.loop is None:
            return tuple(dict.fromkeys([PLANNED if plan.executor != REFERENCE else REFERENCE, REFERENCE])), (0, 0)
        others, held = self.ways(plan.loop, plan.target, options)
        others.sort(key=lambda candidate: candidate.estimate.seconds)
        every = [plan.choice.chosen.node.way, REFERENCE, *(candidate.node.way for candidate in others)]
        return tuple(dict.fromkeys(every)), held


def _has_one_step(loop: Loop) -> bool:
    return jaxprs.is_known(loop.length) and loop.length == 1
