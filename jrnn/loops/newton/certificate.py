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

If all residuals are exactly 0, the states equal the loop's, and no bound is needed. docs/notes/newton.md says more.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import Program, Var
from jrnn.jaxprs.flat import body_of
from jrnn.jaxprs.tangents import pushed
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import Values
from jrnn.loops.ir import Loop
from jrnn.loops.newton.enclosure import Box, NotEnclosed, enclosed, radii_of

ROUNDING_FACTOR = 1.01  # bounds are computed with rounding, too

Boxes = Sequence[Box]


@dataclass(frozen=True)
class Enclosures:
    """The step of a group of carries on boxes, at one time.

    Attributes:
        group: the group.
        step: from constants, the inputs of one step and old carries to new carries, with all calls inlined.
        tangents: the same with the tangents of the old carries, to the tangents of the new ones.

    Its methods take `inputs`, the boxes of the constants and of the step's inputs, and the old carries.
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
            stack, radii, old: the types of the inputs of one step, of the radii of their boxes, and of the carries.
        """
        avals = [*map(jax.typeof, consts), *stack, *old]
        first_carry = len(consts) + len(stack)

        def flat(*args):
            return fn(args[: len(consts)], args[len(consts) : first_carry], args[first_carry:])

        step = jaxprs.inlined(jax.make_jaxpr(flat)(*avals), jaxprs.LOWERED_CALLS)
        carry_positions = range(first_carry, len(avals))

        def tangents_of(*args):
            values = args[: len(avals)]
            return pushed(step.run, values, carry_positions, args[len(avals) :])[1]

        tangents = jaxprs.inlined(jax.make_jaxpr(tangents_of)(*avals, *old), body_of)
        enclosures = Enclosures(group, step, tangents)

        # Evaluate everything on types: an equation without a rule raises.
        radius_dtype = jnp.result_type(jnp.float32, *old)
        radius = jax.ShapeDtypeStruct((*group.batch, group.block), radius_dtype)

        def everything(consts, stack, radii, old, radius):
            inputs = [*map(Box, consts), *map(Box, stack, radii)]
            return enclosures.rounding(inputs, old), enclosures.slopes(inputs, old, radius)

        try:
            jax.eval_shape(everything, avals[: len(consts)], stack, radii, old, radius)
        except NotEnclosed:
            return None
        return enclosures

    def _new(self, inputs: Boxes, old: Values, radii: Values) -> tuple[Boxes, Array]:
        """Returns the new carries from old carries with these radii, and whether they may jump."""
        return enclosed(self.step, [*inputs, *map(Box, old, radii)])

    def rounding(self, inputs: Boxes, old: Values) -> Array:
        """Returns u at one time, and what the radii of the inputs add to it, [A, M]."""
        zeros = radii_of(list(map(Box, old)))
        new, _ = self._new(inputs, old, zeros)
        return self.group.join(radii_of(new))

    def slopes(self, inputs: Boxes, old: Values, radius: Array) -> tuple[Array, Array]:
        """Returns A, [A, M, M], and whether the step may jump, for old carries with a radius [A, M], at one time."""
        radii = self.group.part(radius)

        def column(k):
            return self._column(inputs, old, radii, k)

        columns = jax.vmap(column)(jnp.arange(self.group.block))
        _, jumps = self._new(inputs, old, radii)
        return jnp.moveaxis(columns, 0, -1), jumps

    def slopes_times_radius(self, inputs: Boxes, old: Values, radius: Array) -> tuple[Array, Array]:
        """Returns A times the radius, [A, M], and whether the step may jump, without all of A in memory."""
        radii = self.group.part(radius)

        def add_column(total, k):
            column = self._column(inputs, old, radii, k)
            return total + column * lax.dynamic_index_in_dim(radius, k, -1), None

        columns = jnp.arange(self.group.block)
        total, _ = lax.scan(add_column, jnp.zeros_like(radius), columns)
        _, jumps = self._new(inputs, old, radii)
        return total, jumps

    def _column(self, inputs: Boxes, old: Values, radii: Values, k: Array) -> Array:
        """Returns column k of A."""
        basis = [
            Box(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t)
            for t in self.group.basis(k, old)
        ]
        tangents, _ = enclosed(self.tangents, [*inputs, *map(Box, old, radii), *basis])
        return self.group.join([box.size + box.radius for box in tangents])


def of_outputs(
    step: Program, old: Values, new: Values, xs: Values, before: Values, after: Values
) -> list[tuple[Array, Array]]:
    """Returns how far each output of a step may be off, and what rounding may change of it, at all times.

    Args:
        step: from carries and inputs to new carries and outputs, with all calls inlined.
        old, new: the carries before and after each step, [T, ...].
        xs: the inputs, [T, ...].
        before, after: bounds of the errors of these carries.

    Raises:
        NotEnclosed: if an equation of an output has no enclosure.
    """
    n_carry = len(old)
    ys = step.outvars[n_carry:]
    # The outputs from new and old carries, and inputs.
    computed = [i for i, v in enumerate(step.outvars[:n_carry]) if not jaxprs.is_literal(v)]
    inputs = (*jaxprs.take(step.outvars, computed), *step.invars)
    eqns, _ = jaxprs.needed(step.eqns, ys, {*inputs, *step.constvars})
    outputs = replace(step, invars=inputs, eqns=tuple(eqns), outvars=ys)

    def at_one_time(old, new, xs, before, after):
        def boxes(before, after):
            after_step = jaxprs.take(list(map(Box, new, after)), computed)
            return enclosed(outputs, [*after_step, *map(Box, old, before), *map(Box, xs)])

        off, jumps = boxes(before, after)
        rounded, _ = boxes(_zeros(before), _zeros(after))
        bounds = []
        for box, exact in zip(off, rounded):
            radius = jnp.where(jumps & (not box.is_exact), jnp.inf, box.radius)
            bounds.append((radius, exact.radius))
        return bounds

    return jax.vmap(at_one_time)(list(old), list(new), list(xs), list(before), list(after))


def _zeros(arrays: Values) -> list[Array]:
    return list(map(jnp.zeros_like, arrays))


def before_each_step(after: Values, first: Values) -> list[Array]:
    """Returns carries before each step, from the carries after each step, [T, ...], and before the first one."""
    return [jaxprs.shifted(state, h, False) for state, h in zip(after, first)]


def errors_before(after: Values) -> list[Array]:
    """Returns the errors of carries before each step: there is none before the first one."""
    return before_each_step(after, [jnp.zeros_like(error[0]) for error in after])


def are_zero(errors: Values) -> Array:
    """Returns whether all errors are 0: then the states equal the loop's."""
    return jnp.all(jnp.stack([jnp.all(error == 0) for error in errors]))


def input_radii(
    loop: Loop,
    inputs: Sequence[Var],
    consts: Values,
    init: Values,
    xs: Values,
    states: Mapping[int, Array],
    errors: Mapping[int, Array],
) -> list[Array | None]:
    """Returns the radii of a group's inputs at all times; None for an input that depends on no other carry.

    A value v(h[t-1], h[t], x[t]) of a step is off by at most the radius of v over the boxes h[t-1] +- e[t-1] and
    h[t] +- e[t] of the carries of earlier groups, and its rounding comes on top of that.

    Args:
        loop: the loop.
        inputs: the variables that the group reads.
        consts, init, xs: the loop's constants, its first carries, and its inputs, [T, ...].
        states, errors: by position, the states of the carries of earlier groups after each step, [T, ...], and bounds of
            their errors.
    """
    earlier = sorted(states)
    before = jaxprs.take(loop.carry, earlier)
    after = jaxprs.take(loop.carry_out, earlier)
    on_carry = jaxprs.depends(loop.eqns, jaxprs.variables([*before, *after]))
    inexact = [v for v in inputs if v in on_carry]
    if not inexact:
        return [None] * len(inputs)

    # The step that makes these values: from constants, carries of earlier groups and inputs.
    names = [*loop.consts, *before, *loop.xs]
    results = [*after, *inexact]
    eqns, _ = jaxprs.needed(loop.eqns, results, set(names))

    def step(*args):
        env = jaxprs.evaluate(eqns, dict(zip(names, args)))
        return [jaxprs.value(env, v) for v in results]

    program = jaxprs.trace(step, [v.aval for v in names], jaxprs.LOWERED_CALLS)
    names = program.constvars + program.invars
    n_consts = len(program.constvars) + len(consts)
    program = replace(
        program,
        constvars=names[:n_consts],
        consts=(*program.consts, *consts),
        invars=names[n_consts:],
    )

    new = jaxprs.take(states, earlier)
    old = before_each_step(new, jaxprs.take(init, earlier))
    new_errors = jaxprs.take(errors, earlier)
    old_errors = errors_before(new_errors)
    try:
        outputs = of_outputs(program, old, new, xs, old_errors, new_errors)
    except NotEnclosed:
        radii = [jnp.full((len(new[0]), *v.aval.shape), jnp.inf) for v in inexact]
    else:
        radii = [off + rounding for off, rounding in outputs]
    exact = are_zero(new_errors)
    by_variable = {v: jnp.where(exact, 0, radius) for v, radius in zip(inexact, radii)}
    return list(map(by_variable.get, inputs))


def bounds(slopes: Array, jumps: Array, added: Array) -> Array:
    """Returns e at all times, [T, A, M]; infinite or not a number where there is none.

    Args:
        slopes: A, [T, A, M, M].
        jumps: whether a step may jump, [T].
        added: |r| + 2 u, and what inputs with radii change, [T, A, M].
    """
    added = jnp.where(jumps.reshape(-1, *[1] * (added.ndim - 1)), jnp.inf, added)
    return ROUNDING_FACTOR * rounds.associative_solve(slopes, added)


def bounds_in_radii(slopes_times_radius: Array, jumps: Array, added: Array, radius: Array) -> Array:
    """Returns e at all times as `bounds` does, from A times the radius of the old carries.

    Measured in radii, A takes the largest error of a block to at most `slopes_times_radius / radius` times that error.
    """

    def largest_in_radii(values):
        return jnp.max(values / radius, -1, keepdims=True)

    growth = largest_in_radii(slopes_times_radius)[..., None]
    return bounds(growth, jumps, largest_in_radii(added)) * radius
