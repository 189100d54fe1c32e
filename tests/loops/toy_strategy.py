"""A toy strategy: cumulative sums of floats run as `jnp.cumsum` over time, T, in another order than the loop's."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import Loop, Results, Unsupported
from jrnn.loops.ir.description import Description
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context


@dataclass(frozen=True)
class CumulativeSum:
    loop: Loop

    def run(self, consts: Any, init: Any, xs: Any, length: Any) -> Results:
        (start,), (x,) = init, xs  # x: [T, ...]
        summed = jnp.cumsum(x[::-1] if self.loop.reverse else x, axis=0)
        sums = start[None] + summed  # with [None]: a user may forbid rank promotion
        return [sums[-1]], [sums[::-1] if self.loop.reverse else sums] * len(self.loop.ys)

    def estimate(self, estimator: Estimator) -> Estimate:
        stack = self.loop.length * jaxprs.nbytes(self.loop.xs[0])
        return Estimate(2 * estimator.machine.reading(stack, stack), stack)

    def describe(self) -> Description:
        return Description(remarks=("all steps run as one jnp.cumsum",))


def try_cumsum(context: Context) -> list[Candidate]:
    why = refusal(context.loop)
    if why is not None:
        raise Unsupported(why)
    return [context.candidate("cumsum", CumulativeSum(context.loop))]


def refusal(loop: Loop) -> str | None:
    if not jaxprs.is_known(loop.length):
        return "the number of steps is symbolic"
    if not len(loop.carry) == len(loop.xs) == len(loop.eqns) == 1 <= len(loop.ys):
        return "a cumulative sum has one carry, one input, one equation and an output"
    (add,), carry, x = loop.eqns, loop.carry[0], loop.xs[0]
    if not primitives.is_addition(add) or {*jaxprs.inputs(add)} != {carry, x}:
        return "its step is not carry + x"
    if any(out is not add.outvars[0] for out in loop.outputs):
        return "the sum is not both the new carry and the output"
    return (
        None
        if jnp.issubdtype(carry.aval.dtype, jnp.floating)
        else f"its dtype is {carry.aval.dtype}, not a float"
    )
