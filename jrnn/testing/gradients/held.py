"""Functions for central differences in which the values that `stop_gradient` stops are held, and surrogates are followed.

JAX differentiates such a function as if `stop_gradient(v)` were a constant. Plain differences move that constant too. So a
program is evaluated at two points side by side: at the base, and at the point that is moved. A value that is stopped is the
base's at both. Of a function with a surrogate gradient, the moved value is the base's plus the slope of its rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrnn.jaxprs import (
    Eqn,
    all_equations,
    bind,
    interpreted,
    jaxpr_of,
    scan_parts,
    sub_jaxprs,
    trace,
)
from jrnn.jaxprs.flat import body_of, source_of
from jrnn.jaxprs.jax_internals import function_name
from jrnn.nets.ir import Values
from jrnn.testing.gradients.report import Blobs

STOP = "stop_gradient"
RULES = ("custom_jvp_call", "custom_vjp_call")


class HeldValues(NamedTuple):
    """What is held: the values that `stop_gradient` stops, except on the line `moves`; and surrogates."""

    surrogates: Collection[str] = ()
    moves: str | None = None

    def stops(self, eqn: Eqn) -> bool:
        """Whether an equation itself stops a gradient."""
        return eqn.primitive.name == STOP and (self.moves is None or source_of(eqn) != self.moves)


def holding(
    function: Callable,
    base: Blobs,
    surrogates: Collection[str] = (),
    moves: str | None = None,
) -> Callable | None:
    """The function of a point with what it stops held at `base`; None if it stops nothing and has none of `surrogates`.

    What is stopped at the line `moves`, one of `stopping_lines`, is not held.

    >>> import jax.numpy as jnp
    >>> rounded = lambda p: {"y": p["x"] + jax.lax.stop_gradient(jnp.round(p["x"]) - p["x"])}
    >>> held = holding(rounded, {"x": jnp.float32(0.25)})
    >>> float(held({"x": jnp.float32(0.5)})["y"])
    0.25
    """
    names = list(base)
    values = list(base.values())
    outputs: list[str] = []

    def flat(*moved: Any) -> list[Any]:
        results = function(dict(zip(names, moved)))
        outputs[:] = results
        return list(results.values())

    program = trace(flat, values)
    what = HeldValues(surrogates, moves)
    if not any(_stops(eqn, what) for eqn in program.eqns):
        return None
    known = list(outputs)

    def held(point: Blobs) -> Values:
        pairs = zip(values, [point[n] for n in names], strict=True)
        results = {}
        for name, (_, moved) in zip(known, _called(program, pairs, what), strict=True):
            results[name] = moved
        return results

    return held


def stopping_lines(function: Callable, base: Blobs) -> list[str]:
    """The user's lines at which a function stops gradients."""
    jaxpr = jax.make_jaxpr(function)(base)
    lines = dict.fromkeys(
        source_of(eqn) for eqn in all_equations(jaxpr.jaxpr) if eqn.primitive.name == STOP
    )
    return list(filter(None, lines))


def rule_name(eqn: Eqn) -> str:
    """The name of the function whose derivative rule an equation calls, or ""."""
    if eqn.primitive.name not in RULES:
        return ""
    call = eqn.params.get("call_jaxpr")
    return (function_name(jaxpr_of(call)) if call is not None else "") or str(
        eqn.params.get("name", "")
    )


def _stops(eqn: Eqn, held: HeldValues) -> bool:
    if held.stops(eqn) or rule_name(eqn) in held.surrogates:
        return True
    for jaxpr in sub_jaxprs(eqn):
        for inner in jaxpr.eqns:
            if _stops(inner, held):
                return True
    return False


Pair = tuple[Any, Any]  # a value at the base, and at the moved point
Pairs = list[Pair]


def _called(program: Any, pairs: Iterable[Pair], held: HeldValues) -> Pairs:
    return interpreted(
        program, pairs, lambda eqn, pairs: _results(eqn, pairs, held), lambda v: (v, v)
    )


def _called_on(program: Any, held: HeldValues, *pairs: Pair) -> Pairs:
    return _called(program, pairs, held)


def _results(eqn: Eqn, pairs: Pairs, held: HeldValues) -> Pairs:
    base = [b for b, _ in pairs]
    moved = [m for _, m in pairs]
    if held.stops(eqn):
        return [(b, b) for b in base]
    if rule_name(eqn) in held.surrogates:
        return _along_rule(eqn, base, moved)
    if not _stops(eqn, held):
        return list(zip(bind(eqn, *base), bind(eqn, *moved)))
    if eqn.primitive.name == "scan":
        return _scan(eqn, pairs, held)
    if eqn.primitive.name == "cond":
        index = pairs[0][1]
        branches = []
        for branch in eqn.params["branches"]:
            branches.append(functools.partial(_called_on, branch, held))
        return jax.lax.switch(index, branches, *pairs[1:])
    body = body_of(eqn)
    if body is None:  # a loop of unknown length: what it stops moves
        return list(zip(bind(eqn, *base), bind(eqn, *moved)))
    return _called(body, pairs, held)


def _scan(eqn: Eqn, pairs: Pairs, held: HeldValues) -> Pairs:
    p = eqn.params
    fixed, carry, xs = scan_parts(p, pairs)
    count = len(carry)

    def step(carry: Pairs, xs: Pairs) -> tuple[Pairs, Pairs]:
        outs = _called(p["jaxpr"], [*fixed, *carry, *xs], held)
        return outs[:count], outs[count:]

    last, ys = jax.lax.scan(step, carry, xs, length=p["length"], reverse=p["reverse"])
    return [*last, *ys]


def _along_rule(eqn: Eqn, base: list[Any], moved: list[Any]) -> Pairs:
    """The value at the base, and that plus the slope that the rule gives towards the moved arguments."""
    smooth = [k for k, b in enumerate(base) if jnp.issubdtype(jnp.result_type(b), jnp.floating)]

    def function(*some: Any) -> Sequence[Any]:
        args = list(base)
        for k, value in zip(smooth, some):
            args[k] = value
        return tuple(bind(eqn, *args))

    points = [base[k] for k in smooth]
    changes = [moved[k] - base[k] for k in smooth]
    if eqn.primitive.name == "custom_jvp_call":
        values, slopes = jax.jvp(function, points, changes)
    else:
        values, pull = jax.vjp(function, *points)
        (slopes,) = jax.linear_transpose(pull, values)(tuple(changes))
    return [(v, v + s) for v, s in zip(values, slopes)]
