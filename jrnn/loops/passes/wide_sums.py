"""Carries that only add in a narrow dtype, such as bfloat16: wide inside of the loop, rounded once after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values
from jrnn.loops.passes.sums import accumulator_dtype, added_to_carries


@dataclass(frozen=True)
class WideSums:
    """The dtypes of wide carries, and the original ones."""

    wide: tuple[Any, ...]
    narrow: tuple[Any, ...]

    def adapt(
        self,
        run: RunLoop,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        wide_init = list(map(jnp.asarray, init, self.wide))
        last, ys = run(consts, wide_init, xs, length)
        return [x.astype(dtype) for x, dtype in zip(last, self.narrow)], list(ys)


def widen_sums(loop: Loop) -> tuple[Loop, WideSums | None]:
    """Keeps narrow floating-point carries that only add in float32 inside the loop.

    Added one by one, bfloat16 numbers of about the same size stop adding up after 256 of them.

    Invariant: every other value is unchanged; the sums are rounded once instead of at every step.

    Returns:
        The loop, and the dtypes of its carries; None if no carry is widened.
    """
    widened: dict[int, tuple[Atom, ...]] = {}
    wide = [v.aval for v in loop.carry]
    for i, values in added_to_carries(loop).items():
        dtype = accumulator_dtype(wide[i].dtype)
        if dtype != wide[i].dtype:
            widened[i] = values
            wide[i] = wide[i].update(dtype=dtype, weak_type=False)
    if not widened:
        return loop, None

    def step(*args: Array) -> list[Array]:
        env = dict(zip(loop.inputs, args))
        known = dict(env)
        for i in widened:
            carry = loop.carry[i]
            known[carry] = env[carry].astype(carry.aval.dtype)
        jaxprs.evaluate(loop.eqns, known)
        outs = [jaxprs.read(known, a) for a in loop.outputs]
        for i, values in widened.items():
            outs[i] = env[loop.carry[i]]
            for v in values:
                outs[i] = outs[i] + jaxprs.value(known, v).astype(outs[i].dtype)
        return outs

    avals = [v.aval for v in loop.consts] + wide + [v.aval for v in loop.xs]
    dtypes = WideSums(
        wide=tuple(aval.dtype for aval in wide),
        narrow=tuple(v.aval.dtype for v in loop.carry),
    )
    return loop.traced(step, avals, len(loop.carry)), dtypes
