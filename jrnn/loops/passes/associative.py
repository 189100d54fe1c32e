"""Loops that are affine in the carry with a diagonal Jacobian, solved for all times at once.

Steps `h[t] = a[t] * h[t-1] + b[t]` compose associatively, so `jax.lax.associative_scan` solves the loop in log T rounds. The
reverse loop of such a loop has the same form.

If one carry reads another, as in a stack of layers, they are solved one after the other. Carries that read each other, such
as the parts of complex numbers, are solved together: their `a` is a small matrix for each element. So a complex recurrence
may be written with one complex carry or with two real ones.

Shapes: T time, K carries that are solved together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.jaxprs.ranges import largest_size
from jrnn.loops.loop import Loop, Results

_MOST_TOGETHER = 4  # two steps of K carries compose with K^3 products

Rows = list[list[Any]]  # K x K arrays
Form = tuple[dict[Var, Any], Any]  # the factor of each carry, and the term that is added to the products


@dataclass(frozen=True)
class Solved:
    """Solves a loop in rounds instead of running its steps."""

    loop: Loop

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any) -> Results:
        loop = self.loop
        known = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))  # the known values of all steps
        states: dict[int, Any] = {}  # the carries after each step
        for group in _groups(loop):
            first = [init[i] for i in group]

            def coefficients(values: list[Any], group: Any = group, first: Any = first) -> tuple[Rows, list[Any]]:
                return _coefficients(loop, group, {**known, **dict(zip(stacked, values))}, first)

            a, b = jax.vmap(coefficients, axis_size=length)(list(stacked.values()))
            states.update(zip(group, _solve(a, b, first, loop.reverse)))
            for i in group:
                out = loop.carry_out[i]
                if not jaxprs.is_literal(out) and out not in known:
                    stacked.setdefault(out, states[i])
                stacked[loop.carry[i]] = jaxprs.shifted(states[i], init[i], loop.reverse)
        eqns, _ = jaxprs.needed(loop.eqns, loop.ys, {*known, *stacked})
        jaxprs.over_time(eqns, known, stacked)
        ys = [jaxprs.stack(y, known, stacked, length) for y in loop.ys]
        return [states[i][0 if loop.reverse else -1] for i in range(len(loop.carry))], ys


def refusal(loop: Loop) -> str | None:
    """Returns the reason why a loop cannot be solved in rounds, or None."""
    if not loop.carry:
        return "nothing is carried"
    if any(map(primitives.draws_differently_under_vmap, loop.eqns)):
        return "only threefry keys draw the same numbers under vmap"
    if not all(map(primitives.is_movable, loop.eqns)):
        return "it has equations that cannot be evaluated for all steps at once"
    try:
        jax.eval_shape(lambda *args: _factors(loop, *args), *(v.aval for v in loop.inputs))
    except NotAffine as why:
        return str(why)
    return None


def check_group(loop: Loop, group: Sequence[int]) -> None:
    """Raises NotAffine, with the reason, if carries that read each other are not affine with a diagonal Jacobian.

    Args:
        loop: the loop.
        group: the positions of the carries. What the others are does not matter.
    """
    if len(group) > _MOST_TOGETHER:
        raise NotAffine(f"more than {_MOST_TOGETHER} carries read each other")

    def coefficients(*values: Any) -> Any:
        env = dict(zip(loop.inputs, values))
        return _coefficients(loop, group, env, [env[loop.carry[i]] for i in group])

    jax.eval_shape(coefficients, *(v.aval for v in loop.inputs))


def is_bounded(loop: Loop) -> bool:
    """Returns True if every factor of a carry is provably at most 1 in size, so that no product of factors can overflow.

    A select discards an infinite carry, but a factor of zero does not, so loops that select carries are not bounded.
    """
    selects = [eqn.invars[1:] for eqn in loop.eqns if eqn.primitive.name == "select_n"]
    for v in loop.carry:
        found = jaxprs.depends(loop.eqns, [v])
        if any(len({jaxprs.is_in(a, found) for a in cases}) > 1 for cases in selects):
            return False
    factors = jax.make_jaxpr(lambda *args: _factors(loop, *args))(*(v.aval for v in loop.inputs))
    return all(size <= 1 for size in largest_size(factors))


def declined(loop: Loop, executor: str, least_steps: int = 0) -> str | None:
    """Returns the reason why a loop is not solved under the caller's option `executor`, or None."""
    why = refusal(loop)
    if why is not None or executor == "associative":
        return why
    if executor == "scan":
        return "executor='scan' was asked for"
    if jaxprs.extent(loop.length) < least_steps:
        return f"fewer than {least_steps} steps"
    through = sum(map(jaxprs.nbytes, (*loop.carry, *loop.xs, *loop.outputs)))
    if any(jaxprs.nbytes(v) > through for eqn in loop.eqns for v in eqn.outvars):
        return "values of a step are larger than what goes in and out of it"  # the stacks would need much memory
    return None


def _factors(loop: Loop, *values: Any) -> list[Any]:
    """Returns the factors of all carries at one step."""
    env = dict(zip(loop.inputs, values))
    found: list[Any] = []
    for group in _groups(loop):
        rows, _ = _coefficients(loop, group, env, [env[loop.carry[i]] for i in group])
        found += [a for row in rows for a in row]
        env.update((loop.carry_out[i], env[loop.carry[i]]) for i in group if not jaxprs.is_literal(loop.carry_out[i]))
    return found


# Solving --------------------------------------------------------------------------------------------------------------


def _solve(a: Rows, b: list[Any], first: list[Any], reverse: bool) -> list[Any]:
    """Returns all states of `h[t] = a[t] h[t-1] + b[t]` from `h[-1] = first`: K arrays [T, ...]."""
    if reverse:
        a, b = jax.tree.map(lambda leaf: leaf[::-1], (a, b))
    start = _applied([[x[0] for x in row] for row in a], first, [x[0] for x in b])
    b = [jnp.concatenate([s[None], x[1:]]) for s, x in zip(start, b)]  # b[0] is now h[0], and a[0] is not used

    def compose(first: tuple[Rows, list[Any]], second: tuple[Rows, list[Any]]) -> tuple[Rows, list[Any]]:
        (p, q), (r, s) = first, second
        product = [[reduce(add, [x * y for x, y in zip(row, column)]) for column in zip(*p)] for row in r]
        return product, _applied(r, q, s)

    h = jax.lax.associative_scan(compose, (a, b))[1]
    return [x[::-1] for x in h] if reverse else h


def _applied(a: Rows, h: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Returns `a h + b`."""
    return [reduce(add, [x * y for x, y in zip(row, h)], rest) for row, rest in zip(a, b)]


# Finding a and b ------------------------------------------------------------------------------------------------------


class NotAffine(Exception):
    """Raised for a step that is not affine in the carry; the message is the reason."""


def _groups(loop: Loop) -> list[tuple[int, ...]]:
    """Groups the positions of carries that read each other, each group after the groups that it reads."""
    groups, _ = jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out)
    if max(map(len, groups), default=0) > _MOST_TOGETHER:
        raise NotAffine(f"more than {_MOST_TOGETHER} carries read each other")
    return groups


def _coefficients(loop: Loop, group: Sequence[int], env: Env, like: Sequence[Any]) -> tuple[Rows, list[Any]]:
    """Returns `a` and `b` of a group of carries at one step.

    Args:
        loop: the loop.
        group: the positions of the carries.
        env: the known values of that step.
        like: values with the types of the carries.
    """
    mine = [loop.carry[i] for i in group]
    found: dict[Var, Form] = {}
    for v, value in zip(mine, like):
        if not jnp.issubdtype(v.aval.dtype, jnp.inexact):
            raise NotAffine(f"a carry is {v.aval.dtype}")
        found[v] = {v: jnp.ones_like(value)}, jnp.zeros_like(value)

    body, _ = jaxprs.needed(loop.eqns, [loop.carry_out[i] for i in group], {*env, *mine})
    for eqn in body:
        if any(v in found for v in jaxprs.inputs(eqn)):
            found[eqn.outvars[0]] = _rule(eqn, found, env)
        else:
            jaxprs.evaluate([eqn], env)

    a, b = [], []
    for i in group:
        out = loop.carry_out[i]
        factors, rest = found[out] if jaxprs.is_in(out, found) else ({}, jaxprs.value(env, out))
        a.append([factors.get(v, jnp.zeros_like(rest)) for v in mine])
        b.append(rest)
    return a, b


_COPIES = ("copy", "copy_p", "name")
_SUMS = ("add", "add_any", "sub", "neg")


def _rule(eqn: Eqn, found: dict[Var, Form], env: Env) -> Form:
    """Returns the factors and the term of an equation's result, from those of its operands in `found`."""
    name = eqn.primitive.name
    if name not in (*_COPIES, *_SUMS, "mul", "div", "select_n") and not primitives.is_retyping(eqn):
        raise NotAffine(f"{name} of the carry is not affine with a diagonal Jacobian")
    shape = eqn.outvars[0].aval.shape
    if any(v in found and v.aval.shape != shape for v in jaxprs.inputs(eqn)):
        raise NotAffine(f"{name} of the carry changes its shape")

    def form(atom: Atom) -> Form:
        if jaxprs.is_in(atom, found):
            return found[atom]
        return {}, jnp.broadcast_to(jaxprs.value(env, atom), shape)

    def each(fn: Any, *forms: Form) -> Form:
        """Applies `fn` to the factors of each carry, and to the terms."""
        carries = dict.fromkeys(v for factors, _ in forms for v in factors)
        nothing = jnp.zeros_like(forms[0][1])
        return {v: fn(*(f.get(v, nothing) for f, _ in forms)) for v in carries}, fn(*(rest for _, rest in forms))

    forms = [form(a) for a in eqn.invars]
    if name in _COPIES or primitives.is_retyping(eqn):
        return forms[0]
    if name in _SUMS:
        return each(lambda *parts: eqn.primitive.bind(*parts, **eqn.params), *forms)
    if name == "mul" and not all(factors for factors, _ in forms):
        moving, (_, factor) = forms if forms[0][0] else forms[::-1]
        return each(lambda part: part * factor, moving)
    if name == "div" and not forms[1][0]:
        return each(lambda part: part / forms[1][1], forms[0])
    if name == "select_n" and not forms[0][0]:
        return each(lambda *parts: jax.lax.select_n(forms[0][1], *parts), *forms[1:])
    raise NotAffine(f"{name} of the carry is not affine with a diagonal Jacobian")
