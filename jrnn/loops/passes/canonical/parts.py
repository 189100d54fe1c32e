"""The stage that takes joined carries apart: a carry that is only read in slices, and written by joining arrays.

Such are `[2, N, H]` and `[N, 2H]` with the two states of an LSTM, and their cotangents. A carry that is always read in
another shape gets this shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop
from jrnn.loops.passes.sums import added_to_carries

T = TypeVar("T")

_MOST_PARTS = 8
_JOINS = {"concatenate": "dimension", "stack": "axis"}


@dataclass(frozen=True)
class Division:
    """How a carry is divided: its shape, and the places in `cuts` along an axis of it before which it is cut."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int = 0
    cuts: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.cuts) + 1

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first place of each part, and the place after it."""
        return list(pairwise((0, *self.cuts, self.shape[self.axis]))) if self.cuts else []

    @property
    def is_whole(self) -> bool:
        return not self.cuts and self.shape == self.whole

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part."""
        return [tuple(jaxprs.replaced(self.shape, [self.axis], [hi - lo])) for lo, hi in self.bounds] or [self.shape]

    def apart(self, value: Any) -> list[Any]:
        value = jnp.reshape(value, self.shape)
        return [jax.lax.slice_in_dim(value, lo, hi, axis=self.axis) for lo, hi in self.bounds] or [value]

    def together(self, parts: Sequence[Any]) -> Any:
        return jnp.reshape(jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0], self.whole)


@dataclass(frozen=True)
class Parts:
    """How the carries of a loop divide those of the loop that it was made from."""

    divisions: tuple[Division, ...]

    def around(
        self, run: RunLoop, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        parts = [part for division, value in zip(self.divisions, init) for part in division.apart(value)]
        last, ys = run(consts, parts, xs, length)
        leaves = iter(last)
        whole = [division.together([next(leaves) for _ in range(division.parts)]) for division in self.divisions]
        return whole, list(ys)

    def said_of(self, consts: Sequence[T], carry: Sequence[T], xs: Sequence[T]) -> list[Sequence[T]]:
        """Returns what is said of each constant, carry and input of the original loop for those of the rewritten one."""
        return [consts, [value for division, value in zip(self.divisions, carry) for _ in range(division.parts)], xs]


def in_parts(loop: Loop) -> tuple[Loop, Parts | None]:
    """Returns the loop with carries in other shapes and in parts, and how each is divided; None if all stay whole.

    Invariant: every value is unchanged.
    """
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs), effects=True)
    loop = loop if len(eqns) == len(loop.eqns) else replace(loop, eqns=tuple(eqns))
    readers: dict[Var, list[Eqn]] = {}
    for eqn in loop.eqns:
        for v in jaxprs.inputs(eqn):
            readers.setdefault(v, []).append(eqn)
    reading = _Reading(loop, readers)
    sums = added_to_carries(loop)  # which nothing reads
    parts = Parts(
        tuple(
            Division(v.aval.shape, v.aval.shape) if i in sums else reading.division(v, out)
            for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out))
        )
    )
    if all(division.is_whole for division in parts.divisions):
        return loop, None
    step = _Step(loop, parts, reading)
    types = [(v.aval, division, shape) for v, division in zip(loop.carry, parts.divisions) for shape in division.shapes]
    avals = [aval if division.is_whole else aval.update(shape=shape) for aval, division, shape in types]
    input_avals = [*(v.aval for v in loop.consts), *avals, *(v.aval for v in loop.xs)]
    return loop.traced(step.run, input_avals, len(avals)), parts


class _Reading:
    """What reads and writes the carries of a loop.

    Attributes:
        apart: values other than carries that are computed in parts, with their divisions.
    """

    def __init__(self, loop: Loop, readers: Mapping[Var, Sequence[Eqn]]):
        self.loop, self.readers = loop, readers
        self.producers = jaxprs.producers(loop.eqns)
        self.inputs = {*loop.consts, *loop.xs}
        self.apart: dict[Var, Division] = {}

    def division(self, v: Var, out: Atom) -> Division:
        """Returns the division of a carry with a new value."""
        shape = v.aval.shape
        whole, last = Division(shape, shape), None if jaxprs.is_literal(out) else self.producers.get(out)
        if not shape or last is None or not all(map(jaxprs.is_known, shape)):
            return whole
        reads = self.readers.get(v, ())
        if last.primitive.name == "reshape" and reads and all(e.primitive.name == "reshape" for e in reads):
            shapes = {e.outvars[0].aval.shape for e in reads} | {last.invars[0].aval.shape}
            outside = v in self.loop.carry_out or v in self.loop.ys
            return Division(shape, *shapes) if len(shapes) == 1 and not outside else whole
        for axis in range(len(shape)):
            chain: dict[Var, None] = {}
            joined = self._joined(out, v, axis, chain)
            cuts = None if not joined else self._read(v, v, axis, chain)
            if cuts is None:
                continue
            division = Division(shape, shape, axis, tuple(sorted((joined | cuts) - {0, shape[axis]})))
            if 1 < division.parts <= _MOST_PARTS:
                self.apart.update(dict.fromkeys(chain, division))
                return division
        return whole

    def _joined(self, atom: Atom, carry: Var, axis: int, chain: dict[Var, None]) -> set[int] | None:
        """Returns where a value is joined along an axis; no place for one that can be cut anywhere; None for another one."""
        if jaxprs.is_literal(atom) or atom is carry or atom in self.inputs or not atom.aval.shape:
            return set()
        eqn = self.producers.get(atom)
        name = None if eqn is None else eqn.primitive.name
        if eqn is None or name == "broadcast_in_dim":
            return set() if eqn is not None else None
        if name in _JOINS:
            if eqn.params[_JOINS[name]] != axis:
                return None
            sizes = [1] * len(eqn.invars) if name == "stack" else [a.aval.shape[axis] for a in eqn.invars]
            chain[atom] = None
            return {int(end) for end in np.cumsum([0, *sizes])}
        if not primitives.is_kind(eqn, "elementwise"):
            return None
        places: set[int] = set()
        for a in eqn.invars:
            of = self._joined(a, carry, axis, chain)
            if of is None:
                return None
            places |= of
        chain[atom] = None
        return places

    def _read(self, v: Var, carry: Var, axis: int, chain: dict[Var, None]) -> set[int] | None:
        """Returns where slices of a value begin and end, or None if it is read in another way."""
        places: set[int] = set()
        for eqn in self.readers.get(v, ()):
            own = _cuts(eqn, axis)
            if own is None and primitives.is_kind(eqn, "elementwise"):
                out = eqn.outvars[0]
                rest = [a for a in eqn.invars if a is not v]
                if out not in chain and any(self._joined(a, carry, axis, {}) is None for a in rest):
                    return None
                own = self._read(out, carry, axis, chain)
                chain[out] = None
            if own is None:
                return None
            places |= own
        return places


def _cuts(eqn: Eqn, axis: int) -> set[int] | None:
    """Returns where the slices that an equation takes along an axis begin and end; None for another equation."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name == "slice" and {*(eqn.params["strides"] or (1,))} == {1}:
        cuts = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"])
        moved = [a for a, (n, lo, hi) in enumerate(cuts) if (lo, hi) != (0, n)]
        return {eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]} if moved == [axis] else None
    if name == "split" and eqn.params["axis"] == axis:
        return {int(end) for end in np.cumsum([0, *eqn.params["sizes"]])}
    return {*range(shape[axis] + 1)} if name == "unstack" and eqn.params["axis"] == axis else None


class _Step:
    """Evaluates a step whose carries are divided."""

    def __init__(self, loop: Loop, parts: Parts, reading: _Reading):
        self.loop, self.parts, self.reading = loop, parts, reading
        of_carry = {v: division for v, division in zip(loop.carry, parts.divisions) if not division.is_whole}
        self.division_of = {**of_carry, **reading.apart}

    def run(self, *args: Any) -> list[Any]:
        values_of_inputs, loop = iter(args), self.loop
        env: Env = {v: next(values_of_inputs) for v in loop.consts}
        apart: dict[Var, list[Any]] = {}
        for v, division in zip(loop.carry, self.parts.divisions):
            values = [next(values_of_inputs) for _ in range(division.parts)]
            if division.is_whole:
                env[v] = values[0]
            else:
                apart[v] = values
        env.update((v, next(values_of_inputs)) for v in loop.xs)
        for eqn in loop.eqns:
            with jaxprs.in_scope(eqn):
                self._evaluate(eqn, env, apart)
        new: list[Any] = []
        for out, division in zip(loop.carry_out, self.parts.divisions):
            new += [jaxprs.value(env, out)] if division.is_whole else self._parts(out, division, env, apart)
        return [*new, *(jnp.asarray(self._whole(y, env, apart), y.aval.dtype) for y in loop.ys)]

    def _evaluate(self, eqn: Eqn, env: Env, apart: dict[Var, list[Any]]) -> None:
        out, source = (atoms[0] if atoms else None for atoms in (eqn.outvars, eqn.invars))
        of_source = self.division_of[source] if jaxprs.is_in(source, apart) else None
        if out in self.reading.apart:
            division = self.reading.apart[out]
            if eqn.primitive.name in _JOINS:
                apart[out] = self._of_join(eqn, division, env, apart)
            else:
                each = zip(*(self._parts(a, division, env, apart) for a in eqn.invars))
                apart[out] = [jaxprs.bind(eqn, *operands)[0] for operands in each]
        elif of_source is not None and of_source.cuts and _cuts(eqn, of_source.axis) is not None:
            self._slice_parts(eqn, of_source, env, apart)
        elif of_source is not None and not of_source.cuts and eqn.primitive.name == "reshape":
            env[out] = apart[source][0]
        else:
            operands = [self._whole(a, env, apart) for a in eqn.invars]
            env.update(zip(eqn.outvars, jaxprs.bind(eqn, *operands)))

    def _of_join(self, eqn: Eqn, division: Division, env: Env, apart: dict[Var, list[Any]]) -> list[Any]:
        values = [self._whole(a, env, apart) for a in eqn.invars]
        if eqn.primitive.name == "stack":
            values = [jax.lax.expand_dims(v, [division.axis]) for v in values]
        parts, at = [], 0
        for value in values:
            end = at + value.shape[division.axis]
            inside = [(lo - at, hi - at) for lo, hi in division.bounds if at <= lo and hi <= end]
            parts += [_sliced(value, lo, hi, division.axis) for lo, hi in inside]
            at = end
        return parts

    def _slice_parts(self, eqn: Eqn, division: Division, env: Env, apart: dict[Var, list[Any]]) -> None:
        """Evaluates slices of a value that is divided."""
        parts, bounds = apart[eqn.invars[0]], division.bounds
        if eqn.primitive.name == "slice":
            ranges = [(eqn.params["start_indices"][division.axis], eqn.params["limit_indices"][division.axis])]
        else:
            sizes = eqn.params["sizes"] if eqn.primitive.name == "split" else [1] * len(eqn.outvars)
            ranges = list(pairwise([0, *map(int, np.cumsum(sizes))]))
        for v, (lo, hi) in zip(eqn.outvars, ranges):
            inside = [part for part, (first, end) in zip(parts, bounds) if lo <= first and end <= hi]
            value = jax.lax.concatenate(inside, division.axis) if len(inside) > 1 else inside[0]
            env[v] = jax.lax.squeeze(value, [division.axis]) if eqn.primitive.name == "unstack" else value

    def _parts(self, atom: Atom, division: Division, env: Env, apart: Mapping[Var, list[Any]]) -> list[Any]:
        """Returns the parts of a value."""
        if jaxprs.is_in(atom, apart):
            return apart[atom]
        value = jaxprs.read(env, atom)
        if not division.cuts:
            return [jax.lax.reshape(value, division.shape)]
        if len(atom.aval.shape) <= division.axis or atom.aval.shape[division.axis] == 1:
            return [value] * division.parts
        return [_sliced(value, lo, hi, division.axis) for lo, hi in division.bounds]

    def _whole(self, atom: Atom, env: Env, apart: Mapping[Var, list[Any]]) -> Any:
        return self.division_of[atom].together(apart[atom]) if jaxprs.is_in(atom, apart) else jaxprs.read(env, atom)


def _sliced(value: Any, lo: int, hi: int, axis: int) -> Any:
    return value if (lo, hi) == (0, value.shape[axis]) else jax.lax.slice_in_dim(value, lo, hi, axis=axis)
