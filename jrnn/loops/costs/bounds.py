"""What a candidate may use, and what it must gain to replace the loop as JAX lowers it."""

from __future__ import annotations

import math
from typing import NamedTuple

from jrnn.loops.costs.estimates import UNCERTAINTIES, Estimate

# What a candidate must save of the baseline's estimated time to replace it: the model is not exact, least of all for loops
# without products, which XLA fuses in its own way, and for steps so short that one more stack takes a part of them.
MIN_GAIN = 0.08
ELEMENTWISE_MIN_GAIN = 0.12
SHORT_MIN_GAIN = 0.35
# Of two candidates that may both replace the baseline, the one that changes more must save this part of the uncertainty.
BETWEEN = 0.5
# The bound of memory: `_FACTOR` times the memory of the baseline, and `SMALL_BYTES`. A candidate that is estimated to take
# `_MUCH_FASTER` of the baseline's time may use `_FACTOR_MUCH_FASTER` times. A reverse loop is judged with its forward loop.
_FACTOR = 1.1
SMALL_BYTES = 1_000_000
_MUCH_FASTER = 0.7
_FACTOR_MUCH_FASTER = 1.4


class Bounds(NamedTuple):
    """What a candidate may use, and what it must gain.

    Attributes:
        memory: the option `memory`: a factor of what the baseline needs, or None.
        live_bytes: temporary arrays that exist whatever is chosen.
        avoided_bytes: what `jax.lax.scan` would have in addition to these.
        min_gain: the part of the baseline's time that a candidate must save.
        forward_seconds: the time of the forward loop, if the candidates are those of its reverse loop.
        allowed_bytes: bytes that are allowed in addition to a factor.
        binds_baseline: a baseline that needs more than `memory` allows gives way to a candidate that needs less.
    """

    memory: float | None = None
    live_bytes: int = 0
    avoided_bytes: int = 0
    min_gain: float = MIN_GAIN
    forward_seconds: float = 0.0
    allowed_bytes: float = SMALL_BYTES
    binds_baseline: bool = False

    def max_bytes(self, baseline: Estimate, candidate: Estimate | None = None) -> float:
        """Returns the most bytes that a candidate may use; by default one that is as fast as the baseline."""
        baseline_bytes = baseline.memory + self.live_bytes + self.avoided_bytes
        seconds = (candidate or baseline).seconds + self.forward_seconds
        baseline_seconds = baseline.seconds + self.forward_seconds
        ratio = seconds / max(baseline_seconds, 1e-12)
        bound = memory_bound(self.memory, baseline_bytes, ratio, self.allowed_bytes)
        return bound - self.live_bytes


def memory_bound(
    memory: float | None,
    baseline_bytes: int,
    ratio: float = 1.0,
    allowed_bytes: float = SMALL_BYTES,
) -> float:
    """Returns the most bytes of temporary arrays.

    Args:
        memory: the option `memory`.
        baseline_bytes: what `jax.lax.scan` uses.
        ratio: the estimated time of a candidate over that of `jax.lax.scan`.
        allowed_bytes: bytes that are allowed in addition to a factor.
    """
    if memory is not None:
        return memory * baseline_bytes + allowed_bytes
    of_any = _FACTOR * baseline_bytes + allowed_bytes
    if ratio > _MUCH_FASTER:
        return of_any
    return max(of_any, _FACTOR_MUCH_FASTER * baseline_bytes)


def uncertainty(estimate: Estimate, baseline: Estimate) -> float:
    """Returns the seconds by which the difference of two estimates may be off, if their parts are off independently."""
    terms = dict(estimate.terms)
    baseline_terms = dict(baseline.terms)
    parts = [
        part * (terms.get(name, 0.0) - baseline_terms.get(name, 0.0))
        for name, part in UNCERTAINTIES.items()
    ]
    return math.hypot(*parts)
