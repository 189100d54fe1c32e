"""The strategy "unrolled" on a CPU: several steps of a tiny loop in one trip, if XLA compiles the loop as one kernel.

A step of a few nanoseconds waits for the step before it, and for the trip of its loop. Unrolled, it waits for that step
alone, or for none if it is affine in the carry with constant coefficients. docs/notes/cpu_log.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Var, primitives
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.costs.equation_costs import MIN_ELEMENTS, element_seconds
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate
from jrnn.loops.costs.machines import CPU
from jrnn.loops.ir import Loop, Results
from jrnn.loops.ir.description import Description, described
from jrnn.loops.kernels.unrolled.affine import AffineStep, affine_step
from jrnn.loops.kernels.unrolled.lookahead import run_ahead
from jrnn.loops.kernels.unrolled.products import run_products
from jrnn.loops.kernels.unrolled.steps import run_unrolled
from jrnn.loops.passes import Moves
from jrnn.loops.strategies.candidates import ELEMENTWISE_MIN_GAIN, Candidate
from jrnn.loops.strategies.nodes import Split, Steps
from jrnn.loops.strategies.problem import Problem

_STEPS, _STEPS_WITHIN_LIMIT = 8, 4  # of a trip; the latter where XLA makes one kernel of small trips alone
_STEPS_OF_PRODUCT, _KERNELS = 16, 40  # of a trip that is a product; the kernels that it runs one by one
_LARGEST = 8  # elements of a value: with 16 a step works on whole vectors, and takes its time for that
_LONGEST = 400  # equations of a step that is read
_OPERATIONS = 100  # of a step, with functions as several: longer ones gain little, and take long to compile
# How many times the estimated bytes XLA may count of a trip. Beyond its limit a loop takes ten times as long.
_MARGIN = 1.15
# In cycles of a processor, measured on loops of 16,000 steps with jax 0.12 (scripts/benchmarks/tiny_loops.py).
_LATENCY = 4.0  # from an operand of an addition, a multiplication or both to the result
_ISSUE = 0.5  # one operation among others that do not wait for it
_TRIP, _CARRIED = 3.0, 1.0  # a trip of a loop of one kernel, and each value that it carries through memory
_TERM = 0.75  # a coefficient times the carry before the trip, added to a value of a step
_POWERS = 12_000.0  # the powers of the coefficients, once
_CLEARLY = 0.9  # of the cycles of steps one after the other, in which a step that looks ahead must run


@dataclass(frozen=True)
class Unrolled:
    """Runs several steps in one trip.

    Attributes:
        loop: the loop.
        size: the steps of a trip.
        ahead: the affine form of the step, if trips do not wait for each other.
        why: the reason why they do.
        as_products: a trip is a product, because the loop is no single kernel.
    """

    loop: Loop
    size: int
    ahead: AffineStep | None = None
    why: str = ""
    as_products: bool = False

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any) -> Results:
        if self.as_products and self.ahead is not None:
            return run_products(self.ahead, self.size, consts, init, xs, length)
        if self.ahead is not None:
            return run_ahead(self.ahead, self.size, consts, init, xs, length)
        return run_unrolled(self.loop, self.size, consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        whole, cycles = Steps(self.loop).estimate(estimator), Cycles(self.loop)
        if self.as_products:
            kernels = _KERNELS * estimator.machine.kernel / self.size
            return estimate({"calls": kernels * self.loop.length}, whole.memory)
        ours = cycles.unrolled(self.size) if self.ahead is None else cycles.ahead(self.ahead, self.size)
        return estimate({name: seconds * ours / cycles.as_it_is for name, seconds in whole.terms}, whole.memory)

    def describe(self) -> Description:
        affine = "the carry is affine with constant coefficients, so that"
        how = f"each waits for the one before it: {self.why}"
        if self.ahead is not None:
            how = f"{affine} {'a trip is a product' if self.as_products else 'no trip waits for the one before it'}"
        return described(self.loop, f"{self.size} steps in one trip of the loop; {how}")


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns the candidate for a loop whose step is tiny but for constants, which are computed once; nothing for others."""
    if len(problem.loop.eqns) > _LONGEST:
        return ()
    fission = problem.split(Moves())
    node = of_tiny(problem, fission.core)
    return () if node is None else [problem.candidate(Split(fission, node), min_gain=ELEMENTWISE_MIN_GAIN)]


def of_tiny(problem: Problem, loop: Loop) -> Unrolled | None:
    """Returns the node of a loop, or of a part of one that stays, or None if it is not tiny."""
    size = _size(loop, problem.estimator) if problem.target.devices == 1 else 0
    if not size:
        return _as_products(problem, loop)
    try:
        step, cycles = affine_step(loop), Cycles(loop)
    except NotAffine as why:
        return Unrolled(loop, size, why=str(why))
    pays = cycles.ahead(step, size) < _CLEARLY * cycles.unrolled(size)
    if pays and problem.target.machine.one_kernel_bytes == math.inf:
        return Unrolled(loop, size, step)
    return Unrolled(loop, size, why="that is estimated to be faster")


def _as_products(problem: Problem, loop: Loop) -> Unrolled | None:
    """Returns the node of a loop over few numbers that is no single kernel and affine, or None."""
    estimator = problem.estimator
    if problem.target.devices > 1 or not _is_over_few_numbers(loop) or not jaxprs.is_known(loop.length):
        return None
    if loop.length < 4 * _STEPS_OF_PRODUCT or estimator.is_small(loop, estimator.part(loop.eqns, loop.outputs)):
        return None
    try:
        step = affine_step(loop)
    except NotAffine:
        return None
    sums = [loop.carry[i].aval.dtype for i in step.sums]
    if any(jnp.issubdtype(dtype, jnp.inexact) and dtype != jnp.float32 for dtype in sums):
        return None
    return Unrolled(loop, _STEPS_OF_PRODUCT, step, as_products=True)


def _is_over_few_numbers(loop: Loop) -> bool:
    values = (*loop.inputs, *jaxprs.variables(loop.outputs))
    return bool(loop.carry) and all(map(_is_tiny, loop.eqns)) and not any(map(_is_large, values))


def _size(loop: Loop, estimator: Estimator) -> int:
    """Returns the steps of a trip, or 0 for a loop that is not tiny, or would not be one kernel."""
    if not jaxprs.is_known(loop.length) or not _is_over_few_numbers(loop):
        return 0
    if sum(map(_operations, loop.eqns)) > _OPERATIONS or _has_predicted_branch(loop):
        return 0
    size = max(_STEPS if estimator.machine.one_kernel_bytes == math.inf else _STEPS_WITHIN_LIMIT, int(loop.unroll))
    inside = estimator.part(loop.eqns, loop.outputs)
    several = inside._replace(touched_bytes=int(_MARGIN * size * inside.touched_bytes))
    return size if size <= min(2 * _STEPS, loop.length) and estimator.is_small(loop, several) else 0


def _is_tiny(eqn: jaxprs.Eqn) -> bool:
    return primitives.is_cheap(eqn) and not eqn.effects and not any(map(_is_large, (*jaxprs.inputs(eqn), *eqn.outvars)))


def _is_large(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) or jaxprs.elements(v.aval.shape) > _LARGEST


def _has_predicted_branch(loop: Loop) -> bool:
    """Returns True if the carry selects among values that do not depend on it.

    XLA:CPU makes a branch of this in a loop of one step a trip. The processor predicts it, and does not wait for the carry.
    """
    moving = jaxprs.depends(loop.eqns, loop.carry)
    selections = [e for e in loop.eqns if e.primitive.name == "select_n" and jaxprs.is_in(e.invars[0], moving)]
    return any(not any(jaxprs.is_in(a, moving) for a in e.invars[1:]) for e in selections)


def _operations(eqn: jaxprs.Eqn) -> float:
    """Returns the operations of an equation, a function as several."""
    return element_seconds(eqn, CPU) / (MIN_ELEMENTS * CPU.element)


class Cycles:
    """The cycles of a step of a loop that is one kernel."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.operations = sum(map(_operations, loop.eqns))
        self.around = _TRIP + _CARRIED * len(loop.carry)

    @property
    def as_it_is(self) -> float:
        return max(_LATENCY * self._longest(fused=False), _ISSUE * self.operations) + self.around

    def unrolled(self, size: int) -> float:
        return max(_LATENCY * self._longest(fused=True), _ISSUE * self.operations) + self.around / size

    def ahead(self, step: AffineStep, size: int) -> float:
        count = len(step.carries)
        after, values = (sum(map(len, reads)) for reads in (step.reads[:count], step.reads[count:]))
        terms = values + 2 * after / size
        once: float = _POWERS / max(self.loop.length, 1)
        return _ISSUE * self.operations + _TERM * terms + self.around / size + once

    def _longest(self, fused: bool) -> float:
        """Returns the longest path of operations from a carry to its next value, or to that of one that reads it.

        Args:
            fused: a product that is only added counts nothing.
        """
        loop, longest = self.loop, 0.0
        added = {v for e in loop.eqns if primitives.is_sum(e) for v in jaxprs.inputs(e)} if fused else frozenset[Var]()
        for group in jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out)[0]:
            length = dict.fromkeys((loop.carry[i] for i in group), 0.0)
            for eqn in loop.eqns:
                before = [length[v] for v in jaxprs.inputs(eqn) if v in length]
                if before:
                    is_free = eqn.primitive.name == "mul" and eqn.outvars[0] in added
                    length.update(dict.fromkeys(eqn.outvars, max(before) + (0 if is_free else _operations(eqn))))
            ends = [length[a] for a in (loop.carry_out[i] for i in group) if jaxprs.is_in(a, length)]
            longest = max(longest, *ends, 0.0)
        return longest
