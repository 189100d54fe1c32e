"""The stage that hoists keys of random numbers out of the carry, which a step splits.

They depend on nothing else that the loop carries. A loop of their own computes them first. What draws from them depends on
inputs alone then, and may leave the loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values
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
        self, run: RunLoop, consts: Values, init: Values, xs: Values, length: Length
    ) -> Results:
        values = dict(zip(self.loop.inputs, (*consts, *init, *xs)))
        last_keys, stacked = self.key_loop.run(
            [values[v] for v in self.key_loop.consts],
            [values[v] for v in self.key_loop.carry],
            [values[v] for v in self.key_loop.xs],
            length,
        )
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
    new_carries = dict(zip(loop.carry, loop.carry_out))
    carry = [v for v in loop.carry if v in carried]
    rest = [v for v in loop.carry if v not in carried]
    out = [new_carries[v] for v in carry]
    rest_out = [new_carries[v] for v in rest]
    outs = [*rest_out, *loop.ys]

    # The loop of the keys.
    inputs = {v for v in loop.inputs if v not in carried}
    eqns, _ = jaxprs.needed(loop.eqns, out, {*inputs, *carried})
    results = {*carry, *jaxprs.results(eqns)}
    if any(eqn.effects for eqn in eqns):
        return loop, None
    others, read = jaxprs.needed(loop.eqns, outs, inputs | results, effects=True)
    read_by_rest = dict.fromkeys((*read, *jaxprs.variables(outs)))
    stacked = tuple(v for v in read_by_rest if v in results)
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
    key_loop = as_arithmetic(key_loop, _has_rule)

    # The other loop, which reads them.
    used = {*jaxprs.free_variables(others), *jaxprs.variables(outs)}
    xs = tuple(v for v in loop.xs if v in used)
    smaller = replace(
        loop, carry=tuple(rest), xs=(*xs, *stacked), carry_out=tuple(rest_out)
    ).with_eqns(others, outs)
    return smaller, HoistedKeys(loop, key_loop, xs)


def _has_rule(eqn: Eqn) -> bool:
    """Whether an equation of keys is written as arithmetic."""
    return eqn.primitive.name in RULES


def _carried_keys(loop: Loop) -> Collection[Var]:
    """Returns the carries that are keys which depend on no other carry."""
    drawn_from: set[Var] = set()
    for eqn in loop.eqns:
        if primitives.is_kind(eqn, "draw", "key"):
            drawn_from.update(jaxprs.inputs(eqn))
    keys = {v for v in loop.carry if _is_key(v) or v in drawn_from}
    while keys:
        others = [v for v in loop.carry if v not in keys]
        dependent = jaxprs.depends(loop.eqns, others)
        independent = set()
        for v, out in zip(loop.carry, loop.carry_out):
            if v in keys and not jaxprs.is_in(out, dependent):
                independent.add(v)
        if independent == keys:
            break
        keys = independent
    return keys


def _is_key(v: Var) -> bool:
    return jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
