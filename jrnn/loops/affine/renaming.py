"""Equations read one by one: which only rename axes, along which axes a value may vary, and which values are known now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.jaxprs.axes import aligned
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.affine.terms import Labels

SAME = ("copy", "copy_p", "name", "reduce_precision")
_VIEWS = (*SAME, "broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze", "transpose")


def long_pairs(eqn: Eqn) -> list[tuple[int, int]]:
    """Returns the pairs of axes that a `dot_general` contracts, except those of size 1."""
    pairs = zip(*eqn.params["dimension_numbers"][0])
    return [(a, b) for a, b in pairs if eqn.invars[0].aval.shape[a] != 1]


# Equations that only rename axes --------------------------------------------------------------------------------------


def sources_of(eqn: Eqn) -> list[int | None] | None:
    """For each axis of the result of a view, the axis of the operand that it is; None if the equation is no such view."""
    if eqn.primitive.name not in _VIEWS:
        return None
    follow = aligned(eqn, 0, eqn.outvars[0])
    if any(n != 1 and d not in follow for d, n in enumerate(eqn.invars[0].aval.shape)):
        raise NotAffine("it merges or splits axes")
    back = {axis: d for d, axis in follow.items()}
    return [back.get(d) for d in range(eqn.outvars[0].aval.ndim)]


def view(eqn: Eqn, labels: Labels) -> Labels | None:
    sources = sources_of(eqn) if eqn.primitive.name != "convert_element_type" else None
    return None if sources is None else tuple(None if s is None else labels[s] for s in sources)


def unviewed(eqn: Eqn, labels: Labels) -> Labels | None:
    """Labels for the operand of a view from those of its result."""
    try:
        sources = sources_of(eqn)
    except NotAffine:
        return None
    if sources is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    inner: list[int | None] = [None] * eqn.invars[0].aval.ndim
    for label, s in zip(labels, sources):
        if s is not None:
            inner[s] = label
    return tuple(inner)


def varying_axes(eqn: Eqn, of: Callable[[Atom], set[int]]) -> list[set[int]]:
    """Returns the axes along which each result may vary: broadcasts are followed through elementwise operations.

    Args:
        eqn: the equation.
        of: the axes along which an operand may vary.
    """
    every = [long_axes(v) for v in eqn.outvars]
    try:
        sources = sources_of(eqn) if eqn.invars and len(eqn.outvars) == 1 else None
    except NotAffine:
        sources = None
    if sources is not None:
        inner = of(eqn.invars[0])
        return [{d for d in every[0] if sources[d] in inner}]
    if eqn.primitive.name in primitives.ELEMENTWISE:
        return [set().union(*map(of, eqn.invars)) & e for e in every]
    return [{eqn.params["dimension"]} & every[0]] if eqn.primitive.name == "iota" else every


def long_axes(atom: Atom) -> set[int]:
    return {d for d, n in enumerate(atom.aval.shape) if n != 1}


def constant(atom: Atom, producers: dict[Var, Any], constants: dict[Var, Any]) -> np.ndarray | None:
    """Returns the value of an atom that is computed from literals and known constants only, or None."""
    eqns: dict[int, Any] = {}
    pending: list[Atom] = [atom]
    while pending:
        v = pending.pop()
        if jaxprs.is_literal(v) or v in constants:
            continue
        if v not in producers or len(eqns) > 16:
            return None
        eqns[id(producers[v])] = producers[v]
        pending += producers[v].invars
    order = [eqn for eqn in dict.fromkeys(map(id, producers.values())) if eqn in eqns]
    with jax.ensure_compile_time_eval():
        env = jaxprs.evaluate((eqns[i] for i in order), dict(constants), rule=jaxprs.uncast)
        return np.asarray(jaxprs.value(env, atom))
