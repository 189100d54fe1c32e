"""The pass that unpacks carries: a carry that is only read in slices, and written by joining arrays, becomes its parts.

The problem: steps often carry one array that holds several, such as `[2, N, H]` or `[N, 2H]` with the two states of an LSTM,
because a framework has one state, or because JAX's transposition joins their cotangents. Then everything depends on
everything: the loop cannot see that one part only adds up, XLA:CPU writes the joined array at each step, and copies slices
of it back out of it.

    carry [N, 2H] ---slice---> h [N, H] ---+                             carry h [N, H] ------+
              |                            |-- step --> h2, c2                                |-- step --> h2, c2
              +------slice---> c [N, H] ---+        |     |              carry c [N, H] ------+        |     |
                                                    v     v                                            v     v
    new carry [N, 2H] <------------- concatenate( h2    , c2 )           new carries                   h2    c2

A carry may be divided at the indices where slices begin and end, and where joined arrays meet (`Packing.cuts`). Between the
carry and its slices, and between the joined arrays and the new carry, elementwise equations may stand, such as a mask that
keeps the old state: these are computed part by part. So the pass asks three questions for each carry and axis:

1. Where may the new carry be divided? Forward over the step, each value gets a `_Division`: a join has the places where its
   arrays meet, an elementwise result its operands' places. Inputs and broadcasts may be divided anywhere. This is the same
   for all carries, and so computed once for an axis.
2. Is every reader of the carry a slice, or an elementwise equation whose result may be divided alike? (`_followers`)
3. Which joins and elementwise results make up the new carry? No other carry may pack one in another way. (`_joined_for`)

A carry that is always read in another shape, and written by a reshape, gets this shape: that is a packing without cuts.
Walks are loops that visit a value once, since steps have thousands of equations that read results several times.
What else reads a value that is computed in parts gets it joined again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values
from jrnn.loops.passes.gates import axis_slices
from jrnn.loops.passes.sums import added_to_carries

T = TypeVar("T")

_MAX_PARTS = 8  # a carry of more parts stays whole
_JOINS = {"concatenate": "dimension", "stack": "axis"}


@dataclass(frozen=True)
class Packing:
    """How a carry packs parts: its shape (`whole`), and the indices in `cuts` along an axis of `shape` where parts begin."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int = 0
    cuts: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.cuts) + 1

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The start and the end of each part; none for a value that is only reshaped."""
        if not self.cuts:
            return []
        return list(pairwise((0, *self.cuts, self.shape[self.axis])))

    @property
    def is_whole(self) -> bool:
        return not self.cuts and self.shape == self.whole

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part."""
        shapes = []
        for lo, hi in self.bounds:
            shapes.append(tuple(jaxprs.replaced(self.shape, [self.axis], [hi - lo])))
        return shapes or [self.shape]

    def unpack(self, value: Array) -> list[Array]:
        """Returns the parts of a value."""
        value = jnp.reshape(value, self.shape)
        parts = [jax.lax.slice_in_dim(value, lo, hi, axis=self.axis) for lo, hi in self.bounds]
        return parts or [value]

    def pack(self, parts: Sequence[Array]) -> Array:
        """Returns the value of parts, in its own shape."""
        value = jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0]
        return jnp.reshape(value, self.whole)


@dataclass(frozen=True)
class UnpackedCarries:
    """The carries of the rewritten loop are the parts of the carries of the original one."""

    packings: tuple[Packing, ...]

    def __call__(
        self,
        run: RunLoop,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        parts: list[Array] = []
        for packing, value in zip(self.packings, init):
            parts += packing.unpack(value)
        last, ys = run(consts, parts, xs, length)
        rest = iter(last)
        whole = [packing.pack([*islice(rest, packing.count)]) for packing in self.packings]
        return whole, list(ys)

    def map_inputs(
        self,
        consts: Sequence[T],
        carry: Sequence[T],
        xs: Sequence[T],
    ) -> list[Sequence[T]]:
        """Maps one value for each input of the original loop, such as its name, to one for each of the rewritten loop."""
        parts: list[T] = []
        for packing, value in zip(self.packings, carry):
            parts += [value] * packing.count
        return [consts, parts, xs]


def unpack_carries(loop: Loop) -> tuple[Loop, UnpackedCarries | None]:
    """Returns the loop with carries in other shapes and in parts, and how each is packed; None if none changes.

    Invariant: every value is unchanged.
    """
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs), effects=True)
    loop = loop if len(eqns) == len(loop.eqns) else replace(loop, eqns=tuple(eqns))
    uses = _CarryUses(loop)
    sums = added_to_carries(loop)  # which nothing reads
    packings: list[Packing] = []
    avals: list[Any] = []
    for i, v in enumerate(loop.carry):
        packing = Packing(v.aval.shape, v.aval.shape)
        if i not in sums:
            packing = uses.packing(v, loop.carry_out[i])
        packings.append(packing)
        if packing.is_whole:
            avals.append(v.aval)
        else:
            avals += [v.aval.update(shape=shape) for shape in packing.shapes]
    if all(packing.is_whole for packing in packings):
        return loop, None

    step = _UnpackedStep(loop, packings, uses.unpacked)
    input_avals = [*(v.aval for v in loop.consts), *avals, *(v.aval for v in loop.xs)]
    return loop.traced(step.run, input_avals, len(avals)), UnpackedCarries(tuple(packings))


@dataclass(frozen=True)
class _Division:
    """Where a value may be divided along an axis.

    Attributes:
        cuts: the indices where joined arrays meet; none for a value that may be divided anywhere.
        carry: the one carry that it is computed from, element by element.
    """

    cuts: frozenset[int] = frozenset()
    carry: Var | None = None


_ANYWHERE = _Division()
Divisions = Mapping[Var, _Division]  # a value that may not be divided has none


class _CarryUses:
    """What reads and writes the carries of a loop.

    Attributes:
        unpacked: values other than carries that are computed in parts, with their packings.
    """

    def __init__(self, loop: Loop):
        self.loop = loop
        self.readers = jaxprs.readers(loop.eqns)
        self.outputs = set(jaxprs.variables(loop.outputs))
        self.unpacked: dict[Var, Packing] = {}
        self._divisions: dict[int, Divisions] = {}
        self._joined_axes = {_join_axis(eqn) for eqn in loop.eqns} - {None}

    def packing(self, v: Var, out: Atom) -> Packing:
        """Returns the packing of a carry, whose new value is `out`."""
        shape = v.aval.shape
        whole = Packing(shape, shape)
        is_shaped = shape and all(map(jaxprs.is_known, shape))
        if not is_shaped or not jaxprs.is_in(out, self.loop.producers):
            return whole

        # Only reshapes read and write it.
        last = self.loop.producers[out]
        reads = self.readers.get(v, ())
        if reads and {eqn.primitive.name for eqn in (last, *reads)} == {"reshape"}:
            shapes = {eqn.outvars[0].aval.shape for eqn in reads}
            shapes.add(last.invars[0].aval.shape)
            return Packing(shape, *shapes) if len(shapes) == 1 and v not in self.outputs else whole
        for axis in sorted(self._joined_axes):
            packing = self._packing_along(v, out, axis) if axis < len(shape) else None
            if packing is not None:
                return packing
        return whole

    def _packing_along(
        self,
        v: Var,
        out: Var,
        axis: int,
    ) -> Packing | None:
        """Returns the packing of a carry along an axis, or None if it has to stay whole."""
        divisions = self._divisions_along(axis)
        division = divisions.get(out)
        if division is None or not division.cuts or division.carry not in (None, v):
            return None
        followers = self._followers(v, axis, divisions)
        if followers is None:
            return None

        cuts, values = followers
        shape = v.aval.shape
        inner = (division.cuts | cuts) - {0, shape[axis]}
        packing = Packing(shape, shape, axis, tuple(sorted(inner)))
        if not 1 < packing.count <= _MAX_PARTS:
            return None

        joined = self._joined_for(out, packing)
        if joined is None:
            return None
        self.unpacked.update(dict.fromkeys([*joined, *values], packing))
        return packing

    def _divisions_along(self, axis: int) -> Divisions:
        """Returns the divisions of all values along an axis, which are the same for all carries."""
        if axis not in self._divisions:
            divisions = dict.fromkeys((*self.loop.consts, *self.loop.xs), _ANYWHERE)
            divisions.update((v, _Division(carry=v)) for v in self.loop.carry)
            for eqn in self.loop.eqns:
                division = _division_of_result(eqn, axis, divisions)
                if division is not None:
                    divisions[eqn.outvars[0]] = division
            self._divisions[axis] = divisions
        return self._divisions[axis]

    def _followers(
        self,
        carry: Var,
        axis: int,
        divisions: Divisions,
    ) -> tuple[set[int], set[Var]] | None:
        """Follows a carry through elementwise equations to the slices that read it.

        Returns where these slices begin and end, and the results of the elementwise equations; None if something else reads
        one of the values.
        """
        cuts: set[int] = set()
        followers: set[Var] = set()
        pending = [carry]
        while pending:
            for eqn in self.readers.get(pending.pop(), ()):
                ranges = _ranges(eqn, axis)
                for bounds in ranges:
                    cuts.update(bounds)
                if ranges:
                    continue
                out = eqn.outvars[0]
                division = divisions.get(out)
                if not primitives.is_kind(eqn, "elementwise") or division is None:
                    return None
                if division.carry is not carry:
                    return None
                if out not in followers:
                    followers.add(out)
                    pending.append(out)
        return cuts, followers

    def _joined_for(self, out: Var, packing: Packing) -> set[Var] | None:
        """Returns the joins, and the elementwise results, from which a new carry is computed.

        None if one of them is packed in another way for another carry.
        """
        values: set[Var] = set()
        pending: list[Atom] = [out]
        while pending:
            atom = pending.pop()
            if not jaxprs.is_in(atom, self.loop.producers) or not atom.aval.shape or atom in values:
                continue
            eqn = self.loop.producers[atom]
            if eqn.primitive.name == "broadcast_in_dim":
                continue
            other = self.unpacked.get(atom)
            if other is None:
                values.add(atom)
                if _join_axis(eqn) is None:
                    pending += eqn.invars
            elif other != packing:
                return None
        return values


def _join_axis(eqn: Eqn) -> int | None:
    """Returns the axis along which an equation joins arrays, or None."""
    name = _JOINS.get(eqn.primitive.name)
    return None if name is None else int(eqn.params[name])


def _division_of_result(
    eqn: Eqn,
    axis: int,
    divisions: Divisions,
) -> _Division | None:
    """Returns where the result of an equation may be divided along an axis, or None."""
    if eqn.primitive.name == "broadcast_in_dim":
        return _ANYWHERE
    join_axis = _join_axis(eqn)
    if join_axis is not None:
        return _Division(_ends_of_joined(eqn, axis)) if join_axis == axis else None
    if not primitives.is_kind(eqn, "elementwise") or len(eqn.outvars) > 1:
        return None

    cuts: frozenset[int] = frozenset()
    carries: set[Var | None] = {None}
    for v in jaxprs.inputs(eqn):
        division = divisions.get(v) if v.aval.shape else _ANYWHERE
        if division is None:
            return None
        carries.add(division.carry)
        cuts |= division.cuts
    if len(carries) > 2:
        return None
    carry = next(filter(None, carries), None)
    return _Division(_bounded(cuts), carry)


def _ends_of_joined(eqn: Eqn, axis: int) -> frozenset[int]:
    """Returns the indices where joined arrays meet. None is returned for axes of symbolic sizes."""
    sizes = [1] * len(eqn.invars)
    if eqn.primitive.name == "concatenate":
        sizes = [a.aval.shape[axis] for a in eqn.invars]
    if not all(map(jaxprs.is_known, sizes)):
        return frozenset()
    return _bounded(np.cumsum(sizes[:-1]).tolist())


def _bounded(cuts: Iterable[int]) -> frozenset[int]:
    """Returns the first of many cuts: a carry of more than `_MAX_PARTS` parts stays whole."""
    return frozenset(sorted(cuts)[:_MAX_PARTS])


def _ranges(eqn: Eqn, axis: int) -> list[tuple[int, int]]:
    """Returns the range of each slice that an equation takes along an axis; nothing for another equation."""
    if eqn.primitive.name == "unstack" and eqn.params["axis"] == axis:
        return [(i, i + 1) for i in range(len(eqn.outvars))]
    slices = axis_slices([eqn]).values()
    return [(cut.lo, cut.hi) for cut in slices if cut.axis == axis]


class _UnpackedStep:
    """Evaluates a step, of whose values some are known and computed in parts.

    Args:
        loop: the loop with the step.
        packings: of its carries.
        unpacked: of the other values that are computed in parts.
    """

    def __init__(
        self,
        loop: Loop,
        packings: Sequence[Packing],
        unpacked: Mapping[Var, Packing],
    ):
        self.loop = loop
        self.packings = packings
        self.packing_of = {**dict(zip(loop.carry, packings)), **unpacked}
        self.unpacked = unpacked
        self._env: Env = {}
        self._parts: dict[Var, list[Array]] = {}

    def run(self, *args: Array) -> list[Array]:
        loop = self.loop
        values = iter(args)
        self._env.update(zip(loop.consts, values))
        for v, packing in zip(loop.carry, self.packings):
            parts = [*islice(values, packing.count)]
            if packing.is_whole:
                self._env[v] = parts[0]
            else:
                self._parts[v] = parts
        self._env.update(zip(loop.xs, values))
        for eqn in loop.eqns:
            with jaxprs.in_scope(eqn):
                self._evaluate(eqn)
        results: list[Array] = []
        for out, packing in zip(loop.carry_out, self.packings):
            if packing.is_whole:
                results.append(self._whole_array(out))
            else:
                results += self._parts_of(out, packing)
        return [*results, *map(self._whole_array, loop.ys)]

    def _evaluate(self, eqn: Eqn) -> None:
        """Evaluates an equation: in parts, on parts, or on whole values."""
        out = eqn.outvars[0] if eqn.outvars else None
        if out in self.unpacked:
            self._parts[out] = self._computed(eqn, self.unpacked[out])
            return
        if eqn.invars and jaxprs.is_in(eqn.invars[0], self._parts):
            packing = self.packing_of[eqn.invars[0]]
            parts = self._parts[eqn.invars[0]]
            ranges = _ranges(eqn, packing.axis) if packing.cuts else []
            for v, (lo, hi) in zip(eqn.outvars, ranges):
                self._env[v] = _sliced_parts(
                    eqn,
                    parts,
                    packing,
                    lo,
                    hi,
                )
            if ranges:
                return
            if not packing.cuts:  # a reshape
                self._env[out] = parts[0]
                return
        operands = map(self._whole, eqn.invars)
        self._env.update(zip(eqn.outvars, jaxprs.bind(eqn, *operands)))

    def _computed(self, eqn: Eqn, packing: Packing) -> list[Array]:
        """Evaluates a join, or an elementwise equation part by part."""
        if _join_axis(eqn) is None:
            operands = [self._parts_of(a, packing) for a in eqn.invars]
            return [jaxprs.bind(eqn, *of_part)[0] for of_part in zip(*operands)]
        values = [*map(self._whole, eqn.invars)]
        if eqn.primitive.name == "stack":
            values = [jax.lax.expand_dims(v, [packing.axis]) for v in values]
        parts = []
        at = 0
        for value in values:  # which is one part, or several
            end = at + value.shape[packing.axis]
            for lo, hi in packing.bounds:
                if at <= lo and hi <= end:
                    parts.append(_sliced(value, lo - at, hi - at, packing.axis))
            at = end
        return parts

    def _parts_of(self, atom: Atom, packing: Packing) -> list[Array]:
        """Returns the parts of a value."""
        if jaxprs.is_in(atom, self._parts):
            return self._parts[atom]
        value = jaxprs.read(self._env, atom)
        axis = packing.axis
        if packing.cuts and (atom.aval.ndim <= axis or atom.aval.shape[axis] == 1):
            return [value] * packing.count
        return packing.unpack(value)

    def _whole(self, atom: Atom) -> Any:
        """Returns a value, packed if it is computed in parts; a literal stays a number."""
        if jaxprs.is_in(atom, self._parts):
            return self.packing_of[atom].pack(self._parts[atom])
        return jaxprs.read(self._env, atom)

    def _whole_array(self, atom: Atom) -> Array:
        return jnp.asarray(self._whole(atom), atom.aval.dtype)


def _sliced_parts(
    eqn: Eqn,
    parts: Sequence[Array],
    packing: Packing,
    lo: int,
    hi: int,
) -> Array:
    """Returns a slice of a value whose parts are known."""
    inside = []
    for part, (first, end) in zip(parts, packing.bounds):
        if lo <= first and end <= hi:
            inside.append(part)
    value = jax.lax.concatenate(inside, packing.axis) if len(inside) > 1 else inside[0]
    return jax.lax.squeeze(value, [packing.axis]) if eqn.primitive.name == "unstack" else value


def _sliced(
    value: Array,
    lo: int,
    hi: int,
    axis: int,
) -> Array:
    """Returns a part of an array, without an equation if it is the whole one."""
    if (lo, hi) == (0, value.shape[axis]):
        return value
    return jax.lax.slice_in_dim(value, lo, hi, axis=axis)
