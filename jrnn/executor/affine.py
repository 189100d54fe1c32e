"""Steps that are affine in the carry with a diagonal Jacobian, solved for all times at once.

`h[t] = a[t] * h[t-1] + b[t]` composes associatively, so `jax.lax.associative_scan` solves it in log T rounds. Its
gradient is the same recurrence run backwards, and is solved in the same way.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs
from jrnn.executor.fission import shifted
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.linear import Linear, tangent_p
from jrnn.executor.loop import Loop


def refusal(loop: Loop) -> str | None:
    """Why a loop is not affine with a diagonal Jacobian, or None when it is."""
    try:
        jax.make_jaxpr(lambda *args: _coefficients(loop, dict(zip((*loop.consts, *loop.xs), args))))(
            *(v.aval for v in (*loop.consts, *loop.xs))
        )
    except _NotAffine as why:
        return str(why)
    return None


def run(loop: Loop, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The loop's `(last carry, stacked ys)`; the loop must not be refused."""

    def at_one_step(values: list[Any]) -> list[tuple[Any, Any]]:
        return _coefficients(loop, dict(zip((*loop.consts, *loop.xs), (*consts, *values))))

    pairs = jax.vmap(at_one_step, axis_size=loop.length)(list(xs))
    states = [_solve(a, b, first, loop.reverse) for (a, b), first in zip(pairs, init)]
    before = [shifted(h, first, loop.reverse) for h, first in zip(states, init)]
    _, ys = jax.vmap(lambda carry, x: loop.step(consts, carry, x), axis_size=loop.length)(before, list(xs))
    last = [h[0] if loop.reverse else h[-1] for h in states]
    return last, ys


def _solve(a: Any, b: Any, first: Any, reverse: bool) -> Any:
    """All states of `h[t] = a[t] * h[t-1] + b[t]` from `h[-1] = first`; [T, ...]."""
    if reverse:
        return _solve(a[::-1], b[::-1], first, False)[::-1]
    return _states(a, jnp.concatenate([(a[0] * first + b[0])[None], b[1:]]))


@jax.custom_jvp
def _states(a: Any, b: Any) -> Any:
    """`h[0] = b[0]`, `h[t] = a[t] * h[t-1] + b[t]`; `a[0]` is not read."""
    return jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))[1]


@_states.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (a, b), (da, db) = primals, tangents
    h = _states(a, b)
    moved = db.at[1:].add(da[1:] * h[:-1])
    (dh,) = tangent_p.bind(a, moved, linear=_SOLVED, n_known=1)
    return h, dh


def _transposed(known: list[Any], cts: list[Any]) -> list[Any]:
    (a,), (ct,) = known, cts
    carried = jnp.roll(a[::-1], 1, axis=0)  # backwards, a[t + 1] takes a cotangent from t + 1 to t
    return [_states(carried, ct[::-1])[::-1]]


_SOLVED = Linear(lambda known, moved: [_states(known[0], moved[0])], _transposed)


# Finding a and b ------------------------------------------------------------------------------------------------------


class _NotAffine(Exception):
    """A step that cannot be solved so; the text says why."""


def _coefficients(loop: Loop, env: Env) -> list[tuple[Any, Any]]:
    """`(a, b)` of each carry at one step."""
    found: dict[Var, tuple[Var, Any, Any]] = {}  # variable: the carry, a, b
    for v in loop.carry:
        if not jnp.issubdtype(v.aval.dtype, jnp.inexact):
            raise _NotAffine(f"a carry is {v.aval.dtype}")
        found[v] = v, jnp.ones(v.aval.shape, v.aval.dtype), jnp.zeros(v.aval.shape, v.aval.dtype)

    body, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    for eqn in body:
        if any(a in found for a in jaxprs.inputs(eqn)):
            found[eqn.outvars[0]] = _rule(eqn, found, env)
        else:
            jaxprs.evaluate([eqn], env)

    pairs = []
    for v, out in zip(loop.carry, loop.carry_out):
        if jaxprs.is_literal(out) or out not in found:
            pairs.append((jnp.zeros(v.aval.shape, v.aval.dtype), jaxprs.value(env, out)))
        elif found[out][0] is not v:
            raise _NotAffine("a carry depends on another carry")
        else:
            pairs.append(found[out][1:])
    return pairs


def _rule(eqn: Any, found: dict[Var, tuple[Var, Any, Any]], env: Env) -> tuple[Var, Any, Any]:
    name = eqn.primitive.name
    shape = eqn.outvars[0].aval.shape
    if any(a.aval.shape not in ((), shape) for a in eqn.invars):
        raise _NotAffine(f"{name} of the carry changes its shape")

    def part(atom: Atom) -> tuple[Any, Any, Any]:
        if not jaxprs.is_literal(atom) and atom in found:
            return found[atom]
        value = jnp.broadcast_to(jaxprs.value(env, atom), shape)
        return None, jnp.zeros_like(value), value

    parts = [part(a) for a in eqn.invars]
    roots = {p[0] for p in parts if p[0] is not None}
    if len(roots) > 1:
        raise _NotAffine(f"{name} mixes two carries")
    (root,) = roots
    if name in ("add", "add_any", "sub", "neg", "copy", "copy_p"):
        return root, *(eqn.primitive.bind(*(p[i] for p in parts), **eqn.params) for i in (1, 2))
    if name in ("mul", "div") and sum(p[0] is not None for p in parts) == 1:
        if name == "mul":
            (_, a, b), (_, _, k) = sorted(parts, key=lambda p: p[0] is None)
            return root, a * k, b * k
        if parts[1][0] is None:
            return root, parts[0][1] / parts[1][2], parts[0][2] / parts[1][2]
    if name == "select_n" and parts[0][0] is None:
        return root, *(jax.lax.select_n(parts[0][2], *(p[i] for p in parts[1:])) for i in (1, 2))
    raise _NotAffine(f"{name} of the carry is not affine with a diagonal Jacobian")
