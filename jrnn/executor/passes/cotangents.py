"""Cotangents of slices: a sum of zero-padded arrays becomes one concatenation.

Each `pad` would write a whole array of zeros, and XLA:CPU does not vectorize their sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop


def concatenate_cotangents(loop: Loop) -> Loop:
    """Writes sums of zero-padded arrays that do not overlap as concatenations.

    Invariant: every value stays what it was, up to the sign of zero.
    """
    if not any(eqn.primitive.name == "pad" for eqn in loop.eqns):
        return loop
    return loop.rewritten_by(_concatenate_pads)


def _concatenate_pads(loop: Loop, env: Env) -> Env:
    made = jaxprs.producers(loop.eqns)
    for eqn in loop.eqns:
        pieces = _pieces(eqn.outvars[0], made) if eqn.primitive.name == "add_any" else None
        if pieces is None:
            jaxprs.evaluate([eqn], env)
            continue
        axis, placed = pieces
        parts, at = [], 0
        shape = list(eqn.outvars[0].aval.shape)
        ends = [*placed, (shape[axis], shape[axis], None)]
        for lo, hi, atom in ends:
            if lo > at:
                gap = [*shape[:axis], lo - at, *shape[axis + 1 :]]
                parts.append(jaxprs.zeros_of_shape(gap, eqn.outvars[0].aval))
            if atom is not None:
                parts.append(jaxprs.value(env, atom))
            at = hi
        with jaxprs.in_scope(eqn):
            env[eqn.outvars[0]] = jax.lax.concatenate(parts, axis)
    return env


def _pieces(v: Var, made: Mapping[Var, Any]) -> tuple[int, list[tuple[int, int, Atom]]] | None:
    """For a sum of zero-padded arrays that do not overlap: the axis, and `(lo, hi, array)` in order."""
    found: list[tuple[int, int, int, Atom]] = []
    queue: list[Atom] = [v]
    met: set[Var] = set()
    while queue:
        eqn = None if jaxprs.is_literal(queue[-1]) else made.get(queue[-1])
        queue.pop()
        if eqn is None:
            return None
        if eqn.primitive.name == "add_any":
            if eqn.outvars[0] in met:
                return None  # added twice
            met.add(eqn.outvars[0])
            queue.extend(eqn.invars)
            continue
        if eqn.primitive.name != "pad":
            return None
        operand, fill = eqn.invars
        config = eqn.params["padding_config"]
        axes = [a for a, (low, high, _) in enumerate(config) if (low, high) != (0, 0)]
        plain = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
        if not (plain and len(axes) == 1 and jaxprs.is_literal(fill) and fill.val == 0):
            return None
        low = config[axes[0]][0]
        found.append((axes[0], low, low + operand.aval.shape[axes[0]], operand))
    found.sort(key=lambda piece: piece[:3])
    apart = all(a[2] <= b[1] for a, b in itertools.pairwise(found))
    if len({piece[0] for piece in found}) != 1 or not apart:
        return None
    return found[0][0], [piece[1:] for piece in found]
