"""Rewrites of a step that leave its results as they are and suit the compiler better.

XLA:CPU makes one kernel of each elementwise chain. A chain that reads several slices of one array is not vectorized, so
gates cut from one pre-activation are activated together, and cotangents of slices are concatenated instead of padded
and added.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrnn.executor import jaxprs, primitives
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop

_DEEPEST_SUM = 4  # additions that a slice is moved through


def activate_together(loop: Loop) -> Loop:
    """Applies an activation once to neighboring slices of one array instead of once to each slice."""
    if not any(isinstance(cut.of, _Joined) for cut in _joined_cuts(loop).values()):
        return loop
    return loop.rewritten_by(_activate_together)


def slice_apart(loop: Loop) -> Loop:
    """Rewrites `slice(a + b)` as `slice(a) + slice(b)`, so that slices of xs can be hoisted."""
    return loop.rewritten_by(_slice_apart)


@dataclass(frozen=True)
class _Cut:
    """A slice `of[lo:hi]` along `axis` of a variable, or of the result of a joined equation."""

    of: Var | _Joined
    axis: int
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class _Joined:
    """One elementwise equation over neighboring slices, done at once over all of them."""

    eqn: Any
    operands: tuple[_Cut, ...]

    def value(self, env: dict[Any, Any]) -> Any:
        if self not in env:
            with jaxprs.in_scope(self.eqn):
                env[self] = self.eqn.primitive.bind(*(_take(c, env) for c in self.operands), **self.eqn.params)
        return env[self]


def _take(cut: _Cut, env: dict[Any, Any]) -> Any:
    whole = cut.of.value(env) if isinstance(cut.of, _Joined) else env[cut.of]
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


def _join(eqns: Sequence[Any], cuts: dict[Var, _Cut]) -> None:
    """Adds to `cuts` the results of `eqns` that are slices of two or more of them, joined."""
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
                joined = _Joined(items[0][1], tuple(_Cut(a.of, a.axis, a.lo, b.hi) for a, b in zip(first, last)))
                for read, eqn in items:
                    lo, hi = read[0].lo - first[0].lo, read[0].hi - first[0].lo
                    cuts[eqn.outvars[0]] = _Cut(joined, read[0].axis, lo, hi)


def _activate_together(loop: Loop, env: Env) -> Env:
    cuts = _joined_cuts(loop)
    for eqn in loop.eqns:
        if eqn.outvars and all(v in cuts for v in eqn.outvars):  # also the slices of a `split`
            with jaxprs.in_scope(eqn):
                env.update({v: _take(cuts[v], env) for v in eqn.outvars})
        else:
            jaxprs.evaluate([eqn], env)
    return env


def _joined_cuts(loop: Loop) -> dict[Var, _Cut]:
    cuts = cuts_of(loop.eqns)
    activations = [e for e in loop.eqns if e.primitive.name in primitives.ACTIVATIONS]
    activated = {e.invars[0] for e in activations}
    _join([e for e in loop.eqns if e.primitive.name in ("add", "sub") and e.outvars[0] in activated], cuts)
    _join(activations, cuts)
    return cuts


def better_apart(loop: Loop) -> bool:
    """Whether `slice_apart`, with the slices of xs hoisted, suits the compiler better than `activate_together`.

    Where all slices of a joined equation end in one and the same result of the step, the compiler makes one kernel of it and
    its uses, and gains nothing from it; where they end in different results, it is computed once for all of them.
    Where nothing is joined, slices of sums that are activated later keep XLA:CPU from vectorizing `logistic` and `tanh`.
    """
    cuts = _joined_cuts(loop)
    results = {a for a in loop.outputs if not jaxprs.is_literal(a)}
    ends: dict[_Joined, set[Var]] = {}
    activations = [e for e in loop.eqns if e.primitive.name in primitives.ACTIVATIONS]
    for eqn in activations:
        cut = cuts.get(eqn.outvars[0])
        if cut is not None and isinstance(cut.of, _Joined):
            ends.setdefault(cut.of, set()).update(_first_results(eqn.outvars[0], loop.eqns, results))
    if ends:
        return any(len(found) == 1 for found in ends.values())
    sums = {e.outvars[0] for e in loop.eqns if e.primitive.name in ("add", "sub")}
    sliced = jaxprs.depends(loop.eqns, [v for v, cut in cuts.items() if cut.of in sums])
    vectorized = all(e.primitive.name in ("logistic", "tanh") for e in activations)
    return vectorized and any(v in sliced for e in activations for v in jaxprs.inputs(e))


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

    def piece(atom: Atom, cut: _Cut, depth: int = 0) -> Any:
        """`atom[cut.lo:cut.hi]`, where `atom` may be of size one along the axis."""
        eqn = None if jaxprs.is_literal(atom) or depth == _DEEPEST_SUM else made.get(atom)
        if eqn is not None and eqn.primitive.name in ("add", "sub"):
            with jaxprs.in_scope(eqn):
                return eqn.primitive.bind(*(piece(a, cut, depth + 1) for a in eqn.invars), **eqn.params)
        value = jaxprs.read(env, atom)
        if atom.aval.ndim == 0 or atom.aval.shape[cut.axis] == 1:
            return value
        return jax.lax.slice_in_dim(value, cut.lo, cut.hi, axis=cut.axis)

    for eqn in loop.eqns:
        if eqn.outvars and all(v in cuts and cuts[v].hi - cuts[v].lo > 1 for v in eqn.outvars):
            env.update({v: piece(cuts[v].of, cuts[v]) for v in eqn.outvars})
        else:
            jaxprs.evaluate([eqn], env)
    return env
