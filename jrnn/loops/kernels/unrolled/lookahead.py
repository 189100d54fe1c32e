"""Trips of steps that are affine in the carry with constant coefficients, which do not wait for each other.

The steps of a trip start from a carry of zeros. What the carry s before the trip adds is a power of A times s, at each step.
So the steps of several trips overlap, and from trip to trip there is one product with a power of A.

An infinite or NaN input makes the same numbers infinite or NaN as in the loop, because each step follows the one before it.
A carry that is not finite, or so large that a product with it may overflow, ends the trips. The other steps run one by one.

Shapes: T time, S the steps of a trip, n carries, p values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.loops.ir import Loop, Results
from jrnn.loops.kernels.unrolled.affine import AffineStep
from jrnn.loops.kernels.unrolled.steps import trip_of
from jrnn.loops.kernels.unrolled.trips import Trip, empty_stacks, run_trips

Values = Sequence[Any]
LARGEST = 1e37  # what a carry may add to any number of a step


class Powers(NamedTuple):
    """What the carry before a trip adds, in float32.

    Attributes:
        to_values: to the values at each step, [S, p, n].
        high, low: to the carry after the trip, [n, n]. Their sum has twice the precision: an error of one would grow with T.
        largest: the largest size of a carry that cannot make a number of a step overflow.
    """

    to_values: Any
    high: Any
    low: Any
    largest: Any

    @staticmethod
    def of(step: AffineStep, consts: Values, size: int) -> Powers:
        """Computes the powers in float64, also in a process without types of 64 bits."""
        n, p = len(step.carries), len(step.values)
        with jax.enable_x64(True):
            rows = _derivatives(step, consts)
            a, c = rows[:n], rows[n : n + p]

            def next_power(each: Any, _: Any) -> tuple[Any, Any]:
                return product(a, each), (each, product(c, each))

            # A loop, which XLA compiles as one kernel.
            power, (powers, to_values) = lax.scan(next_power, jnp.eye(n, dtype=a.dtype), None, size)
            high = power.astype(jnp.float32)
            low = power - high.astype(power.dtype)
            largest = LARGEST / (n**2 * jnp.max(jnp.abs(rows), initial=1.0) * jnp.max(jnp.abs(powers)))
            to_values, low, largest = (v.astype(jnp.float32) for v in (to_values, low, largest))
        return Powers(to_values, high, low, largest)


def product(a: Any, b: Any) -> Any:
    """Returns the product of small matrices, not as a call."""
    return jnp.sum(a[:, :, None] * b[None], 1)


def _derivatives(step: AffineStep, consts: Values) -> Any:
    """Returns the derivatives of the new carries, of the values and of all affine results, in float64: [_, n]."""
    wide, env = jnp.float64, float64_constants(step.loop, step.before_affine, consts)
    read = [*step.new, *step.values, *(e.outvars[0] for e in step.affine)]
    others = {v: jnp.zeros((), wide) for v in jaxprs.free_variables(step.affine) if v not in env}  # they are added

    def results(carry: Any) -> Any:
        out = jaxprs.evaluate(step.affine, {**others, **env, **dict(zip(step.carry, carry))}, float64_rule)
        return jnp.stack([jnp.asarray(out[v], wide) if jaxprs.is_in(v, out) else jnp.zeros((), wide) for v in read])

    zeros = jnp.zeros(len(step.carries), wide)
    return jax.vmap(lambda unit: jax.jvp(results, (zeros,), (unit,))[1])(jnp.eye(len(zeros), dtype=wide)).T


def float64_constants(loop: Loop, eqns: Sequence[Eqn], consts: Values) -> dict[Any, Any]:
    """Returns the constants of a loop, and the results of equations that are the same at all steps, in float64."""
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    env = {v: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for v, x in zip(loop.consts, consts)}
    return jaxprs.evaluate([e for e in eqns if not any(v in varying for v in e.outvars)], env, float64_rule)


_IN_FLOAT64 = {"mul": jnp.multiply, "div": jnp.divide, "sub": jnp.subtract, "add": jnp.add, "add_any": jnp.add}


def float64_rule(eqn: Eqn, *operands: Any) -> Values | None:
    """The rule of equations in float64, whose literals and casts are of float32."""
    if primitives.is_retyping(eqn):
        return operands
    rule = _IN_FLOAT64.get(eqn.primitive.name)
    if rule is None or eqn.outvars[0].aval.dtype != jnp.float32:
        return None
    return [rule(*(jnp.asarray(x, jnp.float64) for x in operands))]


def run_ahead(step: AffineStep, size: int, consts: Values, init: Values, xs: Values, length: int) -> Results:
    """Runs a loop `size` steps a trip, whose trips do not wait for each other, and the other steps after them.

    Invariant: the values of a step are those of the loop but for rounding; sums add the same values in the same order.
    """
    loop, powers = step.loop, Powers.of(step, consts, size)

    def is_safe(carry: Values) -> Any:
        return reduce(jnp.logical_and, [jnp.abs(carry[i]) <= powers.largest for i in step.carries])

    trip, ys = ahead_trip(step, powers, size, consts), empty_stacks(loop, length, (consts, init, xs))
    at, carry, ys = run_trips(trip, init, xs, ys, (0, length - length % size), size, loop.reverse, is_safe)
    _, carry, ys = run_trips(trip_of(loop, consts, 1), carry, xs, ys, (at, length), 1, loop.reverse)
    return carry, ys


def ahead_trip(step: AffineStep, powers: Powers, size: int, consts: Values) -> Trip:
    """Returns the function that runs a trip."""
    loop, count, known = step.loop, len(step.carries), dict(zip(step.loop.consts, consts))

    def plus(value: Any, row: Any, carry: Values, reads: frozenset[int]) -> Any:
        return reduce(add, [row[q] * carry[q] for q in sorted(reads)], value)

    def trip(carry: Values, rows: Values) -> tuple[list[Any], list[Any]]:
        old, new = [carry[i] for i in step.carries], list(carry)
        ahead, ys = [jnp.zeros_like(s) for s in old], list[Any]([None] * size)
        for k, row in enumerate(range(size)[:: -1 if loop.reverse else 1]):
            env = {**known, **dict(zip(loop.xs, (r[row] for r in rows)))}
            own = jaxprs.evaluate([*step.before_affine, *step.affine], {**env, **dict(zip(step.carry, ahead))})
            for i, v in enumerate(step.values):
                env[v] = plus(own[v], powers.to_values[k, i], old, step.reads[count + i])
            ahead = lax.optimization_barrier([jaxprs.value(own, a) for a in step.new])
            jaxprs.evaluate(step.after_affine, env)
            ys[row] = [jaxprs.value(env, a) for a in loop.ys]
            for i, values in step.sums.items():
                new[i] = reduce(add, [jaxprs.value(env, v) for v in values], new[i])
        for k, i in enumerate(step.carries):
            new[i] = plus(plus(ahead[k], powers.low[k], old, step.reads[k]), powers.high[k], old, step.reads[k])
        return new, [jnp.stack(each) for each in zip(*ys)]

    return trip
