"""The pass: small products, factorizations, sorts and scatters of a step as arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn
from jrnn.loops.loop import Loop, mark
from jrnn.loops.passes.arithmetic import factors, orders, products

RULES: dict[str, Callable[..., Sequence[Any] | None]] = {**products.RULES, **factors.RULES, **orders.RULES}
_INNER = {"cond": ("branches",), "scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}
_SOLVE = "custom_linear_solve"
Fits = Callable[[Eqn], bool]


def as_arithmetic(loop: Loop, fits: Fits) -> Loop:
    """Returns the loop with what `fits` written as arithmetic, in its branches and inner loops too.

    Invariant: every value is the same but for rounding, and NaN where it was NaN.
    """
    if not any(_applies(eqn, fits) for eqn in equations(loop.eqns)):
        return loop
    return loop.rewritten(lambda env: _evaluate(loop.eqns, env, fits))


def equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Yields equations and those inside of them; of a linear solve those of its solver."""
    for eqn in eqns:
        yield eqn
        inner = [eqn.params["jaxprs"].solve.jaxpr] if eqn.primitive.name == _SOLVE else jaxprs.sub_jaxprs(eqn)
        for jaxpr in inner:
            yield from equations(jaxpr.eqns)


def _applies(eqn: Eqn, fits: Fits) -> bool:
    return eqn.primitive.name == _SOLVE or (eqn.primitive.name in RULES and fits(eqn))


def _evaluate(eqns: Iterable[Eqn], env: Env, fits: Fits) -> Env:
    for eqn in eqns:
        values = _results(eqn, [jaxprs.value(env, a) for a in eqn.invars], fits)
        if values is None:
            jaxprs.evaluate([eqn], env)
        else:
            env.update(zip(eqn.outvars, values, strict=True))
    return env


def _results(eqn: Eqn, given: list[Any], fits: Fits) -> Sequence[Any] | None:
    """Returns the results of an equation that is rewritten, or None if nothing in it is."""
    name = eqn.primitive.name
    with jaxprs.in_scope(eqn), mark.unmarked():
        if name in RULES and fits(eqn):
            return RULES[name](eqn, *given)
        if name == _SOLVE:  # the functions besides its solver are for its gradient
            counts = eqn.params["const_lengths"]
            first = counts.matvec + counts.vecmat
            held = given[first : first + counts.solve]
            return _run(eqn.params["jaxprs"].solve, held + given[sum(counts) :], fits)
        held = {key: eqn.params[key] for key in _INNER.get(name, ())}
        if not held or not any(_applies(e, fits) for e in equations([eqn]) if e is not eqn):
            return None
        changed = {
            key: tuple(rewritten(c, fits) for c in value) if isinstance(value, tuple) else rewritten(value, fits)
            for key, value in held.items()
        }
        return jaxprs.bind(eqn, *given, **changed)


def rewritten(closed: Any, fits: Fits) -> Any:
    """Returns a closed jaxpr with what `fits` written as arithmetic."""
    return jax.make_jaxpr(lambda *args: _run(closed, args, fits))(*closed.in_avals)


def _run(closed: Any, args: Sequence[Any], fits: Fits) -> list[Any]:
    program = jaxprs.opened(closed, jaxprs.LOWERED_CALLS)
    env = dict(zip(program.constvars, program.consts)) | dict(zip(program.invars, args))
    _evaluate(program.eqns, env, fits)
    return [jaxprs.value(env, a) for a in program.outvars]
