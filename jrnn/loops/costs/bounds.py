"""What a candidate may use, and what it must gain to replace the loop as JAX lowers it."""

from __future__ import annotations

import math
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.jaxprs import Var
from jrnn.jaxprs.jax_internals import is_recomputed
from jrnn.loops.costs.equation_costs import has_large_products, is_call
from jrnn.loops.costs.times import UNCERTAINTIES, Estimate
from jrnn.loops.ir import Loop, Options, Provenance

# What a candidate must save of the baseline's estimated time to replace it: the model is not exact, least of all for loops
# without products, which XLA fuses in its own way, and for steps so short that one more stack takes a part of them.
MIN_GAIN = 0.08
ELEMENTWISE_MIN_GAIN = 0.12
SHORT_MIN_GAIN = 0.35
# Of two candidates that may both replace the baseline, the one that changes more must save this part of the uncertainty.
SHARE_OF_UNCERTAINTY = 0.5
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
        forward_seconds: the time of the forward loop, if the candidates run its reverse loop.
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


# Seconds of a step in which nothing is called.
_SHORT_STEP_SECONDS = 5e-8
# Of the bytes of a loop's own arrays, the part that a candidate may use if the states are small.
_ALLOWED_FRACTION = 0.5


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
        ratio: the estimated time of a candidate over `jax.lax.scan`'s.
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


def bounds_of(
    original: Loop,
    loop: Loop,
    baseline: Estimate,
    options: Options,
    provenance: Provenance,
) -> Bounds:
    """Returns what candidates for a loop may use, and must gain.

    Args:
        original: the loop as JAX made it.
        loop: its canonical form, which candidates run.
        baseline: what the original costs.
        options: the caller's.
        provenance: what differentiation left.
    """
    live_bytes, avoided_bytes = _bytes_around_loop(original, options, provenance, baseline)
    min_gain = MIN_GAIN if any(map(is_call, loop.eqns)) else ELEMENTWISE_MIN_GAIN
    if baseline.seconds < _SHORT_STEP_SECONDS * jaxprs.extent(loop.length):
        min_gain = SHORT_MIN_GAIN
    # A forward loop has half of the products of its reverse loop.
    is_reverse = provenance.of_gradient(loop.reverse)
    forward_seconds = baseline.seconds / 2 if is_reverse else 0.0
    return Bounds(
        memory=options.memory,
        live_bytes=live_bytes,
        avoided_bytes=avoided_bytes,
        min_gain=min_gain,
        forward_seconds=forward_seconds,
        allowed_bytes=allowed_bytes(loop),
    )


def allowed_bytes(loop: Loop) -> float:
    """Returns the bytes that a candidate may always use: of a loop over small states, a share of its own arrays."""
    if has_large_products(loop.eqns):
        return SMALL_BYTES
    step_bytes = sum(map(jaxprs.nbytes, (*loop.xs, *jaxprs.variables(loop.ys))))
    other_bytes = sum(map(jaxprs.nbytes, (*loop.consts, *loop.carry)))
    own_bytes = jaxprs.extent(loop.length) * step_bytes + other_bytes
    return min(SMALL_BYTES, _ALLOWED_FRACTION * own_bytes)


def _bytes_around_loop(
    loop: Loop,
    options: Options,
    provenance: Provenance,
    baseline: Estimate,
) -> tuple[int, int]:
    """Returns the bytes of stacked arrays that a reverse loop reads, and the extra bytes of JAX's own reverse loop.

    JAX's reverse loop makes gradients of constants at each step. That is more than its forward loop needs, which sets what
    ours may need.
    """
    if not provenance.of_gradient(loop.reverse):
        return 0, max(provenance.gradient_bytes - baseline.memory, 0)
    steps = jaxprs.extent(loop.length)
    live_bytes = max(steps * sum(map(jaxprs.nbytes, loop.xs)) - provenance.xs_bytes, 0)
    if not provenance.stores_less or options.recompute is not None:
        return live_bytes, 0
    # JAX names what the reverse loop computes again. Its own rule would store what the rest of the loop reads of that.
    of_xs = jaxprs.depends(loop.eqns, loop.xs)
    repeated: set[Var] = set()
    read_again: set[Var] = set()
    read_by_others: set[Var] = set()
    for eqn in loop.eqns:
        if is_recomputed(eqn):
            repeated.update(of_xs.intersection(eqn.outvars))
            read_again.update(jaxprs.inputs(eqn))
        if repeated.isdisjoint(eqn.outvars):
            read_by_others.update(jaxprs.inputs(eqn))
    stored_instead = read_again.intersection(loop.xs) - read_by_others
    stored_bytes = sum(map(jaxprs.nbytes, repeated & read_by_others))
    instead_bytes = sum(map(jaxprs.nbytes, stored_instead))
    return live_bytes, steps * max(stored_bytes - instead_bytes, 0)
