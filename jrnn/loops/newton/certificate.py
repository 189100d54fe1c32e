"""The certificate of states that Newton's method found: a bound of how far each element is from the loop's.

Let h be the states found, g[t] = f(h[t-1], x[t]) the step at all times, r = g - h the residuals, and u the radius of g as
the step is rounded, here and in the loop. Suppose that every h[t-1] is off by at most e[t-1], in each element. By the mean
value theorem h[t] is off by at most

    e[t] = A[t] e[t-1] + |r[t]| + 2 u[t],    e before the first step = 0,

where A bounds the absolute value of the Jacobian over the box h[t-1] +- e[t-1]. The boxes have a radius that is chosen
before, in the scale of each element. So e is a bound, by induction over the steps, as far as it stays below that radius and
no step jumps in its box. `enclosure.py` computes A, u and the jumps from the equations of the step.

What the step makes of these states, its outputs, is enclosed too: from boxes h[t-1] +- e[t-1] and h[t] +- e[t]. A slope of
1,000 between a state and an output makes the output's error 1,000 times as large.

If all residuals are exactly 0, the states are those of the loop without any further reason. docs/notes/newton.md says more.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Program
from jrnn.jaxprs.tangents import pushed
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.newton.enclosure import Box, NotEnclosed, enclosed

Values = Sequence[Any]
_ROUNDED = 1.01  # bounds are computed with rounding, too


@dataclass(frozen=True)
class Enclosures:
    """The step of a group of carries on boxes, at one time.

    Attributes:
        group: the group.
        step: from constants, the stack of one step and old carries to new carries, with all calls opened.
        tangents: the same with the tangents of the old carries, to the tangents of the new ones.
        fixed: the number of constants and stacks.
    """

    group: Blocks
    step: Program
    tangents: Program
    fixed: int

    @staticmethod
    def of(group: Blocks, fn: Callable[..., Values], consts: Values, stack: Values, old: Values) -> Enclosures | None:
        """Returns the enclosures of a step; None if it has an equation without one."""
        avals = [*map(jax.typeof, consts), *stack, *old]
        count = len(consts) + len(stack)

        def flat(*args: Any) -> Values:
            return fn(args[: len(consts)], args[len(consts) : count], args[count:])

        step = jaxprs.opened(jax.make_jaxpr(flat)(*avals), jaxprs.LOWERED_CALLS)
        places = range(count, len(avals))
        moved = jax.make_jaxpr(lambda *args: pushed(step.run, args[: len(avals)], places, args[len(avals) :])[1])
        tangents = jaxprs.opened(moved(*avals, *old), jaxprs.LOWERED_CALLS)
        enclosures = Enclosures(group, step, tangents, count)
        radius = jax.ShapeDtypeStruct((*group.batch, group.block), jnp.result_type(jnp.float32, *old))
        try:
            jax.eval_shape(
                lambda args, radius: (enclosures.rounding(args), enclosures.slopes(args, radius)), avals, radius
            )
        except NotEnclosed:
            return None
        return enclosures

    def _boxes(self, args: Values, radii: Values, tangents: Values | None) -> tuple[list[Box], Any]:
        """Returns the new carries, or their tangents, from old carries with these radii; and whether they may jump."""
        program = self.step if tangents is None else self.tangents
        boxes = [Box(v) for v in args[: self.fixed]]
        boxes += [Box(v, r) for v, r in zip(args[self.fixed :], radii)]
        boxes += [
            Box(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t) for t in tangents or ()
        ]
        names = (*program.constvars, *program.invars)
        env = dict(zip(names, (*map(Box, program.consts), *boxes)))
        env, jumps = enclosed(program.eqns, env)
        return [Box(jaxprs.value({}, a)) if jaxprs.is_literal(a) else env[a] for a in program.outvars], jumps

    def rounding(self, args: Values) -> Any:
        """Returns u at one time, [A, M]."""
        boxes, _ = self._boxes(args, [Box(v).spread for v in args[self.fixed :]], None)
        return self.group.join([box.spread for box in boxes])

    def slopes(self, args: Values, radius: Any) -> tuple[Any, Any]:
        """Returns A, [A, M, M], and whether the step may jump, for old carries with a radius [A, M], at one time."""
        radii = self.group.part(radius)
        columns = jax.vmap(lambda k: self._column(args, radii, k))(jnp.arange(self.group.block))
        return jnp.moveaxis(columns, 0, -1), self._boxes(args, radii, None)[1]

    def spread(self, args: Values, radius: Any) -> tuple[Any, Any]:
        """Returns A times the radius, [A, M], and whether the step may jump, without all of A in memory."""
        radii = self.group.part(radius)

        def add(total: Any, k: Any) -> tuple[Any, None]:
            return total + self._column(args, radii, k) * jax.lax.dynamic_index_in_dim(radius, k, -1), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(radius), jnp.arange(self.group.block))
        return total, self._boxes(args, radii, None)[1]

    def _column(self, args: Values, radii: Values, k: Any) -> Any:
        boxes, _ = self._boxes(args, radii, self.group.basis(k, args[self.fixed :]))
        return self.group.join([box.size + box.spread for box in boxes])


def of_outputs(
    step: Program, old: Values, new: Values, xs: Values, before: Values, after: Values
) -> list[tuple[Any, Any]]:
    """Returns how far each output of a step may be off, and what rounding may change of it, at all times.

    Args:
        step: from carries and inputs to new carries and outputs, with all calls opened.
        old, new: the carries before and after each step, [T, ...].
        xs: the inputs, [T, ...].
        before, after: bounds of the errors of these carries.

    Raises:
        NotEnclosed: if an equation of an output has no enclosure.
    """
    carry, inputs = step.invars[: len(old)], step.invars[len(old) :]
    outs, ys = step.outvars[: len(old)], step.outvars[len(old) :]

    def at_one_time(old: Values, new: Values, xs: Values, before: Values, after: Values) -> list[tuple[Any, Any]]:
        def boxes(before: Values, after: Values) -> tuple[list[Box], Any]:
            env = {v: Box(n, r) for v, n, r in zip(outs, new, after) if not jaxprs.is_literal(v)}
            env |= zip(step.constvars, map(Box, step.consts))
            env |= zip(inputs, map(Box, xs))
            env |= zip(carry, map(Box, old, before))
            env, jumps = enclosed(jaxprs.needed(step.eqns, ys, set(env))[0], env)
            return [Box(jaxprs.value({}, y)) if jaxprs.is_literal(y) else env[y] for y in ys], jumps

        off, jumps = boxes(before, after)
        rounded, _ = boxes(*(list(map(jnp.zeros_like, radii)) for radii in (before, after)))
        moves = [box.radius is not None for box in off]
        return [(jnp.where(jumps & m, jnp.inf, box.spread), exact.spread) for box, exact, m in zip(off, rounded, moves)]

    return jax.vmap(at_one_time)(*map(list, (old, new, xs, before, after)))


def bounds(slopes: Any, jumps: Any, added: Any) -> Any:
    """Returns e at all times, [T, A, M]; infinite or not a number where there is none.

    Args:
        slopes: A, [T, A, M, M].
        jumps: whether a step may jump, [T].
        added: |r| + 2 u, [T, A, M].
    """
    added = jnp.where(jumps.reshape(-1, *[1] * (added.ndim - 1)), jnp.inf, added)
    return _ROUNDED * rounds.associative_solve(slopes, added)


def bounds_in_radii(spread: Any, jumps: Any, added: Any, radius: Any) -> Any:
    """Returns e at all times as `bounds` does, from A times the radius of the old carries.

    Measured in radii, A takes the largest error of a block to at most `spread / radius` times that error.
    """
    grows, gets = (jnp.max(v / radius, -1, keepdims=True) for v in (spread, added))
    return bounds(grows[..., None], jumps, gets) * radius
