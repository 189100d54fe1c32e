"""Gates that are slices of one pre-activation, for XLA:CPU: activated together, or sliced before the loop.

XLA:CPU makes one kernel of each elementwise chain. It does not vectorize a chain that reads several slices of one array.

Invariant of both passes: every value is unchanged.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop

_DEEPEST_SUM = 4  # the number of additions that a slice is moved through at most


def join_activations(loop: Loop) -> Loop:
    """Applies an activation once to neighboring slices of one array instead of once to each slice."""
    cuts = _joined_slices(loop)
    if not any(isinstance(cut.of, _Joined) for cut in cuts.values()):
        return loop

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if not (
            eqn.outvars and all(v in cuts for v in eqn.outvars)
        ):  # also the slices of a `split`
            return None
        with jaxprs.in_scope(eqn):
            return [_slice_of(cuts[v], env) for v in eqn.outvars]

    return loop.rewrite(rule)


def slice_operands(loop: Loop) -> Loop:
    """Rewrites `slice(a + b)` as `slice(a) + slice(b)`, so that slices of xs can be hoisted."""
    cuts = axis_slices(loop.eqns)
    producers = jaxprs.producers(loop.eqns)

    def piece(atom: Atom, cut: AxisSlice, env: Env, depth: int = 0) -> Any:
        """Returns `atom[cut.lo:cut.hi]`; `atom` may have size one along the axis."""
        eqn = None if jaxprs.is_literal(atom) or depth == _DEEPEST_SUM else producers.get(atom)
        if eqn is not None and eqn.primitive.name in ("add", "sub"):
            with jaxprs.in_scope(eqn):
                return jaxprs.bind(eqn, *(piece(a, cut, env, depth + 1) for a in eqn.invars))[0]
        value = jaxprs.read(env, atom)
        if atom.aval.ndim == 0 or atom.aval.shape[cut.axis] == 1:
            return value
        return jax.lax.slice_in_dim(value, cut.lo, cut.hi, axis=cut.axis)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if not (
            eqn.outvars and all(v in cuts and cuts[v].hi - cuts[v].lo > 1 for v in eqn.outvars)
        ):
            return None
        return [piece(cuts[v].of, cuts[v], env) for v in eqn.outvars]

    return loop.rewrite(rule)


class AxisSlice(NamedTuple):
    """A slice `of[lo:hi]` along `axis`, of a variable or of the result of a joined equation."""

    of: Var | _Joined
    axis: int
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class _Joined:
    """An elementwise equation over neighboring slices, computed once for all of them."""

    eqn: Eqn
    operands: tuple[AxisSlice, ...]

    def value(self, env: dict[Any, Any]) -> Any:
        if self not in env:
            with jaxprs.in_scope(self.eqn):
                (env[self],) = jaxprs.bind(self.eqn, *(_slice_of(c, env) for c in self.operands))
        return env[self]


def _slice_of(cut: AxisSlice, env: dict[Any, Any]) -> Any:
    whole = cut.of.value(env) if isinstance(cut.of, _Joined) else env[cut.of]
    return jax.lax.slice_in_dim(whole, cut.lo, cut.hi, axis=cut.axis)


def axis_slices(eqns: Sequence[Eqn]) -> dict[Var, AxisSlice]:
    """Returns the variables that are slices of others along one axis."""
    cuts: dict[Var, AxisSlice] = {}
    for eqn in eqns:
        if eqn.primitive.name == "slice" and not jaxprs.is_literal(eqn.invars[0]):
            operand, (out,) = eqn.invars[0], eqn.outvars
            lows, highs, strides = (
                eqn.params[k] for k in ("start_indices", "limit_indices", "strides")
            )
            axes = [
                a
                for a, (n, lo, hi) in enumerate(zip(operand.aval.shape, lows, highs))
                if (lo, hi) != (0, n)
            ]
            if len(axes) == 1 and (strides is None or set(strides) == {1}):
                cuts[out] = AxisSlice(operand, axes[0], lows[axes[0]], highs[axes[0]])
        elif eqn.primitive.name == "split" and not jaxprs.is_literal(eqn.invars[0]):
            ends = np.cumsum(eqn.params["sizes"]).tolist()
            for out, lo, hi in zip(eqn.outvars, [0, *ends], ends):
                cuts[out] = AxisSlice(eqn.invars[0], eqn.params["axis"], lo, hi)
    return cuts


def _join(eqns: Sequence[Eqn], cuts: dict[Var, AxisSlice]) -> None:
    """Joins equations over neighboring slices, and adds their results, as slices of the joined results, to `cuts`."""
    groups: dict[Any, list[Any]] = {}
    for eqn in eqns:
        if all(jaxprs.is_in(a, cuts) for a in eqn.invars):
            read = [cuts[a] for a in eqn.invars]
            if len({(c.axis, c.hi - c.lo) for c in read}) == 1:
                apart = tuple(c.lo - read[0].lo for c in read)
                key = (
                    eqn.primitive.name,
                    str(eqn.params),
                    read[0].axis,
                    tuple(c.of for c in read),
                    apart,
                )
                groups.setdefault(key, []).append(eqn)
    for group in groups.values():
        runs: list[list[Any]] = []
        for eqn in sorted(group, key=lambda eqn: cuts[eqn.invars[0]].lo):
            if not runs or cuts[runs[-1][-1].invars[0]].hi != cuts[eqn.invars[0]].lo:
                runs.append([])
            runs[-1].append(eqn)
        for run in runs:
            if len(run) > 1:
                first, last = ([cuts[a] for a in eqn.invars] for eqn in (run[0], run[-1]))
                joined = _Joined(
                    run[0], tuple(AxisSlice(a.of, a.axis, a.lo, b.hi) for a, b in zip(first, last))
                )
                start = first[0].lo
                for eqn in run:
                    own = cuts[eqn.invars[0]]
                    cuts[eqn.outvars[0]] = AxisSlice(
                        joined, own.axis, own.lo - start, own.hi - start
                    )


def _joined_slices(loop: Loop) -> dict[Var, AxisSlice]:
    cuts = axis_slices(loop.eqns)
    activations = [e for e in loop.eqns if primitives.is_activation(e)]
    activated = {e.invars[0] for e in activations}
    _join(
        [e for e in loop.eqns if e.primitive.name in ("add", "sub") and e.outvars[0] in activated],
        cuts,
    )
    _join(activations, cuts)
    return cuts


def prefers_separate_slices(loop: Loop, computed: Collection[Var] = ()) -> bool:
    """Returns True if `slice_operands`, with the slices of xs hoisted, is faster than `join_activations`.

    If all slices of a joined equation lead to the same result of the step, the compiler makes one kernel of it and its uses,
    and joining gains nothing. If they lead to different results, it is computed once for all of them. If nothing is joined,
    slices of sums that are activated later keep XLA:CPU from vectorizing `logistic` and `tanh`. So do slices of inputs.
    Those that a plan computes, `computed`, may as well be arrays of their own.
    """
    cuts = _joined_slices(loop)
    activations = [e for e in loop.eqns if primitives.is_activation(e)]
    joined_cuts = {e.outvars[0]: cuts[e.outvars[0]] for e in activations if e.outvars[0] in cuts}
    first = _first_results(loop) if joined_cuts else {}
    ends: dict[_Joined, _Results] = {}
    for v, cut in joined_cuts.items():
        if isinstance(cut.of, _Joined):
            ends[cut.of] = _both(ends.get(cut.of), first.get(v))
    if ends:
        return any(isinstance(parts, Var) for parts in ends.values())
    sums = {*computed, *(e.outvars[0] for e in loop.eqns if e.primitive.name in ("add", "sub"))}
    sliced = jaxprs.depends(loop.eqns, [v for v, cut in cuts.items() if cut.of in sums])
    vectorized = all(e.primitive.name in ("logistic", "tanh") for e in activations)
    return vectorized and any(v in sliced for e in activations for v in jaxprs.inputs(e))


_Results = Var | Literal["several"] | None  # the only result, or whether there are several


def _first_results(loop: Loop) -> dict[Var, _Results]:
    """Returns for each value the result of the step that is computed from it with no other result in between.

    It is read backwards, from results to what they are computed from. A set for each value would have as many entries as a
    step has results.
    """
    results = set(jaxprs.variables(loop.outputs))
    first: dict[Var, _Results] = {}
    for eqn in reversed(loop.eqns):
        after: _Results = None
        for out in eqn.outvars:
            after = _both(after, out if out in results else first.get(out))
        for v in jaxprs.inputs(eqn):
            first[v] = _both(first.get(v), after)
    return first


def _both(a: _Results, b: _Results) -> _Results:
    """Returns the results that are in a or in b."""
    if a is None or b is None:
        return b if a is None else a
    return a if a is b else "several"
