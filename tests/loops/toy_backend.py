"""A toy backend: cumulative sums of floats run as `jnp.cumsum`, and other loops are left to `jax.lax.scan`.

It shows what a backend defines. The order of its sums may differ from the loop's, which jrnn's own backends keep for
loops that the caller wrote.

Shapes: T time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.loops.ir import Loop, Options, Results
from jrnn.loops.passes import distinct
from jrnn.loops.strategies import Description, Target
from jrnn.loops.strategies.backend import Backend

NAME = "cumsum"


@dataclass(frozen=True)
class CumulativeSum:
    """Runs a loop as one cumulative sum over time."""

    loop: Loop
    way = NAME

    def run(self, consts: Any, init: Any, xs: Any, length: Any) -> Results:
        (start,), (x,) = init, xs  # x: [T, ...]
        summed = jnp.cumsum(x[::-1] if self.loop.reverse else x, axis=0)
        sums = start[None] + summed  # with [None]: a user may forbid rank promotion
        return [sums[-1]], [sums[::-1] if self.loop.reverse else sums] * len(self.loop.ys)

    def describe(self) -> Description:
        return Description(remarks=("all steps run as one jnp.cumsum",))


def plan(loop: Loop, target: Target, options: Options) -> CumulativeSum | str:
    """Returns the node of a loop, or the reason why it is left as it is."""
    why = refusal(distinct(loop))
    return CumulativeSum(loop) if why is None else f"not {NAME}: {why}"


def refusal(loop: Loop) -> str | None:
    """Returns the reason why a loop is not a cumulative sum of floats, or None."""
    if not jaxprs.is_known(loop.length):
        return "the number of steps is symbolic"
    if not len(loop.carry) == len(loop.xs) == len(loop.eqns) == 1 <= len(loop.ys):
        return "a cumulative sum has one carry, one input, one equation and an output"
    (add,), carry, x = loop.eqns, loop.carry[0], loop.xs[0]
    if not primitives.is_addition(add) or {*jaxprs.inputs(add)} != {carry, x}:
        return "its step is not carry + x"
    if any(out is not add.outvars[0] for out in loop.outputs):
        return "the sum is not both the new carry and the output"
    return None if jnp.issubdtype(carry.aval.dtype, jnp.floating) else f"its dtype is {carry.aval.dtype}, not a float"


BACKEND = Backend(plan, platforms=("toy",))
