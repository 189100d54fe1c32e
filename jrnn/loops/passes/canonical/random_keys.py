"""The stage that hoists keys of random numbers out of the carry, which a step splits.

They depend on nothing else that the loop carries. A loop of their own computes them first. What draws from them depends on
inputs alone then, and may leave the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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

    def __call__(
        self,
        run: RunLoop,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        values = dict(zip(self.loop.inputs, (*consts, *init, *xs)))
        keys = self.key_loop
        last_keys, stacked = keys.run(
            jaxprs.take(values, keys.consts),
            jaxprs.take(values, keys.carry),
            jaxprs.take(values, keys.xs),
            length,
        )
        rest = [v for v in self.loop.carry if v not in keys.carry]
        xs = [*jaxprs.take(values, self.xs_read), *stacked]
        last, ys = run(consts, jaxprs.take(values, rest), xs, length)
        last_values = dict(zip((*keys.carry, *rest), (*last_keys, *last)))
        return jaxprs.take(last_values, self.loop.carry), ys


def hoist_random_keys(loop: Loop) -> tuple[Loop, HoistedKeys | None]:
    """Returns the loop with keys that it splits as inputs, and the loop that computes them; None if it carries none.

    Invariant: every value is unchanged.
    """
    carried = _carried_keys(loop)
    if not carried:
        return loop, None
    new_carries = dict(zip(loop.carry, loop.carry_out))
    carry = _among(loop.carry, carried)
    rest = _among(loop.carry, {*loop.carry}.difference(carried))
    out = tuple(jaxprs.take(new_carries, carry))
    rest_out = tuple(jaxprs.take(new_carries, rest))
    outs = [*rest_out, *loop.ys]

    # The loop of the keys.
    eqns, _ = jaxprs.needed(loop.eqns, out, set(loop.inputs))
    results = {*carry, *jaxprs.results(eqns)}
    if any(eqn.effects for eqn in eqns):
        return loop, None
    others, read = jaxprs.needed(loop.eqns, outs, results.union(loop.inputs), effects=True)
    stacked = _among(dict.fromkeys((*read, *jaxprs.variables(outs))), results)
    free = {*jaxprs.free_variables(eqns), *jaxprs.variables(out), *stacked}
    key_loop = replace(
        loop,
        eqns=tuple(eqns),
        consts=_among(loop.consts, free),
        carry=carry,
        xs=_among(loop.xs, free),
        carry_out=out,
        ys=stacked,
    )
    key_loop = as_arithmetic(key_loop, _has_rule)

    # The other loop, which reads them.
    used = {*jaxprs.free_variables(others), *jaxprs.variables(outs)}
    xs = _among(loop.xs, used)
    smaller = replace(
        loop,
        carry=rest,
        xs=(*xs, *stacked),
        carry_out=rest_out,
    )
    return smaller.with_eqns(others, outs), HoistedKeys(loop, key_loop, xs)


def _among(variables: Iterable[Var], some: Collection[Var]) -> tuple[Var, ...]:
    """Returns the variables that are among some others."""
    return tuple(v for v in variables if v in some)


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
        dependent = jaxprs.depends(loop.eqns, {*loop.carry} - keys)
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
