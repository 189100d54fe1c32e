"""The strategy "unrolled" on a CPU: several steps of a tiny loop in one iteration, if XLA compiles the loop as one kernel.

A step of a few nanoseconds waits for the step before it, and for the iteration of its loop. Unrolled, it waits for that step
alone. Steps that are affine in the carry with constant coefficients run in blocks that wait only for the carry before them,
by the kernel for CPUs, and so do a few lanes whose carries are each affine in themselves (over_lanes.py).
docs/notes/cpu_log.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.costs.bounds import ELEMENTWISE_MIN_GAIN
from jrnn.loops.costs.constants import TINY_LOOP
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate, Terms, estimate
from jrnn.loops.costs.tiny_loops import block_cycles, operations, step_cycles, tile_operations
from jrnn.loops.ir import Length, Loop, Results, Unsupported, Values
from jrnn.loops.ir.description import Description, described
from jrnn.loops.passes import NOTHING_MOVES
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split
from jrnn.loops.strategies.over_lanes import call_estimate, over_lanes

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
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        from jrnn.loops.kernels.unrolled import run_unrolled

        return run_unrolled(
            self.loop,
            self.size,
            consts,
            init,
            xs,
            length,
        )

    def estimate(self, estimator: Estimator) -> Estimate:
        whole = estimator.whole(self.loop)
        ratio = step_cycles(self.loop, self.size) / step_cycles(self.loop, 1)
        return estimate(_scaled(whole, ratio), whole.memory)

    def describe(self) -> Description:
        remark = f"{self.size} steps in one iteration of the loop, each after the one before it"
        return described(self.loop, f"{remark}: {self.why}")


def _scaled(estimated: Estimate, ratio: float) -> Terms:
    """Returns the parts of a time, if the whole takes `ratio` times as long."""
    return {name: seconds * ratio for name, seconds in estimated.terms}


@dataclass(frozen=True)
class InBlocks:
    """Runs an affine loop as one call of the kernel for CPUs, in blocks of steps."""

    affine: AffineCall

    @property
    def loop(self) -> Loop:
        return self.affine.step.loop

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        return self.affine.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        loop = self.loop
        whole = estimator.whole(loop)
        cycles = self._cycles()
        kernel_terms = {"calls": jaxprs.extent(loop.length) * cycles * TINY_LOOP.seconds}
        if estimator.is_small(loop, estimator.part(loop.eqns, loop.outputs)):
            kernel_terms = _scaled(whole, cycles / step_cycles(loop))
        return call_estimate(estimator, self.affine, self.affine.sums.outer, kernel_terms)

    def _cycles(self) -> float:
        """Returns the cycles of a step."""
        call = self.affine
        return block_cycles(
            carries=len(call.step.carries),
            inputs=len(call.step.inputs),
            values=len(call.step.values),
            stores=call.step.stored != "none",
            block_steps=call.block_steps,
            steps=int(self.loop.length),
            operations_in_tile=len(call.sums.inner) + tile_operations(call.tile_eqns),
        )

    def describe(self) -> Description:
        block = f"in blocks of {self.affine.block_steps} steps"
        remark = f"one call of the kernel for CPUs, {block}: the carry is affine"
        return described(self.loop, remark)


def try_unrolled(context: Context) -> Sequence[Candidate]:
    """Returns candidates for a tiny loop; nothing for others. Of steps in one iteration, constants are computed once."""
    if len(context.loop.eqns) > _MAX_EQUATIONS:
        return []
    split_loop = context.split(NOTHING_MOVES)
    candidates = []
    for node in _tiny_nodes(context, split_loop.residual, context.loop):
        whole = node if node.loop is context.loop else Split(split_loop, node)
        label = "in blocks" if isinstance(node, InBlocks) else "unrolled"
        candidates.append(context.candidate(NAME, whole, label, ELEMENTWISE_MIN_GAIN))
    lanes = over_lanes(context)
    if lanes is not None:
        candidates.append(context.candidate(NAME, lanes, "over lanes", ELEMENTWISE_MIN_GAIN))
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


def _tiny_nodes(
    context: Context,
    residual: Loop,
    whole: Loop,
) -> list[Unrolled | InBlocks]:
    """Returns the ways to run a tiny loop: several steps of its residual loop in an iteration, and the whole in blocks."""
    is_known = jaxprs.is_known(whole.length)
    if not _is_over_few_numbers(whole):
        whole = residual  # whose constants are numbers, where the step reads them from arrays
    if context.target.devices > 1 or not is_known or not _is_over_few_numbers(whole):
        return []
    blocks: list[Unrolled | InBlocks] = []
    why = "that is estimated to be faster"
    try:
        blocks.append(InBlocks(_affine(context, whole)))
    except Unsupported as reason:
        why = str(reason)
    size = _size(residual, context.estimator)
    return [Unrolled(residual, size, why), *blocks] if size else blocks


def call_in_blocks(loop: Loop) -> AffineCall:
    """Returns the call of the kernel for an affine loop, with the coefficients of a single carry."""
    from jrnn.loops.affine.reader import read_diagonal
    from jrnn.loops.kernels.native.affine_call import affine_call
    from jrnn.loops.kernels.native.affine_step import affine_step

    step = affine_step(loop)
    if len(step.carries) > 1:
        return affine_call(step)
    affine = read_diagonal(loop, step.carries, step.eqns)
    return affine_call(step, [*affine.a[0], *affine.b], affine.eqns)


def _affine(context: Context, loop: Loop) -> AffineCall:
    """Returns the call of the kernel for an affine loop; raises `Unsupported` if there is none."""
    if context.target.exported:
        raise Unsupported("the program is exported")
    call = call_in_blocks(loop)
    for i in call.step.sums:
        dtype = loop.carry[i].aval.dtype
        if dtype != call.step.dtype and jnp.issubdtype(dtype, jnp.inexact):
            raise Unsupported(f"a sum is in {dtype}")
    if loop.length < call.block_steps:
        raise Unsupported(f"there are fewer than {call.block_steps} steps")
    return call


def _is_over_few_numbers(loop: Loop) -> bool:
    """Whether a loop carries something, and all of its values are a few numbers."""
    values = (*loop.inputs, *jaxprs.variables(loop.outputs))
    return bool(loop.carry) and all(map(_is_tiny, loop.eqns)) and not any(map(_is_large, values))


def _size(loop: Loop, estimator: Estimator) -> int:
    """Returns the steps of an iteration, or 0 for a loop that is not tiny, would not be one kernel, or would gain little."""
    if sum(map(operations, loop.eqns)) > _MAX_OPERATIONS or _has_predicted_branch(loop):
        return 0
    is_unlimited = estimator.machine.one_kernel_bytes == math.inf
    size = _STEPS if is_unlimited else _STEPS_WITHIN_LIMIT
    inside = estimator.part(loop.eqns, loop.outputs)
    several = inside._replace(touched_bytes=int(_BYTES_MARGIN * size * inside.touched_bytes))
    fits = size <= loop.length and estimator.is_small(loop, several)
    # What else a plan gains, such as arrays as single numbers, must not pay for an iteration that gains nothing.
    gains = step_cycles(loop, size) <= (1 - ELEMENTWISE_MIN_GAIN) * step_cycles(loop, 1)
    return size if fits and gains else 0


def _is_tiny(eqn: Eqn) -> bool:
    """Whether an equation computes a few numbers from others, without a call."""
    is_plain = primitives.is_cheap(eqn) and not eqn.effects
    return is_plain and not any(map(_is_large, (*jaxprs.inputs(eqn), *eqn.outvars)))


def _is_large(v: Var) -> bool:
    """Whether a value has many elements, or is a key."""
    is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    return is_key or jaxprs.elements(v.aval.shape) > _MAX_ELEMENTS


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
