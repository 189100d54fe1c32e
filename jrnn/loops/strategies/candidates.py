"""Candidates, and the choice between them by their estimates.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jrnn.loops.costs.estimates import UNCERTAINTIES, Estimate, size_in_words

REFERENCE = "lax.scan"  # the loop as JAX lowers it


@dataclass(frozen=True)
class Candidate:
    """One strategy applied to one loop.

    Attributes:
        label: what it does, in a few words for `explain`.
        estimate: what it costs; all zeros on platforms without a cost model.
        node: what to run if it is chosen (`strategies/nodes.py`).
        strategy: the name of the strategy that proposed it.
        min_gain: the part of the reference's time that it must save, or None for that of the bounds.
    """

    label: str
    estimate: Estimate
    node: Any = field(repr=False, compare=False)
    strategy: str = REFERENCE
    min_gain: float | None = None


class Choice(NamedTuple):
    """The chosen candidate, and each of the others with the reason why it was not chosen."""

    chosen: Candidate
    others: tuple[tuple[Candidate, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.chosen.label}: {self.chosen.estimate}"]
        lines += [f"  not {c.label}, {c.estimate.brief()}: {why}" for c, why in self.others]
        return "\n".join(lines)

    @property
    def reference(self) -> Estimate | None:
        """The estimate of the loop as JAX lowers it, or None if that was not compared."""
        compared = (self.chosen, *(candidate for candidate, _ in self.others))
        return next((c.estimate for c in compared if c.strategy == REFERENCE), None)


# What another candidate must save of the estimated time to replace the reference: the model is not exact, least of all for
# loops without products, which XLA fuses in its own way, and for steps so short that a stack more takes a part of them.
MIN_GAIN = 0.08
ELEMENTWISE_MIN_GAIN = 0.12
SHORT_MIN_GAIN = 0.35
# Of two candidates that may both replace the reference, the one that changes more must save this part of the uncertainty.
BETWEEN = 0.5
# The bound of memory: `_FACTOR` times the memory of the reference, and `SMALL` bytes. A candidate that is estimated to take
# `_MUCH_FASTER` of the reference's time may use `_FACTOR_MUCH_FASTER` times. A reverse loop is judged with its forward loop.
_FACTOR = 1.1
SMALL = 1_000_000
_MUCH_FASTER = 0.7
_FACTOR_MUCH_FASTER = 1.4


class Bounds(NamedTuple):
    """What a candidate may use, and what it must gain.

    Attributes:
        memory: the option `memory`: a factor of what the reference needs, or None.
        live_bytes: temporary arrays that exist whatever is chosen.
        avoided_bytes: what `jax.lax.scan` would have next to these.
        min_gain: the part of the reference's time that a candidate must save.
        forward_seconds: the time of the forward loop, if the candidates are those of its reverse loop.
        allowance: bytes that are allowed next to a factor.
        binds_reference: a reference that needs more than `memory` allows gives way to a candidate that needs less.
    """

    memory: float | None = None
    live_bytes: int = 0
    avoided_bytes: int = 0
    min_gain: float = MIN_GAIN
    forward_seconds: float = 0.0
    allowance: float = SMALL
    binds_reference: bool = False

    def max_bytes(self, reference: Estimate, candidate: Estimate | None = None) -> float:
        """Returns the most bytes that a candidate may use; by default one that is as fast as the reference."""
        theirs = reference.memory + self.live_bytes + self.avoided_bytes
        ours, seconds = (
            e.seconds + self.forward_seconds for e in (candidate or reference, reference)
        )
        return (
            memory_bound(self.memory, theirs, ours / max(seconds, 1e-12), self.allowance)
            - self.live_bytes
        )


def memory_bound(
    memory: float | None, reference: int, ratio: float = 1.0, allowance: float = SMALL
) -> float:
    """Returns the most bytes of temporary arrays.

    Args:
        memory: the option `memory`.
        reference: the bytes that `jax.lax.scan` uses.
        ratio: the estimated time of a candidate over that of `jax.lax.scan`.
        allowance: bytes that are allowed next to a factor.
    """
    if memory is not None:
        return memory * reference + allowance
    return max(
        _FACTOR * reference + allowance, _FACTOR_MUCH_FASTER * reference * (ratio <= _MUCH_FASTER)
    )


def uncertainty(estimate: Estimate, reference: Estimate) -> float:
    """Returns the seconds by which the difference of two estimates may be off, if their parts are off independently."""
    ours = dict(estimate.terms)
    theirs = dict(reference.terms)
    return math.hypot(
        *(
            part * (ours.get(name, 0.0) - theirs.get(name, 0.0))
            for name, part in UNCERTAINTIES.items()
        )
    )


def cheapest(candidates: Sequence[Candidate], bounds: Bounds | None = None) -> Choice:
    """Chooses the fastest candidate that fits the bound of memory, or an earlier one that may be as fast.

    Args:
        candidates: the reference, then others. Those that change more come later.
        bounds: what they may use, and must gain.

    >>> def candidate(label, ms, mb):
    ...     return Candidate(label, Estimate(ms * 1e-3, int(mb * 1e6)), None)
    >>> print(cheapest([candidate("lax.scan", 4, 0), candidate("hoist", 2, 30), candidate("in chunks", 3, 1)]))
    in chunks: 3 ms, 1.00 MB
      not lax.scan, 4 ms, 0.00 MB: slower
      not hoist, 2 ms, 30.00 MB: more than 1.00 MB
    """
    bounds = bounds or Bounds()
    reference, *others = candidates
    if bounds.binds_reference and reference.estimate.memory > bounds.max_bytes(reference.estimate):
        smallest = min(candidates, key=lambda candidate: candidate.estimate.memory)
        if smallest is not reference:
            return Choice(smallest, ((reference, "more memory than allowed"),))
    best = reference
    reasons = {}
    for candidate in others:
        estimate = candidate.estimate
        saved_seconds = reference.estimate.seconds - estimate.seconds
        ratio = estimate.seconds / max(reference.estimate.seconds, 1e-12)
        max_bytes = bounds.max_bytes(reference.estimate, estimate)
        min_gain = bounds.min_gain if candidate.min_gain is None else candidate.min_gain
        if estimate.memory > max_bytes:
            reasons[candidate.label] = f"more than {size_in_words(max(max_bytes, 0))}"
        elif ratio > 1 - min_gain or saved_seconds < uncertainty(estimate, reference.estimate):
            reasons[candidate.label] = "gains too little" if ratio < 1 else "slower"
        elif best.estimate.seconds - estimate.seconds > BETWEEN * uncertainty(
            estimate, best.estimate
        ):
            best = candidate
    return Choice(
        best, tuple((c, reasons.get(c.label, "slower")) for c in candidates if c is not best)
    )
