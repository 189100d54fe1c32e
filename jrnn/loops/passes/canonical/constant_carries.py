"""The stage that takes carries out of the loop whose value at each step is known: constants, and counters.

A carry that a step returns as it is, such as weights, becomes a constant. A counter becomes an input of the loop.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values

T = TypeVar("T")


@dataclass(frozen=True)
class EliminatedCarries:
    """Which carries of the original loop are constants and counters of the rewritten one.

    Attributes:
        constants: the positions of carries that do not change.
        counters: the positions of counters, and what each step adds.
        reverse: the direction of the loop.
    """

    constants: tuple[int, ...]
    counters: tuple[tuple[int, int], ...]
    reverse: bool

    def __call__(
        self,
        run: RunLoop,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        steps = jnp.arange(length)
        steps = length - 1 - steps if self.reverse else steps
        counts = [_counter_values(init[i], by, steps) for i, by in self.counters]
        new_consts, carry, _ = self.map_inputs(consts, init, xs)
        last, ys = run(new_consts, carry, [*xs, *counts], length)
        last_values = list(init)
        for i, by in self.counters:
            last_values[i] = _counter_values(init[i], by, jnp.asarray(length))
        return jaxprs.replaced(last_values, self._remaining(len(init)), last), list(ys)

    def map_inputs(
        self,
        consts: Sequence[T],
        carry: Sequence[T],
        xs: Sequence[T],
    ) -> list[Sequence[T]]:
        """Maps one value for each input of the original loop, such as its name, to one for each of the rewritten loop."""
        counters = [carry[i] for i, _ in self.counters]
        return [
            [*consts, *jaxprs.take(carry, self.constants)],
            jaxprs.take(carry, self._remaining(len(carry))),
            [*xs, *counters],
        ]

    def _remaining(self, count: int) -> list[int]:
        """Returns the positions of the carries that remain."""
        return sorted({*range(count)}.difference(self.constants, dict(self.counters)))


def _counter_values(first: Array, by: int, steps: Array) -> Array:
    """Returns a counter after some steps, [...], or after each of many, [T, ...]. It wraps around as sums do."""
    first = jnp.asarray(first)
    added = steps.astype(first.dtype) * jnp.asarray(by, first.dtype)
    added = added.reshape(*steps.shape, *[1] * first.ndim)
    return added + first if steps.ndim == 0 else added + first[None]


def eliminate_carries(loop: Loop) -> tuple[Loop, EliminatedCarries | None]:
    """Returns the loop without carries of known values, and the record of these carries; None if there are none.

    Invariant: every value is unchanged.
    """
    constants = []
    counters = []
    for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out)):
        if v is out:
            constants.append(i)
        elif jaxprs.is_in(out, loop.producers):
            increment = _increment_of(v, loop.producers[out])
            if increment is not None:
                counters.append((i, increment))
    if not constants and not counters:
        return loop, None
    form = EliminatedCarries(tuple(constants), tuple(counters), loop.reverse)
    consts, carry, xs = map(tuple, form.map_inputs(loop.consts, loop.carry, loop.xs))
    _, carry_out, _ = form.map_inputs((), loop.carry_out, ())
    smaller = replace(
        loop,
        consts=consts,
        carry=carry,
        xs=xs,
    )
    return smaller.with_eqns(loop.eqns, [*carry_out, *loop.ys]), form


def _increment_of(v: Var, eqn: Eqn) -> int | None:
    """Returns the number that an equation adds to a carry of integers, or None."""
    if not primitives.is_addition(eqn) or not jnp.issubdtype(v.aval.dtype, jnp.integer):
        return None
    literals = [a for a in eqn.invars if jaxprs.is_literal(a) and not np.ndim(a.val)]
    if len(literals) != 1 or v not in jaxprs.inputs(eqn):
        return None
    return int(np.asarray(literals[0].val))
