"""A loop whose strategy is to be chosen, and what the choice depends on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs import Var
from jrnn.jaxprs.jax_internals import is_recomputed
from jrnn.loops.costs.equation_costs import LARGE_PRODUCT, is_call, product_seconds
from jrnn.loops.costs.estimates import Estimate, Estimator, Terms, total
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Options, Provenance, ScanParams
from jrnn.loops.passes import Fission, Moves, movable, split, transpose_constant_rhs
from jrnn.loops.passes.canonical import canonical
from jrnn.loops.passes.canonical.axis_order import AxisOrder
from jrnn.loops.passes.canonical.random_keys import HoistedKeys
from jrnn.loops.passes.fission import SplitFacts
from jrnn.loops.passes.sums import Contract, dot_as_written, dot_smaller_first
from jrnn.loops.strategies.candidates import (
    ELEMENTWISE_MIN_GAIN,
    MIN_GAIN,
    REFERENCE,
    SHORT_MIN_GAIN,
    SMALL,
    Bounds,
    Candidate,
)
from jrnn.loops.strategies.nodes import Conversion, Split, Steps
from jrnn.loops.strategies.plan import Target

_ALLOWED_FRACTION = (
    0.5  # of the bytes of a loop's own arrays, which a candidate may use if the states are small
)
_EFFORT = 2_000  # equations that may be estimated for a loop: bounds the time of lowering
_SHORT = 5e-8  # seconds of a step in which nothing is called
_LEAST_GAIN = 0.03  # the part of a loop's time that transposed constants must save
# A stack is transposed in so many times the time of reading it from a cache: [64, 256, 32] in 0.2 ms with XLA 0.12, and in
# 0.25 (an input) and 0.6 ms (an output) with 0.10.
_TRANSPOSING = 5
_NO_COST = Estimate(0.0, 0)


@dataclass(eq=False)
class Problem:
    """A loop whose strategy is to be chosen. Strategies read it and propose candidates.

    Attributes:
        scan: the parameters of its equation.
        original: the loop as JAX made it, with its calls inlined.
        loop: its canonical form, which candidates run.
        conversions: to the canonical form, that of the first stage first.
        target: what it is lowered for.
        options: the caller's.
        provenance: what differentiation left.
        reference: the loop as JAX lowers it, with what that costs.
        bounds: what candidates may use, and must gain.
        is_estimated: candidates are compared by estimates. Elsewhere the first strategy of the table that proposes one runs.
        constants: the values of inputs of `loop` that are known now.
        stored_bytes: in differentiation, the bytes a step of states that JAX's derivative would store.
        conversion_terms: what candidates cost next to the loop that they run.
        candidates: what the strategies that stand earlier in the table proposed.
    """

    scan: ScanParams
    original: Loop
    loop: Loop
    conversions: Sequence[Conversion]
    target: Target
    options: Options
    provenance: Provenance
    reference: Candidate
    bounds: Bounds
    is_estimated: bool
    constants: dict[Var, Any] = field(default_factory=dict)
    stored_bytes: int = 0
    conversion_terms: Terms = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    effort: int = _EFFORT  # how many equations may still be estimated
    _splits: dict[tuple[Moves | None, Contract | None], Fission] = field(default_factory=dict)

    @functools.cached_property
    def estimator(self) -> Estimator:
        """What the equations of the loop cost."""
        return Estimator(self.loop, self.target.machine)

    @functools.cached_property
    def _facts(self) -> SplitFacts:
        return SplitFacts.of(self.loop)

    @functools.cached_property
    def movable(self) -> Moves:
        """All that may leave the loop. Only sums of gradients may change their order."""
        return movable(self.split(None), self.provenance.of_gradient(self.loop.reverse))

    def split(self, moves: Moves | None, contract: Contract | None = None) -> Fission:
        """Returns the loop in parts; all that can leave it leaves it if `moves` is None.

        Sums are computed by `contract`, from stacks of parts of concatenations, or else as the platform computes them best.
        """
        self.effort -= len(self.loop.eqns)
        if (key := (moves, contract)) not in self._splits:
            sums = contract or (
                dot_smaller_first if self.target.platform == "cpu" else dot_as_written
            )
            parts = contract is not None
            self._splits[key] = split(
                self.loop, moves=moves, facts=self._facts, contract=sums, parts=parts
            )
        return self._splits[key]

    def candidate(self, node: Any, label: str = "", min_gain: float | None = None) -> Candidate:
        """Returns a candidate for a node that runs `loop`.

        Args:
            node: runs it.
            label: what it does, in a few words; by default the name of the strategy.
            min_gain: the part of the reference's time that it must save, if that is not the bounds'.
        """
        cost = (
            self.with_conversions(node.estimate(self.estimator)) if self.is_estimated else _NO_COST
        )
        return Candidate(label, cost, node, min_gain=min_gain)

    def with_conversions(self, cost: Estimate) -> Estimate:
        """Returns an estimate of the loop with what is computed before and after it for its canonical form."""
        terms = dict(cost.terms)
        added_terms = self.conversion_terms
        terms |= {k: terms.get(k, 0.0) + s for k, s in added_terms.items()}
        return Estimate(cost.seconds + sum(added_terms.values()), cost.memory, tuple(terms.items()))


def reference_of(loop: Loop, target: Target) -> Candidate:
    """Returns the candidate that leaves a loop to `jax.lax.scan`."""
    cost = Estimator(loop, target.machine).whole() if target.is_estimated else _NO_COST
    return Candidate(REFERENCE, cost, Steps(loop))


def to_lower(
    scan: ScanParams, reference: Candidate, target: Target, options: Options, provenance: Provenance
) -> Problem:
    """Returns the problem of a loop that is lowered: its canonical form, and what candidates may use."""
    original = reference.node.loop
    loop, conversions = canonical(
        original, target.devices, target.is_estimated and _has_large_products(original)
    )
    bounds = Bounds(options.memory)
    if target.is_estimated:
        if _transposing_may_pay(loop, reference, target.machine):
            transposed = transpose_constant_rhs(loop)
            loop = transposed if _transposing_pays(loop, transposed, target.machine) else loop
        live, avoided = _other_bytes(original, options, provenance, reference.estimate)
        min_gain = MIN_GAIN if any(map(is_call, loop.eqns)) else ELEMENTWISE_MIN_GAIN
        if reference.estimate.seconds < _SHORT * jaxprs.extent(loop.length):
            min_gain = SHORT_MIN_GAIN
        # The forward loop has half of the products of its reverse loop.
        forward_seconds = provenance.of_gradient(loop.reverse) * reference.estimate.seconds / 2
        bounds = Bounds(options.memory, live, avoided, min_gain, forward_seconds, allowance(loop))
    terms = (
        _conversion_terms(conversions, loop.length, target.machine) if target.is_estimated else {}
    )
    return Problem(
        *(
            scan,
            original,
            loop,
            conversions,
            target,
            options,
            provenance,
            reference,
            bounds,
            target.is_estimated,
        ),
        conversion_terms=terms,
    )


def _transposing_may_pay(loop: Loop, reference: Candidate, machine: Machine) -> bool:
    """Returns False if all products of a loop take too small a part of its time."""
    products = sum(
        product_seconds(e, None, machine) for e in loop.eqns if e.primitive.name == "dot_general"
    )
    return jaxprs.extent(loop.length) * products > _LEAST_GAIN * reference.estimate.seconds


def _transposing_pays(loop: Loop, transposed: Loop, machine: Machine) -> bool:
    """Returns True if transposed constants save a part of the time of a loop. Tiny products have no layout to gain."""
    if transposed is loop:
        return False
    fissions = (split(either, moves=Moves()) for either in (loop, transposed))
    before, after = (
        Split(f, Steps(f.core)).estimate(Estimator(f.loop, machine)).seconds for f in fissions
    )
    return after < (1 - _LEAST_GAIN) * before


def _has_large_products(loop: Loop) -> bool:
    """Returns True if a loop calls products, so that one more loop, of a few elements, takes a small part of its time."""
    return any(
        e.primitive.name == "dot_general" and jaxprs.operations(e) >= LARGE_PRODUCT
        for e in loop.eqns
    )


def _conversion_terms(conversions: Sequence[Conversion], length: Any, machine: Machine) -> Terms:
    """Returns the time that all candidates take next to the canonical form.

    It is that of keys in a loop of their own, and of stacks that are transposed before and after the loop.
    """
    keys = [
        dict(Estimator(c.key_loop, machine).whole().terms)
        for c in conversions
        if isinstance(c, HoistedKeys)
    ]
    size = jaxprs.extent(length) * sum(
        c.transposed_bytes for c in conversions if isinstance(c, AxisOrder)
    )
    return total(*keys, {"elements": _TRANSPOSING * machine.reading(size, size)})


def allowance(loop: Loop) -> float:
    """Returns the bytes that a candidate may always use: of a loop over small states, a share of its own arrays."""
    if _has_large_products(loop):
        return SMALL
    stacks = sum(map(jaxprs.nbytes, (*loop.xs, *jaxprs.variables(loop.ys))))
    own_bytes = jaxprs.extent(loop.length) * stacks + sum(
        map(jaxprs.nbytes, (*loop.consts, *loop.carry))
    )
    return min(SMALL, _ALLOWED_FRACTION * own_bytes)


def _other_bytes(
    loop: Loop, options: Options, provenance: Provenance, reference: Estimate
) -> tuple[int, int]:
    """Returns the bytes of the stacks that a reverse loop reads, and those that `jax.lax.scan` would have next to these.

    Next to the same stacks, its reverse loop makes gradients of constants at each step. That is more than its forward loop
    needs, which sets what ours may need.
    """
    if not provenance.of_gradient(loop.reverse):
        return 0, max(provenance.gradient_bytes - reference.memory, 0)
    steps = jaxprs.extent(loop.length)
    live = max(steps * sum(map(jaxprs.nbytes, loop.xs)) - provenance.xs_bytes, 0)
    if not provenance.stores_less or options.recompute is not None:
        return live, 0
    # JAX names what the reverse loop computes again. Its own rule would store what the rest of the loop reads of that.
    again = list(filter(is_recomputed, loop.eqns))
    repeated = jaxprs.depends(loop.eqns, loop.xs).intersection(v for e in again for v in e.outvars)
    read_by_others = {
        v for e in loop.eqns if not any(v in repeated for v in e.outvars) for v in jaxprs.inputs(e)
    }
    read = {v for e in again for v in jaxprs.inputs(e)}
    instead = sum(jaxprs.nbytes(v) for v in loop.xs if v in read and v not in read_by_others)
    return live, steps * max(sum(map(jaxprs.nbytes, repeated & read_by_others)) - instead, 0)
