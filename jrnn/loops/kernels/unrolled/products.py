"""Trips of affine steps as products, where XLA runs a loop kernel by kernel and a step waits for many of them.

All values of a trip, and the carry after it, are one product of a matrix with the inputs of its steps and the carry before
it. The rest of a step is computed for all steps of the trip together.

A product would spread an infinite or NaN input over the trip, and its sums may overflow where those of the loop do not. So
a trip whose inputs or results are not finite, or too large for that, ends the trips. It and the other steps run one by one.

Shapes: T time, S the steps of a trip, n carries, m inputs, p values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.loops.ir import Results
from jrnn.loops.kernels.unrolled.affine import AffineStep, StepParts, step_parts
from jrnn.loops.kernels.unrolled.lookahead import LARGEST, float64_constants, float64_rule, product
from jrnn.loops.kernels.unrolled.steps import trip_of
from jrnn.loops.kernels.unrolled.trips import empty_stacks, run_trips

Values = Sequence[Any]


class Response(NamedTuple):
    """What the inputs of a trip and the carry before it add to its values [p S] and the carry after it, in float32.

    Attributes:
        of_inputs: [m S, p S + 2 n]. The last n are a rest, which makes the carry precise: an error of one would grow with T.
        of_carry: to the values, [n, p S].
        high, low: to the carry, [n, n]. Their sum is as precise.
        offset: what there is if inputs and carry are zeros, [p S + 2 n].
        largest: the largest size of an input and a carry that cannot make a number of a trip overflow.
    """

    of_inputs: Any
    of_carry: Any
    high: Any
    low: Any
    offset: Any
    largest: Any

    @staticmethod
    def of(step: AffineStep, parts: StepParts, consts: Values, size: int) -> Response:
        """Computes it in float64, also in a process without types of 64 bits."""
        n, m, p = len(step.carries), len(parts.inputs), len(step.values)
        with jax.enable_x64(True):
            constant, rows = _coefficients(step, parts, consts)
            growth = jnp.maximum(jnp.max(jnp.abs(constant) + jnp.sum(jnp.abs(rows), 1)), 1) ** -size
            (a, b), (c, d) = ((r[:, :n], r[:, n:]) for r in (rows[:n], rows[n : n + p]))

            def next_power(state: Any, _: Any) -> Any:
                powers, moved = state  # [A^k, A^k B], and the carry after k steps from zeros
                to_values = product(c, jnp.concatenate([powers, moved[:, None]], 1))
                return (product(a, powers), product(a, moved[:, None])[:, 0] + constant[:n]), (powers, to_values)

            first = jnp.concatenate([jnp.eye(n, dtype=b.dtype), b], 1), jnp.zeros_like(constant[:n])
            (power, moved), (powers, to_values) = lax.scan(next_power, first, None, size)
            order = jnp.arange(size)[:: -1 if step.loop.reverse else 1]
            lag = order[None] - order[:, None]
            by_lag = jnp.concatenate([jnp.zeros((size, p, m)), d[None], to_values[:, :, n:-1]])
            of_inputs = by_lag[jnp.maximum(lag + size, 0)].transpose(3, 0, 2, 1).reshape(m * size, p * size)
            to_carry = powers[::-1, :, n:][order].transpose(2, 0, 1).reshape(m * size, n)
            offset = (to_values[order, :, -1] + constant[None, n : n + p]).T.reshape(-1)
            (high, low), carry, constants = map(_high_and_low, (power[:, :n].T, to_carry, moved))
            # Negative if a number of ordinary size may overflow, or if this is NaN.
            largest = jnp.where(growth * LARGEST >= 1, growth * LARGEST, -1)
            results = (
                jnp.concatenate([of_inputs, *carry], 1),
                to_values[order, :, :n].transpose(2, 1, 0).reshape(n, p * size),
                *(high, low, jnp.concatenate([offset, *constants]), largest),
            )
            return Response(*(v.astype(jnp.float32) for v in results))


def _high_and_low(value: Any) -> tuple[Any, Any]:
    """Returns the nearest numbers of float32, and the rest."""
    high = value.astype(jnp.float32)
    return high, value - high.astype(value.dtype)


def _coefficients(step: AffineStep, parts: StepParts, consts: Values) -> tuple[Any, Any]:
    """Returns the new carries, the values and all affine results for zeros, and the derivatives [_, n + m], in float64."""
    env, moving = (
        float64_constants(step.loop, parts.affine, consts),
        jaxprs.depends(step.loop.eqns, step.loop.xs + step.loop.carry),
    )
    eqns = [e for e in parts.affine if e.outvars[0] in moving]
    read, arguments = [*step.new, *step.values, *(e.outvars[0] for e in eqns)], [*step.carry, *parts.inputs]

    def results(values: Any) -> Any:
        env_of_results = jaxprs.evaluate(eqns, {**env, **dict(zip(arguments, values))}, float64_rule)
        return jnp.stack([jnp.asarray(jaxprs.value(env_of_results, v), jnp.float64) for v in read])

    zeros = jnp.zeros(len(arguments), jnp.float64)
    push: Callable[..., Any] = jax.vmap(lambda unit: jax.jvp(results, (zeros,), (unit,)), out_axes=(None, 1))
    constant, rows = push(jnp.eye(len(arguments), dtype=jnp.float64))
    return constant, rows


class State(NamedTuple):
    """What goes from trip to trip: the carry [n], and for each sum what its steps added, [S, ...]."""

    carry: Any
    sums: Values


def run_products(step: AffineStep, size: int, consts: Values, init: Values, xs: Values, length: int) -> Results:
    """Runs a loop `size` steps a trip as products, and the other steps after them.

    Invariant: the values of a step are those of the loop but for rounding.
    """
    loop, parts = step.loop, step_parts(step)
    advance = _trip(step, parts, Response.of(step, parts, consts, size), size, consts)
    sums = [jnp.zeros((size, *jnp.shape(init[i])), jnp.result_type(init[i])).at[0].set(init[i]) for i in step.sums]
    first = State(jnp.stack([init[i] for i in step.carries]), sums)

    def trip(states: Any, rows: Values) -> Any:
        after, is_safe, ys = advance(states[1], rows)
        return (states[1], after, is_safe), ys

    ys, whole = empty_stacks(loop, length, (consts, init, xs)), length - length % size
    states = (first, first, jnp.bool_(True))
    at, (before, after, is_safe), ys = run_trips(
        trip, states, xs, ys, (0, whole), size, loop.reverse, lambda states: states[2]
    )
    last = jax.tree.map(lambda old, new: jnp.where(is_safe, new, old), before, after)
    of_steps = dict(zip(step.carries, last.carry)) | dict(zip(step.sums, (jnp.sum(s, 0) for s in last.sums)))
    start, carry = jnp.where(is_safe, at, at - size), [of_steps[i] for i in range(len(init))]
    _, carry, ys = run_trips(trip_of(loop, consts, 1), carry, xs, ys, (start, length), 1, loop.reverse)
    return carry, ys


def _trip(step: AffineStep, parts: StepParts, response: Response, size: int, consts: Values) -> Callable[..., Any]:
    """Returns the function from a state and rows to the next state, whether it may be used, and the rows of the outputs."""
    loop, n = step.loop, len(step.carries)
    split = [i * size for i in range(1, len(step.values) + 1)]
    targets = jaxprs.variables([*loop.ys, *(v for values in step.sums.values() for v in values)])

    def trip(state: State, rows: Values) -> tuple[State, Any, Values]:
        env, stacked = dict(zip(loop.consts, consts)), dict(zip(loop.xs, rows))
        jaxprs.over_time(parts.before, parts.inputs, env, stacked)
        inputs = jnp.concatenate([stacked[v] for v in parts.inputs])
        from_inputs = lax.optimization_barrier(inputs @ response.of_inputs + response.offset)
        high, low = (state.carry @ a for a in (response.high, response.low))
        carry = from_inputs[-2 * n : -n] + (from_inputs[-n:] + low) + high  # small parts first, or they would be lost
        values = from_inputs[: -2 * n] + state.carry @ response.of_carry
        stacked.update(zip(step.values, jnp.split(values, split[:-1]) if split else ()))
        jaxprs.over_time(step.after_affine, targets, env, stacked)
        sums = [
            reduce(add, [jaxprs.stack(v, env, stacked, size) for v in values], old)
            for values, old in zip(step.sums.values(), state.sums)
        ]
        numbers = [s for s in sums if jnp.issubdtype(s.dtype, jnp.inexact)]
        limits = [*((v, response.largest) for v in (inputs, carry)), *((s, LARGEST) for s in numbers)]
        is_safe = reduce(and_, [jnp.all(jnp.abs(v) <= limit) for v, limit in limits])
        return State(carry, sums), is_safe, [jaxprs.stack(a, env, stacked, size) for a in loop.ys]

    return trip
