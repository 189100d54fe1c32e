"""The strategy "unrolled" on a CPU: several steps of a tiny loop in one iteration, if XLA compiles the loop as one kernel.

A step of a few nanoseconds waits for the step before it, and for the iteration of its loop. Unrolled, it waits for that step
alone. Steps that are affine in the carry with constant coefficients run in blocks that wait only for the carry before them,
by the kernel for CPUs. docs/notes/cpu_log.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Var, primitives
from jrnn.loops.costs.bounds import ELEMENTWISE_MIN_GAIN
from jrnn.loops.costs.constants import EQUATIONS, TINY_LOOP
from jrnn.loops.costs.equation_costs import element_seconds
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate, total
from jrnn.loops.costs.machines import CPU
from jrnn.loops.ir import Loop, Results, Unsupported
from jrnn.loops.ir.description import Description, described
from jrnn.loops.passes import Moves
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split, Steps

if TYPE_CHECKING:
    from jrnn.loops.kernels.native.affine_call import AffineCall

NAME = "unrolled"
_STEPS = 8  # of an iteration
_STEPS_WITHIN_LIMIT = 4  # the same where XLA makes one kernel of small iterations alone
_MAX_ELEMENTS = 8  # of a value: with 16 a step works on whole vectors, and takes its time for that
_MAX_EQUATIONS = 400  # of a step that is read
# Operations of a step, with functions as several: longer ones gain little, and take long to compile.
_MAX_OPERATIONS = 100
# How many times the estimated bytes XLA may count of an iteration. Beyond its limit a loop takes ten times as long.
_BYTES_MARGIN = 1.15


@dataclass(frozen=True)
class Unrolled:
    """Runs several steps in one iteration.

    Attributes:
        loop: the loop.
        size: the steps of an iteration.
        why: the reason why it does not run in blocks.
    """

    loop: Loop
    size: int
    why: str = ""

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        from jrnn.loops.kernels.unrolled import run_unrolled

        return run_unrolled(self.loop, self.size, consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        whole = Steps(self.loop).estimate(estimator)
        cycles = Cycles(self.loop)
        ratio = cycles.unrolled(self.size) / cycles.as_it_is
        return estimate({name: seconds * ratio for name, seconds in whole.terms}, whole.memory)

    def describe(self) -> Description:
        return described(
            self.loop,
            f"{self.size} steps in one iteration of the loop, each after the one before it: {self.why}",
        )


@dataclass(frozen=True)
class InBlocks:
    """Runs an affine loop as one call of the kernel for CPUs, in blocks of steps."""

    affine: AffineCall

    @property
    def loop(self) -> Loop:
        return self.affine.step.loop

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        return self.affine.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        loop = self.loop
        call = self.affine
        whole = Steps(self.loop).estimate(estimator)
        cycles = Cycles(loop)
        steps = jaxprs.extent(loop.length)
        ours = cycles.in_blocks(call)
        stacks = estimator.sizes(
            {*call.encoded.stacks, *call.outs}.difference(loop.xs, jaxprs.variables(loop.ys))
        )
        if estimator.is_small(loop, estimator.part(loop.eqns, loop.outputs)):
            kernel_terms = {name: seconds * ours / cycles.as_it_is for name, seconds in whole.terms}
        else:
            kernel_terms = {"calls": steps * ours * TINY_LOOP.seconds}
        read = [*call.encoded.stacks, *jaxprs.variables(loop.ys), *call.sums.outer]
        outer = estimator.part(call.outer_eqns, read, all_steps=True)
        memory = whole.memory + steps * (stacks + outer.peak_bytes)
        return estimate(
            total(kernel_terms, outer.terms(estimator.machine, steps, memory, 1)), memory
        )

    def describe(self) -> Description:
        block = f"in blocks of {self.affine.block_steps} steps"
        remark = f"one call of the kernel for CPUs, {block}: the carry is affine"
        return described(self.loop, remark)


def try_unrolled(context: Context) -> Sequence[Candidate]:
    """Returns candidates for a tiny loop; nothing for others. Of steps in one iteration, constants are computed once."""
    if len(context.loop.eqns) > _MAX_EQUATIONS:
        return []
    split_loop = context.split(Moves())
    candidates = []
    for node in _tiny_nodes(context, split_loop.residual, context.loop):
        if isinstance(node, InBlocks):
            whole: Any = node
            label = "in blocks"
        else:
            whole = Split(split_loop, node)
            label = "unrolled"
        candidates.append(context.candidate(NAME, whole, label, ELEMENTWISE_MIN_GAIN))
    return candidates


def tiny_node(context: Context, loop: Loop) -> Unrolled | InBlocks | None:
    """Returns the fastest node of a loop, or of a part of one that stays, or None if it is not tiny."""
    baseline = context.baseline.estimate
    fitting = []
    for node in _tiny_nodes(context, loop, loop):
        cost = node.estimate(context.estimator)
        if cost.memory <= context.bounds.max_bytes(baseline, cost):
            fitting.append((node, cost.seconds))
    return min(fitting, key=lambda pair: pair[1])[0] if fitting else None


def _tiny_nodes(context: Context, residual: Loop, whole: Loop) -> list[Unrolled | InBlocks]:
    """Returns the ways to run a tiny loop: several steps of its residual loop in an iteration, and the whole in blocks."""
    is_known = jaxprs.is_known(whole.length)
    if context.target.devices > 1 or not is_known or not _is_over_few_numbers(whole):
        return []
    nodes: list[Unrolled | InBlocks] = []
    affine: AffineCall | None = None
    why = "that is estimated to be faster"
    try:
        affine = _affine(context, whole)
    except Unsupported as reason:
        why = str(reason)
    size = _size(residual, context.estimator)
    if size:
        nodes.append(Unrolled(residual, size, why))
    if affine is not None:
        nodes.append(InBlocks(affine))
    return nodes


def _affine(context: Context, loop: Loop) -> AffineCall:
    """Returns the call of the kernel for an affine loop; raises `Unsupported` if there is none."""
    from jrnn.loops.kernels.native.affine_call import affine_call
    from jrnn.loops.kernels.native.affine_step import affine_step

    if context.target.exported:
        raise Unsupported("the program is exported")
    call = affine_call(affine_step(loop))
    for i in call.step.sums:
        dtype = loop.carry[i].aval.dtype
        if dtype != call.step.dtype and jnp.issubdtype(dtype, jnp.inexact):
            raise Unsupported(f"a sum is in {dtype}")
    if loop.length < call.block_steps:
        raise Unsupported(f"there are fewer than {call.block_steps} steps")
    return call


def _is_over_few_numbers(loop: Loop) -> bool:
    values = (*loop.inputs, *jaxprs.variables(loop.outputs))
    return bool(loop.carry) and all(map(_is_tiny, loop.eqns)) and not any(map(_is_large, values))


def _size(loop: Loop, estimator: Estimator) -> int:
    """Returns the steps of an iteration, or 0 for a loop that is not tiny, or would not be one kernel."""
    if sum(map(_operations, loop.eqns)) > _MAX_OPERATIONS or _has_predicted_branch(loop):
        return 0
    size = max(
        _STEPS if estimator.machine.one_kernel_bytes == math.inf else _STEPS_WITHIN_LIMIT,
        int(loop.unroll),
    )
    inside = estimator.part(loop.eqns, loop.outputs)
    several = inside._replace(touched_bytes=int(_BYTES_MARGIN * size * inside.touched_bytes))
    return size if size <= min(2 * _STEPS, loop.length) and estimator.is_small(loop, several) else 0


def _is_tiny(eqn: jaxprs.Eqn) -> bool:
    return (
        primitives.is_cheap(eqn)
        and not eqn.effects
        and not any(map(_is_large, (*jaxprs.inputs(eqn), *eqn.outvars)))
    )


def _is_large(v: Var) -> bool:
    return (
        jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        or jaxprs.elements(v.aval.shape) > _MAX_ELEMENTS
    )


def _has_predicted_branch(loop: Loop) -> bool:
    """Returns True if the carry selects among values that do not depend on it.

    XLA:CPU makes a branch of this in a loop of one step an iteration. The processor predicts it, and does not wait for
    the carry.
    """
    on_carry = loop.on_carry
    for eqn in loop.eqns:
        if eqn.primitive.name != "select_n" or not jaxprs.is_in(eqn.invars[0], on_carry):
            continue
        if on_carry.isdisjoint(jaxprs.variables(eqn.invars[1:])):
            return True
    return False


def _operations(eqn: jaxprs.Eqn) -> float:
    """Returns the operations of an equation, a function as several."""
    return element_seconds(eqn, CPU) / (EQUATIONS.min_elements * CPU.element)


class Cycles:
    """The cycles of a step of a loop that is one kernel."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.operations = sum(map(_operations, loop.eqns))
        self.iteration = TINY_LOOP.iteration + TINY_LOOP.carried * len(loop.carry)

    @property
    def as_it_is(self) -> float:
        return self._step(fused=False) + self.iteration

    def unrolled(self, size: int) -> float:
        return self._step(fused=True) + self.iteration / size

    def in_blocks(self, call: AffineCall) -> float:
        costs = TINY_LOOP
        n = len(call.step.carries)
        m = len(call.step.inputs)
        values = len(call.step.values)
        is_stored = call.step.stored != "none"
        products = 0
        carries = {1: costs.first_order, 2: costs.second_order}.get(n, 0.0)
        if n > 2 or (n == 2 and not is_stored):
            carries = costs.response * m * (values + (not is_stored)) + costs.value * (values + 1)
            products = call.block_steps * (n + values) * n * (n + m + 1)
        in_tile: float = len(call.sums.inner)
        for eqn in call.tile_eqns:
            in_tile += min(_operations(eqn), costs.operations_of_function)
        once = costs.call + costs.product_of_powers * products
        return carries + costs.operation_in_tile * in_tile + once / int(self.loop.length)

    def _step(self, fused: bool) -> float:
        """Returns the cycles of a step without its iteration: it waits for results, or for units that compute."""
        waiting = TINY_LOOP.latency * self._longest(fused)
        return max(waiting, TINY_LOOP.issue * self.operations)

    def _longest(self, fused: bool) -> float:
        """Returns the longest path of operations from a carry to its next value, or to that of one that reads it.

        Args:
            fused: a product that is only added counts nothing.
        """
        loop = self.loop
        longest = 0.0
        added: set[Var] = set()
        if fused:
            for eqn in filter(primitives.is_sum, loop.eqns):
                added.update(jaxprs.inputs(eqn))
        for group in jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out).groups:
            length = dict.fromkeys((loop.carry[i] for i in group), 0.0)
            for eqn in loop.eqns:
                before = [length[v] for v in jaxprs.inputs(eqn) if v in length]
                if not before:
                    continue
                is_free = eqn.primitive.name == "mul" and eqn.outvars[0] in added
                own = 0 if is_free else _operations(eqn)
                length.update(dict.fromkeys(eqn.outvars, max(before) + own))
            for i in group:
                out = loop.carry_out[i]
                if jaxprs.is_in(out, length):
                    longest = max(longest, length[out])
        return longest
