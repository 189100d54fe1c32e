"""The stage that hoists keys of random numbers out of the carry, which a step splits.

They depend on nothing else that the loop carries. A loop of their own computes them first. What draws from them depends on
inputs alone then, and may leave the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop
from jrnn.loops.passes.arithmetic.draws import RULES
from jrnn.loops.passes.arithmetic.rewrite import as_arithmetic


@dataclass(frozen=True)
class HoistedKeys:
    """Which keys of the original loop another one computes.

    Attributes:
        loop: the original loop.
        key_loop: computes the keys. Its carries are some of the original ones, and its outputs inputs of the rewritten loop.
        xs_read: the inputs of the original loop that the rewritten one reads.
    """

    loop: Loop
    key_loop: Loop
    xs_read: tuple[Var, ...]

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        values = dict(zip(self.loop.inputs, (*consts, *init, *xs)))
        ours = (
            [values[v] for v in part]
            for part in (self.key_loop.consts, self.key_loop.carry, self.key_loop.xs)
        )
        last_keys, stacked = self.key_loop.run(*ours, length)
        rest = [first for v, first in zip(self.loop.carry, init) if v not in self.key_loop.carry]
        last, ys = run(consts, rest, [*(values[v] for v in self.xs_read), *stacked], length)
        known = dict(zip(self.key_loop.carry, last_keys))
        remaining = iter(last)
        return [known[v] if v in known else next(remaining) for v in self.loop.carry], ys


def hoist_random_keys(loop: Loop) -> tuple[Loop, HoistedKeys | None]:
    """Returns the loop with keys that it splits as inputs, and the loop that computes them; None if it carries none.

    Invariant: every value is unchanged.
    """
    carried = _carried_keys(loop)
    if not carried:
        return loop, None
    positions = [i for i, v in enumerate(loop.carry) if v in carried]
    rest = [i for i in range(len(loop.carry)) if i not in positions]
    carry, out = ([values[i] for i in positions] for values in (loop.carry, loop.carry_out))
    outs = [*(loop.carry_out[i] for i in rest), *loop.ys]
    inputs = {v for v in loop.inputs if v not in carried}
    eqns, _ = jaxprs.needed(loop.eqns, out, {*inputs, *carried})
    results = {*carry, *(v for eqn in eqns for v in eqn.outvars)}
    if any(eqn.effects for eqn in eqns):
        return loop, None
    others, read = jaxprs.needed(loop.eqns, outs, inputs | results, effects=True)
    stacked = tuple(v for v in dict.fromkeys((*read, *jaxprs.variables(outs))) if v in results)
    free = {*jaxprs.free_variables(eqns), *jaxprs.variables(out), *stacked}
    key_loop = replace(
        loop,
        eqns=tuple(eqns),
        consts=tuple(v for v in loop.consts if v in free),
        carry=tuple(carry),
        xs=tuple(v for v in loop.xs if v in free),
        carry_out=tuple(out),
        ys=stacked,
    )
    key_loop = as_arithmetic(key_loop, lambda eqn: eqn.primitive.name in RULES)
    used = {*jaxprs.free_variables(others), *jaxprs.variables(outs)}
    xs = tuple(v for v in loop.xs if v in used)
    smaller = replace(loop, carry=tuple(loop.carry[i] for i in rest), xs=(*xs, *stacked))
    smaller = replace(smaller, carry_out=tuple(loop.carry_out[i] for i in rest)).with_eqns(
        others, outs
    )
    return smaller, HoistedKeys(loop, key_loop, xs)


def _carried_keys(loop: Loop) -> Collection[Var]:
    """Returns the carries that are keys which depend on no other carry."""
    drawn_from = {
        v for e in loop.eqns if primitives.is_kind(e, "draw", "key") for v in jaxprs.inputs(e)
    }
    keys = {v for v in loop.carry if _is_key(v) or v in drawn_from}
    while keys:
        others = [v for v in loop.carry if v not in keys]
        dependent = jaxprs.depends(loop.eqns, others)
        again = {
            v
            for v, out in zip(loop.carry, loop.carry_out)
            if v in keys and not jaxprs.is_in(out, dependent)
        }
        if again == keys:
            break
        keys = again
    return keys


def _is_key(v: Var) -> bool:
    return jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
