"""The stage that takes carries out of the loop whose value at each step is known: constants, and counters.

A carry that a step returns as it is, such as weights, becomes a constant. A counter becomes an input of the loop.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop

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

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        steps = jnp.arange(length)
        steps = length - 1 - steps if self.reverse else steps
        counts = [_counter_values(init[i], by, steps) for i, by in self.counters]
        eliminated = {*self.constants, *(i for i, _ in self.counters)}
        carry = [v for i, v in enumerate(init) if i not in eliminated]
        last, ys = run([*consts, *(init[i] for i in self.constants)], carry, [*xs, *counts], length)
        known = {i: init[i] for i in self.constants}
        known |= {i: _counter_values(init[i], by, jnp.asarray(length)) for i, by in self.counters}
        remaining = iter(last)
        return [known[i] if i in known else next(remaining) for i in range(len(init))], list(ys)

    def map_inputs(
        self, consts: Sequence[T], carry: Sequence[T], xs: Sequence[T]
    ) -> list[Sequence[T]]:
        """Maps one value for each input of the original loop, such as its name, to one for each of the rewritten loop."""
        counters = [i for i, _ in self.counters]
        rest = [
            value for i, value in enumerate(carry) if i not in self.constants and i not in counters
        ]
        return [
            [*consts, *(carry[i] for i in self.constants)],
            rest,
            [*xs, *(carry[i] for i in counters)],
        ]


def _counter_values(first: Any, by: int, steps: Any) -> Any:
    """Returns a counter after some steps, [...], or after each of many, [T, ...]. It wraps around as sums do."""
    first = jnp.asarray(first)
    added = (steps.astype(first.dtype) * jnp.asarray(by, first.dtype)).reshape(
        *steps.shape, *[1] * first.ndim
    )
    return added + first if steps.ndim == 0 else added + first[None]


def eliminate_carries(loop: Loop) -> tuple[Loop, EliminatedCarries | None]:
    """Returns the loop without carries whose values are known, and which they are; None if there is none.

    Invariant: every value is unchanged.
    """
    producers = jaxprs.producers(loop.eqns)
    constants = tuple(i for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out)) if v is out)
    counters = []
    for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out)):
        added = None if jaxprs.is_literal(out) or v is out else _increment_of(v, producers.get(out))
        if added is not None:
            counters.append((i, added))
    if not constants and not counters:
        return loop, None
    form = EliminatedCarries(constants, tuple(counters), loop.reverse)
    eliminated = {*constants, *(i for i, _ in counters)}
    remaining = [i for i in range(len(loop.carry)) if i not in eliminated]
    smaller = replace(
        loop,
        consts=(*loop.consts, *(loop.carry[i] for i in constants)),
        carry=tuple(loop.carry[i] for i in remaining),
        xs=(*loop.xs, *(loop.carry[i] for i, _ in counters)),
        carry_out=tuple(loop.carry_out[i] for i in remaining),
    )
    return smaller.with_eqns(smaller.eqns, smaller.outputs), form


def _increment_of(v: Var, eqn: Eqn | None) -> int | None:
    """Returns the number that an equation adds to a carry of integers, or None."""
    if (
        eqn is None
        or not primitives.is_addition(eqn)
        or not jnp.issubdtype(v.aval.dtype, jnp.integer)
    ):
        return None
    literals = [a for a in eqn.invars if jaxprs.is_literal(a) and not np.ndim(a.val)]
    return (
        int(np.asarray(literals[0].val)) if v in jaxprs.inputs(eqn) and len(literals) == 1 else None
    )
