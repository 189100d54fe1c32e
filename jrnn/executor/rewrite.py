"""Rewrites of a step that leave its results as they are and suit the compiler better.

XLA:CPU makes one kernel of each elementwise chain. A chain that reads several slices of one array is not vectorized, so
gates cut from one pre-activation are activated together, and cotangents of slices are concatenated instead of padded
and added.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop

_ACTIVATIONS = frozenset("logistic tanh exp log1p expm1 erf sin cos sqrt rsqrt".split())


def tidy(loop: Loop) -> Loop:
    """Equal equations once, and the cotangents of slices concatenated."""
    return loop.rewritten(lambda env: jaxprs.distinct(loop.eqns, env)).rewritten_by(_concatenate_pads)


def together(loop: Loop) -> Loop:
    """Neighbouring slices of one array that go through the same activation go through it as one slice."""
    return loop.rewritten_by(_activate_together)


def folded(loop: Loop) -> Loop:
    """For a loop that is linear in its carry: products with what does not depend on the carry, gathered in one.

    `(v * a) * b` becomes `v * (a * b)`, `v * a + v * b` becomes `v * (a + b)`, and a concatenation of products becomes
    a product of concatenations; the factors can then be computed before the loop.
    """
    return loop.rewritten_by(_fold)


@dataclass(frozen=True)
class _Cut:
    """A slice `of[lo:hi]` along `axis`."""

    of: Var
    axis: int
    lo: int
    hi: int


def _cuts(eqns: Sequence[Any]) -> dict[Var, _Cut]:
    """Variables that are slices of others along one axis."""
    found: dict[Var, _Cut] = {}
    for eqn in eqns:
        if eqn.primitive.name == "slice" and not jaxprs.is_literal(eqn.invars[0]):
            operand, (out,) = eqn.invars[0], eqn.outvars
            lows, highs, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
            axes = [a for a, (n, lo, hi) in enumerate(zip(operand.aval.shape, lows, highs)) if (lo, hi) != (0, n)]
            if len(axes) == 1 and (strides is None or set(strides) == {1}):
                found[out] = _Cut(operand, axes[0], lows[axes[0]], highs[axes[0]])
        elif eqn.primitive.name == "split" and not jaxprs.is_literal(eqn.invars[0]):
            ends = np.cumsum(eqn.params["sizes"]).tolist()
            for out, lo, hi in zip(eqn.outvars, [0, *ends], ends):
                found[out] = _Cut(eqn.invars[0], eqn.params["axis"], lo, hi)
    return found


def _activate_together(loop: Loop, env: Env) -> Env:
    cuts = _cuts(loop.eqns)
    groups: dict[Any, dict[Any, _Cut]] = {}
    for eqn in loop.eqns:
        if eqn.primitive.name in _ACTIVATIONS and eqn.invars[0] in cuts:
            cut = cuts[eqn.invars[0]]
            groups.setdefault((eqn.primitive.name, str(eqn.params), cut.of, cut.axis), {})[eqn.outvars[0]] = cut
    runs: dict[Var, list[tuple[Var, _Cut]]] = {}
    for group in groups.values():
        run: list[tuple[Var, _Cut]] = []
        for item in sorted(group.items(), key=lambda item: item[1].lo):
            if run and run[-1][1].hi != item[1].lo:
                run = []
            run.append(item)
            runs[item[0]] = run

    for eqn in loop.eqns:
        out = eqn.outvars[0]
        run = runs.get(out, [])
        if eqn.primitive.name == "split":  # as slices, whose cotangents can be told apart
            with jaxprs.in_scope(eqn):
                for v in eqn.outvars:
                    cut = cuts[v]
                    env[v] = jax.lax.slice_in_dim(env[cut.of], cut.lo, cut.hi, axis=cut.axis)
        elif len(run) < 2:
            jaxprs.evaluate([eqn], env)
        elif out not in env:
            first, last = run[0][1], run[-1][1]
            with jaxprs.in_scope(eqn):
                whole = jax.lax.slice_in_dim(env[first.of], first.lo, last.hi, axis=first.axis)
                active = eqn.primitive.bind(whole, **eqn.params)
                for v, cut in run:
                    env[v] = jax.lax.slice_in_dim(active, cut.lo - first.lo, cut.hi - first.lo, axis=cut.axis)
    return env


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
                parts.append(jnp.zeros(gap, eqn.outvars[0].aval.dtype))
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
    while queue:
        eqn = None if jaxprs.is_literal(queue[-1]) else made.get(queue[-1])
        queue.pop()
        if eqn is None:
            return None
        if eqn.primitive.name == "add_any":
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
    apart = all(a[2] <= b[1] for a, b in zip(found, found[1:]))
    if len({piece[0] for piece in found}) != 1 or not apart:
        return None
    return found[0][0], [piece[1:] for piece in found]


@dataclass
class _Product:
    """`base * factor`, the factor not depending on the carry (None for one)."""

    base: Any
    factor: Any

    def value(self) -> Any:
        return self.base if self.factor is None else self.base * self.factor

    def factor_or_ones(self) -> Any:
        return jnp.ones_like(self.base) if self.factor is None else self.factor


def _fold(loop: Loop, env: Env) -> Env:
    inner = jaxprs.depends(loop.eqns, (*loop.carry, *_movers(loop)))
    products: dict[Var, _Product] = {v: _Product(env[v], None) for v in loop.inputs if v in inner}

    def product(atom: Atom) -> _Product:
        return products[atom] if not jaxprs.is_literal(atom) and atom in inner else _Product(None, None)

    for eqn in loop.eqns:
        moving = [a for a in eqn.invars if not jaxprs.is_literal(a) and a in inner]
        out = eqn.outvars[0]
        if not moving:
            jaxprs.evaluate([eqn], env)
            for v in eqn.outvars:
                if v in inner:
                    products[v] = _Product(env[v], None)
            continue
        with jaxprs.in_scope(eqn):
            made = _folded(eqn, moving, product, env)
        if made is None:
            for a in moving:
                env[a] = products[a].value()
            jaxprs.evaluate([eqn], env)
            products.update({v: _Product(env[v], None) for v in eqn.outvars})
        else:
            products[out] = made
    for atom in loop.outputs:
        if not jaxprs.is_literal(atom) and atom in inner:
            env[atom] = products[atom].value()
    return env


def _movers(loop: Loop) -> list[Var]:
    return [v for e in loop.eqns if not jaxprs.is_movable(e) for v in e.outvars]


def _folded(eqn: Any, moving: Sequence[Var], product: Any, env: Env) -> _Product | None:
    name = eqn.primitive.name
    if name == "mul" and len(moving) == 1:
        (other,) = [a for a in eqn.invars if a is not moving[0]]
        if other.aval.shape == moving[0].aval.shape:
            mine, factor = product(moving[0]), jaxprs.value(env, other)
            return _Product(mine.base, factor if mine.factor is None else mine.factor * factor)
    if name in ("add", "add_any") and len(moving) == 2:
        left, right = map(product, eqn.invars)
        if left.base is right.base:
            return _Product(left.base, left.factor_or_ones() + right.factor_or_ones())
    if name == "concatenate":
        parts = [product(a) if a in moving else _Product(jaxprs.value(env, a), None) for a in eqn.invars]
        if any(p.factor is not None for p in parts):
            axis = eqn.params["dimension"]
            return _Product(
                jax.lax.concatenate([p.base for p in parts], axis),
                jax.lax.concatenate([p.factor_or_ones() for p in parts], axis),
            )
    return None
