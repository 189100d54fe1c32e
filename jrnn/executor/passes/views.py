"""Views of views in a step, seen through: a reshape of a reshape, a slice of a concatenation that lies within one part.

Nets reshape and join arrays for their operators, which cut and reshape them again. Rewrites that look for slices of one
array then miss them, and XLA:CPU makes slower kernels where one kernel reads an array in two shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop
from jrnn.executor.passes.gates import cuts_of

_VIEWS = ("reshape", "squeeze", "broadcast_in_dim")


def direct_views(loop: Loop) -> Loop:
    """Takes every view directly from the array that it shows a part of."""
    if not any(_reshapes(eqn) or cuts_of([eqn]) for eqn in loop.eqns):
        return loop
    return loop.rewritten_by(_direct)


def _direct(loop: Loop, env: Env) -> Env:
    made = jaxprs.producers(loop.eqns)
    same: dict[Var, Var] = {}

    def source(atom: Atom) -> Atom:
        while not jaxprs.is_literal(atom) and atom in same:
            atom = same[atom]
        return atom

    def reshaped(eqn: Any) -> None:
        (out,) = eqn.outvars
        base = source(eqn.invars[0])
        while base in made and _reshapes(made[base]):
            base = source(made[base].invars[0])
        if base.aval.shape == out.aval.shape:
            same[out] = base
            env[out] = env[base]
        else:
            env[out] = jax.lax.reshape(env[base], out.aval.shape)

    for eqn in loop.eqns:
        if _reshapes(eqn):
            reshaped(eqn)
            continue
        cuts = cuts_of([eqn])
        parts = [p for c in cuts.values() if (p := _part(source(c.of), c.axis, c.lo, c.hi, made)) is not None]
        if not cuts or len(parts) < len(cuts):
            jaxprs.evaluate([eqn], env)
            continue
        for v, (whole, axis, lo, hi) in zip(cuts, parts):
            part = source(whole)
            if (lo, hi) == (0, part.aval.shape[axis]):
                same[v] = part
                env[v] = env[part]
            else:
                env[v] = jax.lax.slice_in_dim(env[part], lo, hi, axis=axis)
    return env


def _reshapes(eqn: Any) -> bool:
    """Whether an equation gives its operand's elements in another shape, in the same order."""
    if eqn.primitive.name not in _VIEWS or len(eqn.invars) != 1 or jaxprs.is_literal(eqn.invars[0]):
        return False
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return False
    return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)


def _part(of: Var, axis: int, lo: int, hi: int, made: Mapping[Var, Any]) -> tuple[Var, int, int, int] | None:
    """The part of a concatenation in which its elements `lo` to `hi` lie, and where in it."""
    eqn = made.get(of)
    if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != axis:
        return None
    ends = np.cumsum([0, *(a.aval.shape[axis] for a in eqn.invars)]).tolist()
    for part, (first, last) in zip(eqn.invars, itertools.pairwise(ends)):
        if first <= lo and hi <= last and not jaxprs.is_literal(part):
            return part, axis, lo - first, hi - first
    return None
