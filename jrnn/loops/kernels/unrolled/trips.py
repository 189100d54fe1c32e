"""Loops over trips of some steps each, which read and write stacks in place.

Shapes: T time, S the steps of a trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import mesh_axes
from jrnn.loops.ir import Loop

Values = Sequence[Any]
# From the carry and the rows of some steps [S, ...] to the next carry and the rows of the outputs.
Trip = Callable[[Values, Values], tuple[Values, Values]]


def empty_stacks(loop: Loop, length: int, values: Any) -> list[Any]:
    """Returns arrays for the outputs of all steps, [T, ...], which vary over the mesh axes of the loop's values."""
    return mesh_axes.like([jaxprs.zeros_of_shape((length, *a.aval.shape), a.aval) for a in loop.ys], values)


def run_trips(
    trip: Trip,
    carry: Values,
    xs: Values,
    ys: Values,
    steps: tuple[Any, int],
    size: int,
    reverse: bool,
    is_safe: Callable[[Values], Any] | None = None,
) -> tuple[Any, list[Any], list[Any]]:
    """Runs trips of `size` steps each.

    Args:
        trip: runs one trip.
        carry: goes from trip to trip.
        xs, ys: the stacks that are read and written, [T, ...].
        steps: the first step, which may be traced, and the end, counted in the order in which they run.
        size: divides the number of steps.
        reverse: the last row is the first step.
        is_safe: from the carry to a condition without which no other trip runs.

    Returns:
        The number of steps that ran with those before the first one, the last carry, and the stacks.
    """
    start, end = steps
    length = len(ys[0]) if ys else len(xs[0]) if xs else end

    def goes_on(state: Any) -> Any:
        at, carry, _ = state
        return at < end if is_safe is None else (at < end) & is_safe(carry)

    def run(state: Any) -> Any:
        at, carry, ys = state
        row = (length - size - at if reverse else at).astype(jnp.uint32)  # an index that JAX need not compare with 0
        carry, rows = trip(carry, [_rows(x, row, size) for x in xs])
        return at + size, list(carry), [_written(y, r, row) for y, r in zip(ys, rows)]

    return lax.while_loop(goes_on, run, (jnp.asarray(start, jnp.int32), list(carry), list(ys)))


def _rows(stack: Any, row: Any, size: int) -> Any:
    return lax.dynamic_slice(stack, _indices(stack, row), (size, *stack.shape[1:]))


def _written(stack: Any, rows: Any, row: Any) -> Any:
    return lax.dynamic_update_slice(stack, rows, _indices(stack, row))


def _indices(stack: Any, row: Any) -> tuple[Any, ...]:
    return (row, *[jnp.zeros((), row.dtype)] * (stack.ndim - 1))
