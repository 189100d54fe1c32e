"""LoopPlan: what was decided for a loop. It is run, cached, and printed by `explain`."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jrnn.jaxprs.jax_internals import platform_of
from jrnn.loops.costs import machines
from jrnn.loops.costs.compilation import added_seconds
from jrnn.loops.costs.machines import CPU, Machine
from jrnn.loops.ir import Loop
from jrnn.loops.ir.description import Description, Item, contractions, described
from jrnn.loops.strategies.candidates import Choice
from jrnn.loops.strategies.nodes import Node

NOTHING_TO_GAIN = "nothing to gain"  # the note of a loop that no candidate makes faster
_NOTICED = 0.1  # seconds of compilation that are worth a sentence
_SHOWN = 2  # the most values of each kind that are printed


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of JAX


@dataclass(frozen=True)
class Target:
    """What a loop is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        devices: the number of devices that the program is divided among.
        exported: it will run elsewhere, where custom calls of this process are unknown.
        machine: the constants of the cost model.
        repeated: it is in the body of another loop.
    """

    platform: str
    devices: int = 1
    exported: bool = False
    machine: Machine = CPU
    repeated: bool = False

    @property
    def is_estimated(self) -> bool:
        """Whether candidates for loops that are lowered are compared by estimates."""
        return self.platform == "cpu"

    @staticmethod
    def here() -> Target:
        """Returns the target of programs of this process, which are not divided."""
        platform = platform_of(jax.devices()[0].client)
        return Target(platform, machine=machines.of(platform))


@dataclass(frozen=True)
class LoopPlan:
    """How a loop is run.

    Attributes:
        target: what it is lowered for.
        loop: the loop as JAX made it, with its calls inlined, or None if it could not be read.
        node: runs it, or None if `jax.lax.scan` lowers it.
        strategy: the name of the strategy, or "lax.scan".
        notes: reasons for what was not done.
        choice: the candidates that were compared, or None.
        constants: the values of the first of `loop.consts`, which the step closes over.
        differentiated: it runs in the place of a loop that JAX is about to differentiate.
        added_compile_seconds: how much longer than `jax.lax.scan` it compiles, by estimate; None if nobody asked.
    """

    target: Target
    loop: Loop | None
    node: Node | None
    strategy: str
    notes: tuple[str, ...] = ()
    choice: Choice | None = None
    constants: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    differentiated: bool = False
    added_compile_seconds: float | None = None

    @staticmethod
    def fallback(
        target: Target, loop: Loop | None, *why: str, choice: Choice | None = None
    ) -> LoopPlan:
        """Returns a plan that leaves the loop to `jax.lax.scan`, and says why."""
        return LoopPlan(target, loop, None, "lax.scan", why, choice)

    def with_compilation(self) -> LoopPlan:
        """Returns the plan with an estimate of its compilation, for which its node is traced; without one if that fails.

        It fails for collectives, whose axes have names only where the loop is.
        """
        known = self.added_compile_seconds is not None or not self.target.is_estimated
        if known or self.node is None or self.loop is None:
            return self
        try:
            return replace(
                self,
                added_compile_seconds=added_seconds(self.node.run, self.loop, self.differentiated),
            )
        except Exception:
            return self

    @property
    def compilation(self) -> str:
        """How much longer it compiles, in words, and from how many calls on that pays; nothing if that is little."""
        added = self.added_compile_seconds
        choice = self.choice
        if added is None or added < _NOTICED:
            return ""
        reference = None if choice is None else choice.reference
        saved = (
            0.0
            if choice is None or reference is None
            else reference.seconds - choice.chosen.estimate.seconds
        )
        text = f"compiles about {round(added, 1 if added < 2 else None):g} s longer"
        if saved <= 0:
            return text
        if added <= saved:
            return f"{text}; pays from the first call on"
        runs = "runs of the loop" if self.target.repeated else "calls"
        return f"{text}; pays from {math.ceil(float(f'{added / saved:.1e}')):,} {runs} on"

    @functools.cached_property
    def description(self) -> Description:
        """What is done with the loop."""
        if self.node is not None:
            return self.node.describe()
        return Description() if self.loop is None else described(self.loop)

    @property
    def hoisted(self) -> tuple[Item, ...]:
        """Values that are computed for all steps before the loop."""
        return self.description.hoisted

    @property
    def sunk(self) -> tuple[Item, ...]:
        """Values that are computed for all steps after the loop."""
        return self.description.sunk

    @property
    def accumulated(self) -> tuple[Item, ...]:
        """Values that are summed over all steps after the loop, instead of carried."""
        return self.description.accumulated

    @property
    def stacked(self) -> tuple[Item, ...]:
        """Values that the core writes at each step. A loop that is left to `jax.lax.scan` stays whole."""
        return self.description.stacked

    @property
    def contractions(self) -> int:
        """The number of contractions that stay in the loop, with those in its branches and inner loops."""
        return self.description.contractions

    def __str__(self) -> str:
        return self.text(details=True)

    def text(self, details: bool = False) -> str:
        """Returns how the loop runs: what moved, what is left in it, and the estimate next to `lax.scan`'s.

        Args:
            details: also what the loop writes at each step, values with their lines of code, and the other candidates.
        """
        lines = [f"{self.title}: {self.strategy}"]
        written = {"written by the loop at each step": self.stacked} if details else {}
        for title, items in (self.description.moved | written).items():
            if items:
                values = "1 value" if len(items) == 1 else f"{len(items)} values"
                lines.append(f"  {title}: {values}, {sum(i.bytes for i in items):,} bytes")
                lines += [f"    {item}" for item in items[:_SHOWN]] if details else []
                lines += (
                    [f"    and {len(items) - _SHOWN} more"]
                    if details and len(items) > _SHOWN
                    else []
                )
        if self.loop is not None and self.strategy != "chunks":
            before = contractions(self.loop.eqns)
            of = f" (lax.scan: {before})" if before != self.contractions else ""
            lines.append(f"  contractions in the loop: {self.contractions}{of}")
        if self.choice is not None:
            reference = self.choice.reference
            other = (
                ""
                if reference in (None, self.choice.chosen.estimate)
                else f" (lax.scan: {reference.brief()})"
            )
            end = f"; {NOTHING_TO_GAIN}" if NOTHING_TO_GAIN in self.notes else other
            lines.append(f"  estimated: {self.choice.chosen.estimate.brief()}{end}")
            lines += textwrap.indent(str(self.choice), "    ").splitlines() if details else []
        compilation = filter(None, [self.compilation])
        remarks = (
            *compilation,
            *self.notes,
            *self.description.remarks,
            *self.description.obstacles,
        )
        return "\n".join(
            [*lines, *(f"  {remark}" for remark in remarks if remark != NOTHING_TO_GAIN)]
        )

    @property
    def title(self) -> str:
        """The direction of the loop, its length and its platform."""
        direction = "reverse" if self.loop is not None and self.loop.reverse else "forward"
        steps = "" if self.loop is None else f" of {self.loop.length} steps"
        return f"{direction} loop{steps} on {self.target.platform}"
