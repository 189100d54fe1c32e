"""Tiny loops on CPUs, whose step takes a few nanoseconds: several steps in one iteration.

An iteration of a loop that is one kernel costs a few nanoseconds besides its step: it counts, and the carry goes through
memory. `unroll` of `jax.lax.scan` does not avoid that, because XLA then computes the whole chain of steps again for each
output. An `optimization_barrier` on the carry after each step prevents this.

Shapes: T time, S the steps of an iteration.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import mesh_axes
from jrnn.jaxprs.jax_internals import calling
from jrnn.loops.ir import Loop, Results, Values


class _State(NamedTuple):
    """The state of a loop over iterations: the number of steps that ran, the carry, and the stacks so far."""

    at: Array
    carry: list[Array]
    ys: list[Array]


def run_unrolled(
    loop: Loop,
    size: int,
    consts: Values,
    init: Values,
    xs: Values,
    length: int,
) -> Results:
    """Runs a loop `size` steps an iteration, and the steps that remain one by one.

    Invariant: each step computes what it does in `Loop.run`, from the same values.
    """
    # The stacks vary over the mesh axes of the loop's values.
    empty = [jaxprs.zeros_of_shape((length, *a.aval.shape), a.aval) for a in loop.ys]
    ys = mesh_axes.like(empty, (consts, init, xs))
    carry = list(init)
    start = 0
    whole = length - length % size
    for end, steps in ((whole, size), (length, 1)):
        if start < end:
            state = _State(jnp.int32(start), list(carry), list(ys))
            _, carry, ys = _run_iterations(
                loop,
                steps,
                end,
                consts,
                xs,
                state,
                length,
            )
        start = end
    return carry, ys


def _run_iterations(
    loop: Loop,
    size: int,
    end: int,
    consts: Values,
    xs: Values,
    state: _State,
    length: int,
) -> _State:
    """Runs iterations of `size` steps each up to a step, counted in the order in which they run."""

    def run(state: _State) -> _State:
        at, carry, ys = state
        first = length - size - at if loop.reverse else at
        row = first.astype(jnp.uint32)  # an index that JAX need not compare with 0
        rows = [lax.dynamic_slice(x, _indices(x, row), (size, *x.shape[1:])) for x in xs]
        carry, new_rows = _iteration(
            loop,
            size,
            consts,
            carry,
            rows,
        )
        following = at + size
        written = []
        for y, of_y in zip(ys, new_rows):
            written.append(lax.dynamic_update_slice(y, of_y, _indices(y, row)))
        return _State(following, list(carry), written)

    def is_before_end(state: _State) -> Array:
        return state.at < end

    last: _State = lax.while_loop(is_before_end, run, state)
    return last


def _iteration(
    loop: Loop,
    size: int,
    consts: Values,
    carry: Values,
    rows: Values,
) -> tuple[Values, list[Array]]:
    """Runs the steps of an iteration, from the rows of inputs to the rows of outputs, [S, ...]."""
    step = calling(loop.closed())
    count = len(loop.carry)
    ys: list[Values] = []
    for i in range(size)[:: -1 if loop.reverse else 1]:
        outs = step(*consts, *carry, *(r[i] for r in rows))
        carry = outs[:count]
        ys.append(outs[count:])
        carry = lax.optimization_barrier(carry) if size > 1 and carry else carry
    in_order = ys[::-1] if loop.reverse else ys
    return carry, [jnp.stack(each) for each in zip(*in_order)]


def _indices(stack: Array, row: Array) -> tuple[Array, ...]:
    """Returns where a row of a stacked array begins."""
    return (row, *[jnp.zeros((), row.dtype)] * (stack.ndim - 1))
