"""Equal equations, evaluated once."""

from __future__ import annotations

from typing import Any

import numpy as np

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop


def distinct(loop: Loop) -> Loop:
    """Evaluates each distinct equation once: equal primitive, parameters and operands.

    Equations with side effects or jaxprs of their own stay.
    """
    seen: dict[Any, Any] = {}
    same: dict[Var, Var] = {}
    for eqn in loop.eqns:
        key = _key(eqn, same)
        first = seen.setdefault(key, eqn) if key is not None else eqn
        if first is not eqn:
            same.update((v, same.get(u, u)) for v, u in zip(eqn.outvars, first.outvars))
    if not same:
        return loop

    def evaluation(env: Env) -> Env:
        for eqn in loop.eqns:
            if all(v in same for v in eqn.outvars) and eqn.outvars:
                env.update((v, env[same[v]]) for v in eqn.outvars)
            else:
                jaxprs.evaluate([eqn], env)
        return env

    return loop.rewritten(evaluation)


def _key(eqn: Any, same: dict[Var, Var]) -> Any:
    """Equal for equal equations; None for those that must stay."""
    if eqn.effects or any(True for _ in jaxprs.sub_jaxprs(eqn)):
        return None
    try:
        operands = tuple(_identity(same.get(a, a) if not jaxprs.is_literal(a) else a) for a in eqn.invars)
        key = (eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda kv: kv[0])), operands)
        hash(key)
    except TypeError:
        return None
    return key


def _identity(atom: Atom) -> Any:
    """Variables by themselves, literals by type and value."""
    if not jaxprs.is_literal(atom):
        return atom
    if np.ndim(atom.val):
        raise TypeError("an array has no value to compare by")
    return str(atom.aval), np.asarray(atom.val).tobytes()
