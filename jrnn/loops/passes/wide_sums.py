"""Carries that only add in a narrow dtype, such as bfloat16: wide inside of the loop, rounded once after it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom
from jrnn.loops.ir import Adapter, Length, Loop, Results, RunLoop, Values
from jrnn.loops.passes.sums import accumulator_dtype, added_to_carries


def widen_sums(loop: Loop) -> tuple[Loop, Adapter | None]:
    """Keeps narrow floating-point carries that only add in float32 inside the loop.

    Added one by one, bfloat16 numbers of about the same size stop adding up after 256 of them.

    Invariant: every other value is unchanged; the sums are rounded once instead of at every step.

    Returns:
        The loop, and its adapter; None if no carry is widened.
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

    def adapter(run: RunLoop, consts: Values, init: Values, xs: Values, length: Length) -> Results:
        wide_init = [jnp.asarray(x, aval.dtype) for x, aval in zip(init, wide)]
        last, ys = run(consts, wide_init, xs, length)
        return [x.astype(v.aval.dtype) for x, v in zip(last, loop.carry)], list(ys)

    avals = [v.aval for v in loop.consts] + wide + [v.aval for v in loop.xs]
    return loop.traced(step, avals, len(loop.carry)), adapter
