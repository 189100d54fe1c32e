"""Tiny loops on CPUs, whose step takes a few nanoseconds: several steps in one iteration.

An iteration of a loop that is one kernel costs a few nanoseconds besides its step: it counts, and the carry goes through
memory. `unroll` of `jax.lax.scan` does not avoid that, because XLA then computes the whole chain of steps again for each
output. An `optimization_barrier` on the carry after each step prevents this.

Shapes: T time, S the steps of an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import mesh_axes
from jrnn.jaxprs.jax_internals import calling
from jrnn.loops.ir import Loop, Results

Values = Sequence[Any]


def run_unrolled(
    loop: Loop, size: int, consts: Values, init: Values, xs: Values, length: int
) -> Results:
    """Runs a loop `size` steps an iteration, and the steps that remain one by one.

    Invariant: each step computes what it does in `Loop.run`, from the same values.
    """
    empty = [jaxprs.zeros_of_shape((length, *a.aval.shape), a.aval) for a in loop.ys]
    # The stacks vary over the mesh axes of the loop's values.
    carry = list(init)
    ys = mesh_axes.like(empty, (consts, init, xs))
    start = 0
    whole = length - length % size
    for end, steps in ((whole, size), (length, 1)):
        if start < end:
            carry, ys = _run_iterations(loop, steps, (start, end), consts, carry, xs, ys, length)
        start = end
    return carry, ys


def _run_iterations(
    loop: Loop,
    size: int,
    span: tuple[int, int],
    consts: Values,
    carry: Values,
    xs: Values,
    ys: Values,
    length: int,
) -> Results:
    """Runs iterations of `size` steps each over a span of steps, counted in the order in which they run."""
    start, end = span

    def run(state: Any) -> Any:
        at, carry, ys = state
        first = length - size - at if loop.reverse else at
        row = first.astype(jnp.uint32)  # an index that JAX need not compare with 0
        carry, rows = _iteration(loop, size, consts, carry, [_rows(x, row, size) for x in xs])
        return at + size, list(carry), [_written(y, r, row) for y, r in zip(ys, rows)]

    def is_before_end(state: Any) -> Any:
        return state[0] < end

    _, carry, ys = lax.while_loop(is_before_end, run, (jnp.int32(start), list(carry), list(ys)))
    return carry, ys


def _iteration(
    loop: Loop, size: int, consts: Values, carry: Values, rows: Values
) -> tuple[Values, list[Any]]:
    """Runs the steps of an iteration, from the rows of inputs to the rows of outputs, [S, ...]."""
    step = calling(loop.closed())
    count = len(loop.carry)
    ys = list[Any]([None] * size)
    for i in range(size)[:: -1 if loop.reverse else 1]:
        outs = step(*consts, *carry, *(r[i] for r in rows))
        carry = outs[:count]
        ys[i] = outs[count:]
        carry = lax.optimization_barrier(carry) if size > 1 and carry else carry
    return carry, [jnp.stack(each) for each in zip(*ys)]


def _rows(stack: Any, row: Any, size: int) -> Any:
    return lax.dynamic_slice(stack, _indices(stack, row), (size, *stack.shape[1:]))


def _written(stack: Any, rows: Any, row: Any) -> Any:
    return lax.dynamic_update_slice(stack, rows, _indices(stack, row))


def _indices(stack: Any, row: Any) -> tuple[Any, ...]:
    return (row, *[jnp.zeros((), row.dtype)] * (stack.ndim - 1))
