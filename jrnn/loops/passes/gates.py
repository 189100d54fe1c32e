"""Gates that are slices of one pre-activation, for XLA:CPU: activated together, or sliced before the loop.

The problem: XLA:CPU makes one kernel of each elementwise chain, and does not vectorize a chain that reads several slices of
one array. A step of an LSTM with 64 units then takes 10.5 us in place of 4.1 (docs/notes/cpu_log.md).

    z = x W + h U                          z = x W + h U
    i = logistic(z[:, 0:H])                s = logistic(z[:, 0:3H])      one loop, vectorized
    f = logistic(z[:, H:2H])               i, f, o = s[:, 0:H], s[:, H:2H], s[:, 2H:3H]
    o = logistic(z[:, 2H:3H])              g = tanh(z[:, 3H:4H])
    g = tanh(z[:, 3H:4H])

`join_activations` rewrites the left form to the right one: equations over neighboring slices are `Joined`. `slice_operands`
goes the other way: slices of `x W`, which is known before the loop, become inputs of their own. `prefers_separate_slices`
chooses.

Invariant of both passes: every value is unchanged.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop

_MAX_SUM_DEPTH = 4  # a slice is moved through at most these additions


def join_activations(loop: Loop) -> Loop:
    """Applies an activation once to neighboring slices of one array instead of once to each slice."""
    cuts = _joined_slices(loop)
    if not any(isinstance(cut.of, Joined) for cut in cuts.values()):
        return loop
    return with_slices(loop, cuts)


def with_slices(loop: Loop, cuts: Mapping[Var, AxisSlice]) -> Loop:
    """Returns the loop with some results computed as slices of variables and of joined values."""

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if not eqn.outvars or not all(v in cuts for v in eqn.outvars):  # all results of a `split`
            return None
        with jaxprs.in_scope(eqn):
            return [cuts[v].value(env) for v in eqn.outvars]

    return loop.rewrite(rule)


def slice_operands(loop: Loop) -> Loop:
    """Rewrites `slice(a + b)` as `slice(a) + slice(b)`, so that slices of xs can be hoisted."""
    cuts = axis_slices(loop.eqns)
    sums = jaxprs.producers(filter(_is_sum, loop.eqns))

    def part(
        atom: Atom,
        cut: AxisSlice,
        env: Env,
        depth: int = 0,
    ) -> Array:
        """Returns `atom[cut.lo:cut.hi]`; `atom` may have size one along the axis."""
        if jaxprs.is_in(atom, sums) and depth < _MAX_SUM_DEPTH:
            eqn = sums[atom]
            with jaxprs.in_scope(eqn):
                parts = [part(a, cut, env, depth + 1) for a in eqn.invars]
                return jaxprs.bind(eqn, *parts)[0]
        value = jaxprs.read(env, atom)
        if atom.aval.ndim == 0 or atom.aval.shape[cut.axis] == 1:
            return value
        return jax.lax.slice_in_dim(value, cut.lo, cut.hi, axis=cut.axis)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if not eqn.outvars or not all(v in cuts and cuts[v].size > 1 for v in eqn.outvars):
            return None
        return [part(cuts[v].of, cuts[v], env) for v in eqn.outvars]

    return loop.rewrite(rule)


def _is_sum(eqn: Eqn) -> bool:
    return eqn.primitive.name in ("add", "sub")


class AxisSlice(NamedTuple):
    """A slice `of[lo:hi]` along `axis`, of a variable or of a joined value."""

    of: Var | Joined
    axis: int
    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    def value(self, env: Env) -> Array:
        """Computes the slice, from all of a joined value or the value of a variable in `env`."""
        whole = self.of.value(env) if isinstance(self.of, Joined) else env[self.of]
        if self.size == whole.shape[self.axis]:
            return whole
        return jax.lax.slice_in_dim(whole, self.lo, self.hi, axis=self.axis)


@dataclass(frozen=True, eq=False)
class Concatenation:
    """Constants, one after the other."""

    parts: Sequence[Var]
    axis: int

    def value(self, env: Env) -> Array:
        return jax.lax.concatenate(jaxprs.take(env, self.parts), self.axis)


@dataclass(frozen=True, eq=False)
class Joined:
    """An elementwise equation over neighboring slices, computed once for all of them.

    Attributes:
        eqn: the equation of the first slice.
        operands: of all slices.
        aval: the type of the result.
    """

    eqn: Eqn
    operands: Sequence[Var | AxisSlice | Concatenation | Joined]
    aval: Any = None

    def value(self, env: Env) -> Array:
        """Computes the joined result at its first use, and adds it to `env`."""
        if self not in env:
            operands = [env[a] if isinstance(a, Var) else a.value(env) for a in self.operands]
            (env[self],) = jaxprs.bind(self.eqn, *operands)
        return env[self]


def axis_slices(eqns: Iterable[Eqn]) -> dict[Var, AxisSlice]:
    """Returns the variables that are slices of others along one axis."""
    cuts: dict[Var, AxisSlice] = {}
    for eqn in eqns:
        name = eqn.primitive.name
        if name not in ("slice", "split") or jaxprs.is_literal(eqn.invars[0]):
            continue
        operand = eqn.invars[0]
        params = eqn.params
        if name == "split":
            lo = 0
            for out, size in zip(eqn.outvars, params["sizes"]):
                cuts[out] = AxisSlice(operand, params["axis"], lo, lo + size)
                lo += size
            continue
        ranges = [*zip(params["start_indices"], params["limit_indices"])]
        axes = [a for a, n in enumerate(operand.aval.shape) if ranges[a] != (0, n)]
        if len(axes) == 1 and (params["strides"] is None or set(params["strides"]) == {1}):
            cuts[eqn.outvars[0]] = AxisSlice(operand, axes[0], *ranges[axes[0]])
    return cuts


def join_neighbors(
    eqns: Iterable[Eqn],
    cuts: dict[Var, AxisSlice],
    constants: Collection[Var] = (),
    only_whole: bool = False,
) -> None:
    """Joins equations over neighboring slices, and adds their results, as slices of the joined results, to `cuts`.

    Args:
        eqns: elementwise equations.
        cuts: the slices.
        constants: values that do not vary. Next to slices of others they are concatenated.
        only_whole: joins what reads all of an array, and nothing else.
    """
    groups: dict[Any, list[tuple[AxisSlice, Eqn]]] = {}
    for eqn in eqns:
        slices = [cuts[a] for a in eqn.invars if jaxprs.is_in(a, cuts)]
        varying = [cut for cut in slices if cut.of not in constants]
        if not varying:
            continue
        first = varying[0]
        places = tuple(_place(a, first, cuts, constants) for a in eqn.invars)
        if None not in places:
            key = (eqn.primitive.name, str(eqn.params), first.axis, places)
            groups.setdefault(key, []).append((first, eqn))

    def start(member: tuple[AxisSlice, Eqn]) -> int:
        return member[0].lo

    for group in groups.values():
        run: list[tuple[AxisSlice, Eqn]] = []
        for member in sorted(group, key=start):
            if run and run[-1][0].hi != start(member):
                _join_run(run, cuts, only_whole)
                run = []
            run.append(member)
        _join_run(run, cuts, only_whole)


def _place(
    atom: Atom, first: AxisSlice, cuts: Mapping[Var, AxisSlice], constants: Collection[Var]
) -> Any:
    """Returns what an operand has in common with its neighbors, next to a first operand; None if it cannot be joined."""
    if jaxprs.is_in(atom, cuts):
        cut = cuts[atom]
        is_like_first = (cut.axis, cut.size) == (first.axis, first.size)
        return (cut.of, cut.lo - first.lo) if is_like_first else None
    shape = atom.aval.shape
    if not jaxprs.is_in(atom, constants) or shape[first.axis] != first.size:
        return None
    return (*jaxprs.replaced(shape, [first.axis], [0]), atom.aval.dtype)


def _join_run(
    run: Sequence[tuple[AxisSlice, Eqn]], cuts: dict[Var, AxisSlice], only_whole: bool
) -> None:
    """Joins equations whose first operands follow each other."""
    slices = [cut for cut, _ in run]
    eqns = [eqn for _, eqn in run]
    axis = slices[0].axis
    whole = slices[0]._replace(hi=slices[-1].hi)
    if len(run) < 2 or (only_whole and whole.size != whole.of.aval.shape[axis]):
        return
    operands: list[Any] = []
    for atoms in zip(*(eqn.invars for eqn in eqns)):
        if atoms[0] in cuts:
            operands.append(cuts[atoms[0]]._replace(hi=cuts[atoms[-1]].hi))
        else:
            operands.append(Concatenation(atoms, axis))
    aval = eqns[0].outvars[0].aval
    shape = tuple(jaxprs.replaced(aval.shape, [axis], [whole.size]))
    joined = Joined(eqns[0], operands, aval.update(shape=shape))
    for cut, eqn in run:
        cuts[eqn.outvars[0]] = AxisSlice(joined, axis, cut.lo - whole.lo, cut.hi - whole.lo)


def _joined_slices(loop: Loop) -> dict[Var, AxisSlice]:
    """Returns all slices of a step, with activations, and sums that are activated, joined over neighboring slices."""
    cuts = axis_slices(loop.eqns)
    activations = list(filter(primitives.is_activation, loop.eqns))
    sums = jaxprs.producers(filter(_is_sum, loop.eqns))
    activated = set(jaxprs.free_variables(activations))
    join_neighbors([sums[v] for v in sums if v in activated], cuts)
    join_neighbors(activations, cuts)
    return cuts


def prefers_separate_slices(loop: Loop, computed: Collection[Var] = ()) -> bool:
    """Returns True if `slice_operands`, with the slices of xs hoisted, is faster than `join_activations`.

    If all slices of a joined equation lead to the same result of the step, the compiler makes one kernel of it and its uses,
    and joining gains nothing. If they lead to different results, it is computed once for all of them. If nothing is joined,
    slices of sums that are activated later keep XLA:CPU from vectorizing `logistic` and `tanh`. So do slices of inputs.
    Sums that a plan computes, `computed`, may as well be arrays of their own.
    """
    cuts = _joined_slices(loop)
    activations = list(filter(primitives.is_activation, loop.eqns))
    first = _first_results(loop)
    ends: dict[Joined, _Results] = {}
    for eqn in activations:
        cut = cuts.get(eqn.outvars[0])
        if cut is not None and isinstance(cut.of, Joined):
            ends[cut.of] = _both(ends.get(cut.of), first.get(eqn.outvars[0]))
    if ends:
        return any(isinstance(parts, Var) for parts in ends.values())
    sums = {*computed, *jaxprs.results(filter(_is_sum, loop.eqns))}
    sliced = jaxprs.depends(loop.eqns, [v for v, cut in cuts.items() if cut.of in sums])
    names = {eqn.primitive.name for eqn in activations}
    activated = jaxprs.free_variables(activations)
    return names <= {"logistic", "tanh"} and jaxprs.any_in(activated, sliced)


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
