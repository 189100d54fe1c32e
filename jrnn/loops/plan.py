"""Plans: how a loop runs, and why.

A strategy (`strategies/try_*.py`) proposes a `Candidate`: a node that runs the loop, with its estimate. `compile.py` chooses
one, and `Plan` records the decision: what runs, what was compared with it, and the reasons. `explain` prints it.

Shapes: T time.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jrnn.errors import ScanError
from jrnn.jaxprs.work import TooMuchWork
from jrnn.loops.costs.bounds import SHARE_OF_UNCERTAINTY, Bounds, uncertainty
from jrnn.loops.costs.compilation import added_seconds
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.target import Target
from jrnn.loops.costs.times import Estimate, size_in_words
from jrnn.loops.ir import Loop, Results, observers
from jrnn.loops.ir.description import Description, Item, contractions, described

LAX_SCAN = "lax.scan"  # the name of a plan that leaves the loop to JAX, and of the baseline
NOTHING_TO_GAIN = "nothing to gain"  # the note of a loop that no candidate makes faster
_NOTICED_SECONDS = 0.1  # of compilation that are worth a sentence


class Node(Protocol):
    """Runs a loop."""

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        """Runs `length` steps."""

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns the time and the memory of all steps, which decide between candidates.

        Args:
            estimator: of the whole loop that the node's loop is a part of. It knows what the equations cost.
        """

    def describe(self) -> Description:
        """Returns what it does, for `explain`."""


@dataclass(frozen=True)
class Candidate:
    """One strategy applied to one loop.

    Attributes:
        label: what it does, in a few words for `explain`.
        estimate: what it costs; all zeros on platforms without a cost model.
        node: runs the loop that `Context.loop` is.
        strategy: the name of the strategy that proposed it.
        min_gain: the part of the baseline's time that it must save, or None for the bounds' own.
        finish: returns the node to run once the candidate is chosen, where making it takes time. It may raise `Unsupported`.
    """

    label: str
    estimate: Estimate
    node: Node = field(repr=False, compare=False)
    strategy: str = LAX_SCAN
    min_gain: float | None = None
    finish: Callable[[], Node] | None = field(default=None, repr=False, compare=False)

    def finished(self) -> Node:
        """Returns the node to run."""
        return self.node if self.finish is None else self.finish()


Rejected = tuple[tuple[Candidate, str], ...]  # candidates that were not chosen, and why


def cheapest(
    candidates: Sequence[Candidate], bounds: Bounds | None = None
) -> tuple[Candidate, Rejected]:
    """Returns the fastest candidate that fits the bound of memory, or an earlier one that may be as fast; and the others.

    Args:
        candidates: the baseline, then others. Those that change more come later.
        bounds: what they may use, and must gain.

    >>> def candidate(label, ms, mb):
    ...     return Candidate(label, Estimate(ms * 1e-3, int(mb * 1e6)), None)
    >>> chosen, rejected = cheapest(
    ...     [candidate("lax.scan", 4, 0), candidate("hoist", 2, 30), candidate("in tiles", 3, 1)]
    ... )
    >>> print(chosen.label, *(f"{other.label}: {why}" for other, why in rejected), sep="; ")
    in tiles; lax.scan: slower; hoist: more than 1.00 MB
    """
    bounds = bounds or Bounds()
    baseline, *others = candidates
    if bounds.binds_baseline and baseline.estimate.memory > bounds.max_bytes(baseline.estimate):
        smallest = min(candidates, key=lambda candidate: candidate.estimate.memory)
        if smallest is not baseline:
            return smallest, ((baseline, "more memory than allowed"),)
    best = baseline
    reasons = {}
    for candidate in others:
        estimate = candidate.estimate
        saved_seconds = baseline.estimate.seconds - estimate.seconds
        ratio = estimate.seconds / max(baseline.estimate.seconds, 1e-12)
        max_bytes = bounds.max_bytes(baseline.estimate, estimate)
        min_gain = bounds.min_gain if candidate.min_gain is None else candidate.min_gain
        lead_seconds = best.estimate.seconds - estimate.seconds
        if estimate.memory > max_bytes:
            reasons[candidate.label] = f"more than {size_in_words(max(max_bytes, 0))}"
        elif ratio > 1 - min_gain or saved_seconds < uncertainty(estimate, baseline.estimate):
            reasons[candidate.label] = "gains too little" if ratio < 1 else "slower"
        elif lead_seconds > SHARE_OF_UNCERTAINTY * uncertainty(estimate, best.estimate):
            best = candidate
    rejected = ((c, reasons.get(c.label, "slower")) for c in candidates if c is not best)
    return best, tuple(rejected)


@dataclass(frozen=True)
class Plan:
    """The record of a decision for one loop.

    Attributes:
        target: what it is lowered for.
        loop: the loop as JAX made it, with its calls inlined, or None if it could not be read.
        node: runs it, or None if `jax.lax.scan` lowers it.
        strategy: the name of the strategy, or "lax.scan".
        notes: why rewrites were not applied.
        chosen: the candidate that was chosen by its estimate, or None if none were compared.
        rejected: the candidates that were compared with it, and why they were not chosen.
        constants: the values of the first of `loop.consts`, which the step closes over.
        is_differentiated: it replaces a loop that JAX is about to differentiate.
        passes: the names of the passes that brought the loop to its canonical form.
        added_compile_seconds: how much longer than `jax.lax.scan` it compiles, by estimate; None if nobody asked.
    """

    target: Target
    loop: Loop | None
    node: Node | None
    strategy: str
    notes: tuple[str, ...] = ()
    chosen: Candidate | None = None
    rejected: Rejected = ()
    constants: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    is_differentiated: bool = False
    passes: tuple[str, ...] = ()
    added_compile_seconds: float | None = None

    @staticmethod
    def left_to_jax(
        target: Target,
        loop: Loop | None,
        *why: str,
        chosen: Candidate | None = None,
        rejected: Rejected = (),
    ) -> Plan:
        """Returns a plan that leaves the loop to `jax.lax.scan`, and says why."""
        return Plan(target, loop, None, LAX_SCAN, why, chosen, rejected)

    @property
    def baseline(self) -> Estimate | None:
        """The estimate of the loop as JAX lowers it, or None if that was not compared."""
        if self.chosen is None:
            return None
        compared = (self.chosen, *(candidate for candidate, _ in self.rejected))
        return next((c.estimate for c in compared if c.strategy == LAX_SCAN), None)

    def with_compilation(self) -> Plan:
        """Returns the plan with an estimate of its compilation, for which its node is traced; without one if that fails.

        It fails for collectives, whose axes have names only where the loop is.
        """
        known = self.added_compile_seconds is not None or not self.target.is_estimated
        if known or self.node is None or self.loop is None:
            return self
        try:
            added = added_seconds(self.node.run, self.loop, self.is_differentiated)
        except Exception:
            return self
        return replace(self, added_compile_seconds=added)

    def within_budget(self, budget: float | None) -> tuple[Plan, str]:
        """Returns the plan, with its compilation if that is bounded, and the reason why it takes too long, or "".

        Args:
            budget: the option `compile_budget`, seconds.
        """
        if budget is None or not self.target.is_estimated:
            return self, ""
        plan = self.with_compilation()
        added = plan.added_compile_seconds
        if added is None:
            unknown = "how long it compiles is not known"
            return plan, f"{unknown}, and compile_budget={budget:g} bounds it"
        too_long = f"it compiles about {added:.2g} s longer, more than compile_budget={budget:g}"
        return plan, too_long if added > budget else ""

    @property
    def compilation(self) -> str:
        """How much longer it compiles, in words, and from how many calls on that pays; nothing if that is little."""
        added = self.added_compile_seconds
        if added is None or added < _NOTICED_SECONDS:
            return ""
        text = f"compiles about {round(added, 1 if added < 2 else None):g} s longer"
        saved = 0.0
        if self.chosen is not None and self.baseline is not None:
            saved = self.baseline.seconds - self.chosen.estimate.seconds
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
        """Values that the loop writes at each step. A loop that is left to `jax.lax.scan` stays whole."""
        return self.description.stacked

    @property
    def contractions(self) -> int:
        """The number of contractions that stay in the loop, also in its branches and inner loops."""
        return self.description.contractions

    @property
    def title(self) -> str:
        """The direction of the loop, its length and its platform."""
        direction = "reverse" if self.loop is not None and self.loop.reverse else "forward"
        steps = "" if self.loop is None else f" of {self.loop.length} steps"
        return f"{direction} loop{steps} on {self.target.platform}"

    @property
    def comparison(self) -> str:
        """The chosen candidate and the others with the reasons, a line each; nothing if none were compared."""
        if self.chosen is None:
            return ""
        lines = [f"{self.chosen.label}: {self.chosen.estimate}"]
        lines += [f"  not {c.label}, {c.estimate.brief()}: {why}" for c, why in self.rejected]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(details=True)

    def text(self, details: bool = False) -> str:
        """Returns how the loop runs: what moved, what is left in it, and the estimate next to `lax.scan`'s.

        Args:
            details: also what the loop writes at each step, values with their lines of code, and the other candidates.
        """
        lines = [f"{self.title}: {self.strategy}"]
        lines += self.description.lines(details)
        if self.loop is not None and self.description.counts_contractions:
            before = contractions(self.loop.eqns)
            of = f" (lax.scan: {before})" if before != self.contractions else ""
            lines.append(f"  contractions in the loop: {self.contractions}{of}")
        lines += self._estimate_lines(details)
        if details and self.passes:
            lines.append(f"  brought to its canonical form by {', '.join(self.passes)}")
        remarks = (self.compilation, *self.notes, *self.description.remarks)
        for remark in (*remarks, *self.description.obstacles):
            if remark and remark != NOTHING_TO_GAIN:
                lines.append(f"  {remark}")
        return "\n".join(lines)

    def _estimate_lines(self, details: bool) -> list[str]:
        if self.chosen is None:
            return []
        cost = self.chosen.estimate
        end = ""
        if NOTHING_TO_GAIN in self.notes:
            end = f"; {NOTHING_TO_GAIN}"
        elif self.baseline not in (None, cost):
            end = f" (lax.scan: {self.baseline.brief()})"
        lines = [f"  estimated: {cost.brief()}{end}"]
        if details:
            lines += textwrap.indent(self.comparison, "    ").splitlines()
        return lines


def left_after_error(error: Exception, target: Target, loop: Loop | None) -> Plan:
    """Returns a plan that leaves the loop to JAX, with the error as the reason. Raises the error in tests."""
    if isinstance(error, ScanError):
        raise error
    if isinstance(error, TooMuchWork):
        return Plan.left_to_jax(target, loop, str(error))
    return Plan.left_to_jax(target, loop, observers.report_unexpected(error, " in a pass"))
