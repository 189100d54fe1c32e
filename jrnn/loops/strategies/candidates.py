"""The cost model: the estimated time and temporary memory of a loop, and the choice between candidates.

A `Candidate` is one way to run a loop: a name, an `Estimate`, and what to run. Whoever knows a way proposes a candidate, and
`choose` takes the fastest one that fits a bound of memory. The first candidate is the reference: the loop as it is.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jrnn.loops.costs.estimates import DOUBTS, Estimate, size_in_words

REFERENCE = "lax.scan"  # the loop as JAX lowers it


@dataclass(frozen=True)
class Candidate:
    """A way to run a loop.

    Attributes:
        name: what it does, in a few words for `explain`.
        estimate: what it costs.
        node: what to run if it is chosen (`strategies/nodes.py`). Its `way` names it in files.
    """

    name: str
    estimate: Estimate
    node: Any = field(repr=False, compare=False)


class Choice(NamedTuple):
    """The chosen candidate, and each of the others with the reason why it was not chosen."""

    chosen: Candidate
    others: tuple[tuple[Candidate, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.chosen.name}: {self.chosen.estimate}"]
        lines += [f"  not {c.name}, {c.estimate.brief()}: {why}" for c, why in self.others]
        return "\n".join(lines)

    def of(self, name: str) -> Estimate | None:
        """Returns the estimate of the candidate with a name, or None if there is none."""
        return next((c.estimate for c in (self.chosen, *(c for c, _ in self.others)) if c.name == name), None)


# What another plan must save of the estimated time to replace the reference: the model is not exact, least of all for loops
# without products, which XLA fuses in its own way.
MARGIN, ELEMENTWISE_MARGIN = 0.08, 0.12
# Of two plans that may both replace the reference, the one that changes more must save this part of what it may be off.
BETWEEN = 0.5
# The bound of memory: `_FACTOR` times the memory of the reference, and `SMALL` bytes. A plan that is estimated to run in
# `_MUCH_FASTER` of the reference's time may use `_FACTOR_MUCH_FASTER` times. A reverse loop is judged with its forward loop.
_FACTOR, SMALL = 1.1, 1_000_000
_MUCH_FASTER, _FACTOR_MUCH_FASTER = 0.7, 1.4


def bound(memory: float | None, reference: int, ratio: float = 1.0, small: float = SMALL) -> float:
    """Returns the most bytes that a candidate may use.

    Args:
        memory: the caller's option: a factor of `jax.lax.scan`'s memory, or None.
        reference: the bytes that `jax.lax.scan` uses.
        ratio: the estimated time of the candidate over that of `jax.lax.scan`.
        small: bytes that are allowed besides.
    """
    if memory is not None:
        return memory * reference + small
    return max(_FACTOR * reference + small, _FACTOR_MUCH_FASTER * reference * (ratio <= _MUCH_FASTER))


def doubt(estimate: Estimate, reference: Estimate) -> float:
    """Returns the seconds by which the difference of two estimates may be off, if their parts are off independently."""
    ours, theirs = dict(estimate.terms), dict(reference.terms)
    return math.hypot(*(part * (ours.get(name, 0.0) - theirs.get(name, 0.0)) for name, part in DOUBTS.items()))


def choose(
    candidates: Sequence[Candidate],
    memory: float | None = None,
    held: int = 0,
    saved: int = 0,
    margin: float = MARGIN,
    besides: float = 0.0,
    small: float = SMALL,
) -> Choice:
    """Chooses the fastest candidate that fits the bound of memory, or an earlier one that may be as fast.

    The first candidate is the reference; those that change more come later.

    Args:
        candidates: the reference, and others.
        memory: the option `memory`: a factor of what the reference needs, or None.
        held: bytes of temporary arrays that exist besides, whatever is chosen.
        saved: bytes that `jax.lax.scan` would hold besides these.
        margin: the part of the reference's time that another candidate must save.
        besides: the seconds of the forward loop, if the candidates are those of its reverse loop.
        small: bytes that are allowed besides a factor.

    >>> way = lambda name, ms, mb: Candidate(name, Estimate(ms * 1e-3, int(mb * 1e6)), None)
    >>> choice = choose([way("lax.scan", 4, 0), way("hoist", 2, 30), way("in chunks", 3, 1)])
    >>> print(choice)
    in chunks: 3 ms, 1.00 MB
      not lax.scan, 4 ms, 0.00 MB: slower
      not hoist, 2 ms, 30.00 MB: more than 1.00 MB
    """
    reference, *others = candidates
    best, reasons = reference, {}
    theirs = reference.estimate.memory + held + saved
    for candidate in others:
        estimate = candidate.estimate
        saved_seconds = reference.estimate.seconds - estimate.seconds
        ratio = estimate.seconds / max(reference.estimate.seconds, 1e-12)
        both = (estimate.seconds + besides) / max(reference.estimate.seconds + besides, 1e-12)
        most = bound(memory, theirs, both, small)
        if estimate.memory + held > most:
            reasons[candidate.name] = f"more than {size_in_words(max(most - held, 0))}"
        elif ratio > 1 - margin or saved_seconds < doubt(estimate, reference.estimate):
            reasons[candidate.name] = "gains too little" if ratio < 1 else "slower"
        elif best.estimate.seconds - estimate.seconds > BETWEEN * doubt(estimate, best.estimate):
            best = candidate
    return Choice(best, tuple((c, reasons.get(c.name, "slower")) for c in candidates if c is not best))
