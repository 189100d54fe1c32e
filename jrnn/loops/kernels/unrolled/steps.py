"""Several steps in one trip of a loop, one after the other.

A trip of a loop that is one kernel costs a few nanoseconds besides its step: it counts, and the carry goes through memory.
`unroll` of `jax.lax.scan` does not avoid that, because XLA then computes the whole chain of steps again for each output. An
`optimization_barrier` on the carry after each step prevents this.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs.jax_internals import calling
from jrnn.loops.ir import Loop, Results
from jrnn.loops.kernels.unrolled.trips import Trip, empty_stacks, run_trips


def run_unrolled(
    loop: Loop, size: int, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: int
) -> Results:
    """Runs a loop `size` steps a trip, and what the trips do not divide step by step after them.

    Invariant: each step computes what it does in `Loop.run`, from the same values.
    """
    whole, carry, ys = length - length % size, list(init), empty_stacks(loop, length, (consts, init, xs))
    _, carry, ys = run_trips(trip_of(loop, consts, size), carry, xs, ys, (0, whole), size, loop.reverse)
    if whole < length:
        _, carry, ys = run_trips(trip_of(loop, consts, 1), carry, xs, ys, (whole, length), 1, loop.reverse)
    return carry, ys


def trip_of(loop: Loop, consts: Sequence[Any], size: int) -> Trip:
    """Returns the function that runs a trip of `size` steps."""
    step, count = calling(loop.closed()), len(loop.carry)

    def trip(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        ys: list[Any] = [None] * size
        for i in range(size)[:: -1 if loop.reverse else 1]:
            outs = step(*consts, *carry, *(r[i] for r in rows))
            carry, ys[i] = outs[:count], outs[count:]
            carry = lax.optimization_barrier(carry) if size > 1 and carry else carry
        return carry, [jnp.stack(each) for each in zip(*ys)]

    return trip
