"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jrnn.loops.costs.candidates import Candidate
from jrnn.loops.loop import Loop, Options
from jrnn.loops.plans import LoopPlan, Target


@dataclass(frozen=True)
class Backend:
    """How loops are planned for some platforms.

    Attributes:
        serves: the platforms of JAX, and the executors that choose this backend on every platform.
        plan: from a loop, what it is lowered for and the caller's options to its plan; with `ways`, also from the name of
            the way to take, or None for the one that is estimated to be best.
        ways: returns all ways to run a loop, and `Question.held`; None if the backend compares no candidates.
    """

    serves: tuple[str, ...]
    plan: Callable[..., LoopPlan]
    ways: Callable[[Loop, Target, Options], tuple[list[Candidate], tuple[int, int]]] | None = None
