"""The certificate of states that Newton's method found: a bound of how far each element is from the loop's.

Let h be the states found, g[t] = f(h[t-1], x[t]) the step at all times, r = g - h the residuals, and u the radius of g as
the step is rounded, here and in the loop. Suppose that every h[t-1] is off by at most e[t-1], in each element. By the mean
value theorem h[t] is off by at most

    e[t] = A[t] e[t-1] + |r[t]| + 2 u[t],    e before the first step = 0,

where A bounds the absolute value of the Jacobian over the box h[t-1] +- e[t-1]. The boxes have a radius that is chosen
before, in the scale of each element. So e is a bound, by induction over the steps, as far as it stays below that radius and
no step jumps in its box. `enclosure.py` computes A, u and the jumps from the equations of the step.

What the step makes of these states, its outputs, is enclosed too: from boxes h[t-1] +- e[t-1] and h[t] +- e[t]. A slope of
1,000 between a state and an output makes the output's error 1,000 times as large. Likewise, what a later group of
carries reads of the states of earlier groups is a box, and the change of the step over this box is added to |r|.

If all residuals are exactly 0, the states are those of the loop without any further reason. docs/notes/newton.md says more.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Program, Var
from jrnn.jaxprs.flat import body_of
from jrnn.jaxprs.tangents import pushed
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.ir import Loop
from jrnn.loops.newton.enclosure import Box, NotEnclosed, enclosed

Values = Sequence[Any]
_ROUNDED = 1.01  # bounds are computed with rounding, too


@dataclass(frozen=True)
class Enclosures:
    """The step of a group of carries on boxes, at one time.

    Attributes:
        group: the group.
        step: from constants, the stack of one step and old carries to new carries, with all calls inlined.
        tangents: the same with the tangents of the old carries, to the tangents of the new ones.

    Its methods take `inputs`, the boxes of the constants and of the stack, and the old carries.
    """

    group: Blocks
    step: Program
    tangents: Program

    @staticmethod
    def of(
        group: Blocks,
        fn: Callable[..., Values],
        consts: Values,
        stack: Values,
        radii: Values,
        old: Values,
    ) -> Enclosures | None:
        """Returns the enclosures of a step; None if it has an equation without one.

        Args:
            group, fn, consts: the group, its step, and the values of all steps.
            stack, radii, old: the types of the stack of one step, of the radii of its boxes, and of the carries.
        """
        avals = [*map(jax.typeof, consts), *stack, *old]
        count = len(consts) + len(stack)

        def flat(*args: Any) -> Values:
            return fn(args[: len(consts)], args[len(consts) : count], args[count:])

        step = jaxprs.inlined(jax.make_jaxpr(flat)(*avals), jaxprs.LOWERED_CALLS)
        places = range(count, len(avals))
        moved = jax.make_jaxpr(
            lambda *args: pushed(step.run, args[: len(avals)], places, args[len(avals) :])[1]
        )
        tangents = jaxprs.inlined(moved(*avals, *old), body_of)
        enclosures = Enclosures(group, step, tangents)
        radius = jax.ShapeDtypeStruct(
            (*group.batch, group.block), jnp.result_type(jnp.float32, *old)
        )

        def everything(
            consts: Values, stack: Values, radii: Values, old: Values, radius: Any
        ) -> Any:
            inputs = [*map(Box, consts), *map(Box, stack, radii)]
            return enclosures.rounding(inputs, old), enclosures.slopes(inputs, old, radius)

        try:
            jax.eval_shape(everything, [*map(jax.typeof, consts)], stack, radii, old, radius)
        except NotEnclosed:
            return None
        return enclosures

    def _boxes(
        self, inputs: Sequence[Box], old: Values, radii: Values, tangents: Values | None
    ) -> tuple[list[Box], Any]:
        """Returns the new carries, or their tangents, from old carries with these radii; and whether they may jump."""
        program = self.step if tangents is None else self.tangents
        boxes = [*inputs, *map(Box, old, radii)]
        boxes += [
            Box(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t)
            for t in tangents or ()
        ]
        names = (*program.constvars, *program.invars)
        env = dict(zip(names, (*map(Box, program.consts), *boxes)))
        env, jumps = enclosed(program.eqns, env)
        return [
            Box(jaxprs.value({}, a)) if jaxprs.is_literal(a) else env[a] for a in program.outvars
        ], jumps

    def rounding(self, inputs: Sequence[Box], old: Values) -> Any:
        """Returns u at one time, and what the radii of the inputs add to it, [A, M]."""
        boxes, _ = self._boxes(inputs, old, [Box(v).spread for v in old], None)
        return self.group.join([box.spread for box in boxes])

    def slopes(self, inputs: Sequence[Box], old: Values, radius: Any) -> tuple[Any, Any]:
        """Returns A, [A, M, M], and whether the step may jump, for old carries with a radius [A, M], at one time."""
        radii = self.group.part(radius)
        columns = jax.vmap(lambda k: self._column(inputs, old, radii, k))(
            jnp.arange(self.group.block)
        )
        return jnp.moveaxis(columns, 0, -1), self._boxes(inputs, old, radii, None)[1]

    def spread(self, inputs: Sequence[Box], old: Values, radius: Any) -> tuple[Any, Any]:
        """Returns A times the radius, [A, M], and whether the step may jump, without all of A in memory."""
        radii = self.group.part(radius)

        def add(total: Any, k: Any) -> tuple[Any, None]:
            return total + self._column(inputs, old, radii, k) * jax.lax.dynamic_index_in_dim(
                radius, k, -1
            ), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(radius), jnp.arange(self.group.block))
        return total, self._boxes(inputs, old, radii, None)[1]

    def _column(self, inputs: Sequence[Box], old: Values, radii: Values, k: Any) -> Any:
        boxes, _ = self._boxes(inputs, old, radii, self.group.basis(k, old))
        return self.group.join([box.size + box.spread for box in boxes])


def of_outputs(
    step: Program, old: Values, new: Values, xs: Values, before: Values, after: Values
) -> list[tuple[Any, Any]]:
    """Returns how far each output of a step may be off, and what rounding may change of it, at all times.

    Args:
        step: from carries and inputs to new carries and outputs, with all calls inlined.
        old, new: the carries before and after each step, [T, ...].
        xs: the inputs, [T, ...].
        before, after: bounds of the errors of these carries.

    Raises:
        NotEnclosed: if an equation of an output has no enclosure.
    """
    carry = step.invars[: len(old)]
    inputs = step.invars[len(old) :]
    outs = step.outvars[: len(old)]
    ys = step.outvars[len(old) :]

    def at_one_time(
        old: Values, new: Values, xs: Values, before: Values, after: Values
    ) -> list[tuple[Any, Any]]:
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
        return [
            (jnp.where(jumps & m, jnp.inf, box.spread), exact.spread)
            for box, exact, m in zip(off, rounded, moves)
        ]

    return jax.vmap(at_one_time)(*map(list, (old, new, xs, before, after)))


def radii_of_inputs(
    loop: Loop,
    wanted: Sequence[Var],
    consts: Values,
    init: Values,
    xs: Values,
    states: Mapping[int, Any],
    errors: Mapping[int, Any],
) -> list[Any | None]:
    """Returns the radii of what a group of carries reads, at all times; None of what depends on no other carry.

    Args:
        loop: the loop.
        wanted: the variables that the group reads.
        consts, init, xs: the loop's constants, its first carries, and its inputs, [T, ...].
        states, errors: by position, the states of the carries of earlier groups after each step, [T, ...], and bounds of
            their errors.
    """
    earlier = sorted(states)
    before, after = ([variables[i] for i in earlier] for variables in (loop.carry, loop.carry_out))
    moving = jaxprs.depends(loop.eqns, [v for v in (*before, *after) if not jaxprs.is_literal(v)])
    moves = [v for v in wanted if v in moving]
    if not moves:
        return [None] * len(wanted)
    eqns, _ = jaxprs.needed(loop.eqns, [*after, *moves], {*loop.consts, *before, *loop.xs})
    inputs = [*loop.consts, *before, *loop.xs]

    def step(*args: Any) -> list[Any]:
        env = jaxprs.evaluate(eqns, dict(zip(inputs, args)))
        return [jaxprs.value(env, v) for v in (*after, *moves)]

    program = jaxprs.trace(step, [v.aval for v in inputs], jaxprs.LOWERED_CALLS)
    names = program.constvars + program.invars
    count = len(program.constvars) + len(consts)
    program = replace(
        program, constvars=names[:count], consts=(*program.consts, *consts), invars=names[count:]
    )
    new, wrong = ([values[i] for i in earlier] for values in (states, errors))
    old = [jaxprs.shifted(states[i], init[i], False) for i in earlier]
    wrong_before = [jaxprs.shifted(e, jnp.zeros(e.shape[1:], e.dtype), False) for e in wrong]
    try:
        radii = [
            off + rounding
            for off, rounding in of_outputs(program, old, new, xs, wrong_before, wrong)
        ]
    except NotEnclosed:
        radii = [jnp.full((len(new[0]), *v.aval.shape), jnp.inf) for v in moves]
    exact = jnp.all(jnp.stack([jnp.all(e == 0) for e in wrong]))
    by_variable = {v: jnp.where(exact, 0, radius) for v, radius in zip(moves, radii)}
    return [by_variable.get(v) for v in wanted]


def bounds(slopes: Any, jumps: Any, added: Any) -> Any:
    """Returns e at all times, [T, A, M]; infinite or not a number where there is none.

    Args:
        slopes: A, [T, A, M, M].
        jumps: whether a step may jump, [T].
        added: |r| + 2 u, and what inputs with radii change, [T, A, M].
    """
    added = jnp.where(jumps.reshape(-1, *[1] * (added.ndim - 1)), jnp.inf, added)
    return _ROUNDED * rounds.associative_solve(slopes, added)


def bounds_in_radii(spread: Any, jumps: Any, added: Any, radius: Any) -> Any:
    """Returns e at all times as `bounds` does, from A times the radius of the old carries.

    Measured in radii, A takes the largest error of a block to at most `spread / radius` times that error.
    """
    grows, gets = (jnp.max(v / radius, -1, keepdims=True) for v in (spread, added))
    return bounds(grows[..., None], jumps, gets) * radius
