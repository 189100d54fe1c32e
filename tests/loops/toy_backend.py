"""A backend of its own, as docs/notes/map.md says: loops whose one carry adds up its input are a cumulative sum."""

from dataclasses import dataclass

import jax.numpy as jnp

from jrnn.loops.backends.backend import Backend
from jrnn.loops.loop import Loop
from jrnn.loops.plans import LoopPlan
from jrnn.loops.plans.description import Description


@dataclass(frozen=True)
class CumulativeSum:
    """Runs a loop `c = c + x` that returns each new c as one cumulative sum."""

    loop: Loop
    name = "cumulative sum"

    def run(self, consts, init, xs, length):
        (first,), (x,) = init, xs
        sums = first[None] + jnp.cumsum(x[::-1] if self.loop.reverse else x, axis=0)
        last = sums[-1]
        return [last], [sums[::-1] if self.loop.reverse else sums] * len(self.loop.ys)

    def describe(self):
        return Description(remarks=("the loop is one cumulative sum",))


def is_cumulative_sum(loop):
    """Returns True for a step that adds its input to its carry and returns nothing but the sum."""
    if len(loop.eqns) != 1 or len(loop.carry) != 1 or len(loop.xs) != 1:
        return False
    (eqn,) = loop.eqns
    adds = eqn.primitive.name == "add" and set(eqn.invars) == {loop.carry[0], loop.xs[0]}
    return adds and {*loop.carry_out, *loop.ys} == {eqn.outvars[0]}


def plan(loop, target, options):
    if not is_cumulative_sum(loop):
        return LoopPlan.left(target, loop, "it is no cumulative sum")
    return LoopPlan(target, loop, CumulativeSum(loop), "cumsum")


BACKEND = Backend(("toy",), plan)
