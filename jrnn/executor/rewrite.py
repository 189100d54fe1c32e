"""Rewrites of a step that leave its results as they are and suit the compiler better.

XLA:CPU makes one kernel of each elementwise chain. A chain that reads several slices of one array is not vectorized, so
gates cut from one pre-activation are activated together, and cotangents of slices are concatenated instead of padded
and added.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop

_ACTIVATIONS = frozenset(("logistic", "tanh", "exp", "log1p", "expm1", "erf", "sin", "cos", "sqrt", "rsqrt"))


def tidy(loop: Loop) -> Loop:
    """Equal equations once, and the cotangents of slices concatenated."""
    return loop.rewritten(lambda env: jaxprs.distinct(loop.eqns, env)).rewritten_by(_concatenate_pads)


def together(loop: Loop) -> Loop:
    """Neighbouring slices of one array that go through the same activation go through it as one slice."""
    return loop.rewritten_by(_activate_together)


def apart(loop: Loop) -> Loop:
    """Slices of sums as sums of slices, so that what is sliced out of `xs` can be sliced before the loop."""
    return loop.rewritten_by(_slice_apart)


def folded(loop: Loop) -> Loop:
    """For a loop that is linear in its carry: products with what does not depend on the carry, gathered in one.

    `(v * a) * b` becomes `v * (a * b)`, `v * a + v * b` becomes `v * (a + b)`, and a factor of a concatenation goes to
    its parts; the factors can then be computed before the loop.
    """
    return loop.rewritten_by(_fold)


@dataclass(frozen=True)
class _Cut:
    """A slice `of[lo:hi]` along `axis` of a variable, or of the result of a run."""

    of: Var | _Run
    axis: int
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class _Run:
    """One elementwise equation over neighbouring slices, done at once over all of them."""

    eqn: Any
    operands: tuple[_Cut, ...]

    def value(self, env: dict[Any, Any]) -> Any:
        if self not in env:
            with jaxprs.in_scope(self.eqn):
                env[self] = self.eqn.primitive.bind(*(_take(c, env) for c in self.operands), **self.eqn.params)
        return env[self]


def _take(cut: _Cut, env: dict[Any, Any]) -> Any:
    whole = cut.of.value(env) if isinstance(cut.of, _Run) else env[cut.of]
    return jax.lax.slice_in_dim(whole, cut.lo, cut.hi, axis=cut.axis)


def cuts_of(eqns: Sequence[Any]) -> dict[Var, _Cut]:
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


def _joined(eqns: Sequence[Any], cuts: dict[Var, _Cut]) -> None:
    """Adds to `cuts` the results of `eqns` that are slices of a run of two or more of them."""
    groups: dict[Any, list[tuple[tuple[_Cut, ...], Any]]] = {}
    for eqn in eqns:
        if all(not jaxprs.is_literal(a) and a in cuts for a in eqn.invars):
            read = tuple(cuts[a] for a in eqn.invars)
            if len({(c.axis, c.hi - c.lo) for c in read}) == 1:
                apart = tuple(c.lo - read[0].lo for c in read)
                key = (eqn.primitive.name, str(eqn.params), read[0].axis, tuple(c.of for c in read), apart)
                groups.setdefault(key, []).append((read, eqn))
    for group in groups.values():
        runs: list[list[tuple[tuple[_Cut, ...], Any]]] = []
        for item in sorted(group, key=lambda item: item[0][0].lo):
            if not runs or runs[-1][-1][0][0].hi != item[0][0].lo:
                runs.append([])
            runs[-1].append(item)
        for items in runs:
            first, last = items[0][0], items[-1][0]
            if len(items) > 1:
                run = _Run(items[0][1], tuple(_Cut(a.of, a.axis, a.lo, b.hi) for a, b in zip(first, last)))
                for read, eqn in items:
                    lo, hi = read[0].lo - first[0].lo, read[0].hi - first[0].lo
                    cuts[eqn.outvars[0]] = _Cut(run, read[0].axis, lo, hi)


def _activate_together(loop: Loop, env: Env) -> Env:
    cuts = _run_cuts(loop)
    for eqn in loop.eqns:
        if all(v in cuts for v in eqn.outvars):  # a `split`, too, becomes slices, whose cotangents can be told apart
            with jaxprs.in_scope(eqn):
                env.update({v: _take(cuts[v], env) for v in eqn.outvars})
        else:
            jaxprs.evaluate([eqn], env)
    return env


def _run_cuts(loop: Loop) -> dict[Var, _Cut]:
    cuts = cuts_of(loop.eqns)
    activations = [e for e in loop.eqns if e.primitive.name in _ACTIVATIONS]
    activated = {e.invars[0] for e in activations}
    _joined([e for e in loop.eqns if e.primitive.name in ("add", "sub") and e.outvars[0] in activated], cuts)
    _joined(activations, cuts)
    return cuts


def runs_meet(loop: Loop) -> bool:
    """Whether all slices of some run end in one and the same result of the step.

    The compiler then makes one kernel of the run and its uses, and gains nothing from the run; where they end in
    different results, the run is computed once for all of them.
    """
    cuts = _run_cuts(loop)
    results = {a for a in loop.outputs if not jaxprs.is_literal(a)}
    ends: dict[_Run, set[Var]] = {}
    for eqn in loop.eqns:
        cut = cuts.get(eqn.outvars[0])
        if cut is not None and isinstance(cut.of, _Run) and eqn.primitive.name in _ACTIVATIONS:
            ends.setdefault(cut.of, set()).update(_first_results(eqn.outvars[0], loop.eqns, results))
    return any(len(found) == 1 for found in ends.values())


def activates_slices(eqns: Sequence[Any]) -> bool:
    """Whether an activation among `eqns` reads a slice, or what is computed from one."""
    sliced = jaxprs.depends(eqns, cuts_of(eqns))
    return any(e.primitive.name in _ACTIVATIONS and any(v in sliced for v in jaxprs.inputs(e)) for e in eqns)


def _first_results(v: Var, eqns: Sequence[Any], results: Collection[Var]) -> set[Var]:
    """The results of the step that are computed from `v` with no other result in between."""
    reached, found = {v}, set()
    for eqn in eqns:
        if any(u in reached for u in jaxprs.inputs(eqn)):
            for out in eqn.outvars:
                (found if out in results else reached).add(out)
    return found


def _slice_apart(loop: Loop, env: Env) -> Env:
    cuts = cuts_of(loop.eqns)
    made = jaxprs.producers(loop.eqns)

    def piece(atom: Atom, cut: _Cut) -> Any:
        """`atom[cut.lo:cut.hi]`, where `atom` may be of size one along the axis."""
        eqn = None if jaxprs.is_literal(atom) else made.get(atom)
        if eqn is not None and eqn.primitive.name in ("add", "sub"):
            with jaxprs.in_scope(eqn):
                return eqn.primitive.bind(*(piece(a, cut) for a in eqn.invars), **eqn.params)
        value = jaxprs.read(env, atom)
        if atom.aval.ndim == 0 or atom.aval.shape[cut.axis] == 1:
            return value
        return jax.lax.slice_in_dim(value, cut.lo, cut.hi, axis=cut.axis)

    for eqn in loop.eqns:
        if all(v in cuts and cuts[v].hi - cuts[v].lo > 1 for v in eqn.outvars):
            env.update({v: piece(cuts[v].of, cuts[v]) for v in eqn.outvars})
        else:
            jaxprs.evaluate([eqn], env)
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
    apart = all(a[2] <= b[1] for a, b in itertools.pairwise(found))
    if len({piece[0] for piece in found}) != 1 or not apart:
        return None
    return found[0][0], [piece[1:] for piece in found]


@dataclass(frozen=True)
class _Product:
    """`base * factor`, the factor not depending on the carry (None for one)."""

    base: Any
    factor: Any

    def value(self) -> Any:
        return self.base if self.factor is None else self.base * self.factor

    def factor_or_ones(self) -> Any:
        return jnp.ones_like(self.base) if self.factor is None else self.factor

    def times(self, factor: Any) -> _Product:
        return _Product(self.base, factor if self.factor is None else self.factor * factor)


@dataclass(frozen=True)
class _Row:
    """Products side by side along an axis."""

    axis: int
    parts: tuple[_Product, ...]
    base: None = None

    def value(self) -> Any:
        return jax.lax.concatenate([p.value() for p in self.parts], self.axis)

    def times(self, factor: Any) -> _Row:
        ends = np.cumsum([0, *(p.base.shape[self.axis] for p in self.parts)]).tolist()
        shares = [jax.lax.slice_in_dim(factor, lo, hi, axis=self.axis) for lo, hi in itertools.pairwise(ends)]
        return _Row(self.axis, tuple(p.times(share) for p, share in zip(self.parts, shares)))


_Term = _Product | _Row


def _fold(loop: Loop, env: Env) -> Env:
    stuck = [v for e in loop.eqns if not jaxprs.is_movable(e) for v in e.outvars]
    inner = jaxprs.depends(loop.eqns, (*loop.carry, *stuck))
    terms: dict[Var, list[_Term]] = {v: [_Product(env[v], None)] for v in loop.inputs if v in inner}

    def product(v: Var) -> _Term:
        if len(terms[v]) > 1:
            terms[v] = [_Product(functools.reduce(jnp.add, (t.value() for t in terms[v])), None)]
        return terms[v][0]

    for eqn in loop.eqns:
        moving = [a for a in eqn.invars if not jaxprs.is_literal(a) and a in inner]
        with jaxprs.in_scope(eqn):
            made = _folded(eqn, moving, terms, product, env) if moving else None
            env.update({v: product(v).value() for v in moving if made is None and v not in env})
        if made is not None:
            terms[eqn.outvars[0]] = made
        else:
            jaxprs.evaluate([eqn], env)
            terms.update({v: [_Product(env[v], None)] for v in eqn.outvars if v in inner})
    outs = [v for v in loop.outputs if not jaxprs.is_literal(v) and v in inner and v not in env]
    env.update({v: product(v).value() for v in outs})
    return env


def _folded(eqn: Any, moving: Sequence[Var], terms: Mapping[Var, list[_Term]], product: Any, env: Env) -> Any:
    """The terms of a product, sum or concatenation of products, or None for any other equation."""
    name = eqn.primitive.name
    if name == "mul" and len(moving) == 1:
        (other,) = [a for a in eqn.invars if a is not moving[0]]
        if other.aval.shape in ((), moving[0].aval.shape):
            factor = jnp.broadcast_to(jaxprs.value(env, other), moving[0].aval.shape)
            return [product(moving[0]).times(factor)]
    if name in ("add", "add_any") and len(moving) == 2:
        merged: list[_Term] = []
        for term in [*terms[moving[0]], *terms[moving[1]]]:
            same = [i for i, t in enumerate(merged) if t.base is term.base is not None]
            if same:
                both = merged[same[0]].factor_or_ones() + term.factor_or_ones()
                merged[same[0]] = _Product(term.base, both)
            else:
                merged.append(term)
        return merged
    if name == "concatenate":
        axis = eqn.params["dimension"]
        parts: list[_Product] = []
        for atom in eqn.invars:
            part = product(atom) if atom in moving else _Product(jaxprs.value(env, atom), None)
            if isinstance(part, _Row):
                parts += part.parts if part.axis == axis else [_Product(part.value(), None)]
            else:
                parts.append(part)
        return [_Row(axis, tuple(parts))]
    return None
