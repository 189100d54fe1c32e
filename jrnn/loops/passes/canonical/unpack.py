"""The stage that unpacks carries: a carry that is only read in slices, and written by joining arrays.

Such are `[2, N, H]` and `[N, 2H]` with the two states of an LSTM, and their cotangents. A carry that is always read in
another shape gets this shape.
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
from jrnn.loops.ir import Loop, Results, RunLoop
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
        if not self.cuts:
            return [self.shape]
        sizes = [hi - lo for lo, hi in self.bounds]
        return [tuple(jaxprs.replaced(self.shape, [self.axis], [size])) for size in sizes]

    def unpack(self, value: Array) -> list[Array]:
        value = jnp.reshape(value, self.shape)
        if not self.cuts:
            return [value]
        return [jax.lax.slice_in_dim(value, lo, hi, axis=self.axis) for lo, hi in self.bounds]

    def pack(self, parts: Sequence[Array]) -> Array:
        value = jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0]
        return jnp.reshape(value, self.whole)


@dataclass(frozen=True)
class UnpackedCarries:
    """The carries of the rewritten loop are the parts of the carries of the original one."""

    packings: tuple[Packing, ...]

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Array],
        init: Sequence[Array],
        xs: Sequence[Array],
        length: int | Array,
    ) -> Results:
        parts: list[Array] = []
        for packing, value in zip(self.packings, init):
            parts += packing.unpack(value)
        last, ys = run(consts, parts, xs, length)
        rest = iter(last)
        whole = [packing.pack([*islice(rest, packing.count)]) for packing in self.packings]
        return whole, list(ys)

    def map_inputs(
        self, consts: Sequence[T], carry: Sequence[T], xs: Sequence[T]
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
    readers: dict[Var, list[Eqn]] = {}
    for eqn in loop.eqns:
        for v in jaxprs.inputs(eqn):
            readers.setdefault(v, []).append(eqn)
    uses = _CarryUses(loop, readers)
    sums = added_to_carries(loop)  # which nothing reads
    packings: list[Packing] = []
    for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out)):
        whole = Packing(v.aval.shape, v.aval.shape)
        packings.append(whole if i in sums else uses.packing(v, out))
    if all(packing.is_whole for packing in packings):
        return loop, None

    carries = UnpackedCarries(tuple(packings))
    avals = []
    for v, packing in zip(loop.carry, packings):
        if packing.is_whole:
            avals.append(v.aval)
        else:
            avals += [v.aval.update(shape=shape) for shape in packing.shapes]
    input_avals = [*(v.aval for v in loop.consts), *avals, *(v.aval for v in loop.xs)]
    step = _UnpackedStep(loop, carries, uses)
    return loop.traced(step.run, input_avals, len(avals)), carries


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

    Each walk over values is a loop and visits a value once: steps have thousands of equations that
    read each other's results several times.

    Attributes:
        unpacked: values other than carries that are computed in parts, with their packings.
    """

    def __init__(self, loop: Loop, readers: Mapping[Var, Sequence[Eqn]]):
        self.loop = loop
        self.readers = readers
        self.producers = jaxprs.producers(loop.eqns)
        self.outputs = set(jaxprs.variables(loop.outputs))
        self.unpacked: dict[Var, Packing] = {}
        self._divisions: dict[int, Divisions] = {}
        joins = [eqn for eqn in loop.eqns if eqn.primitive.name in _JOINS]
        self._joined_axes = {eqn.params[_JOINS[eqn.primitive.name]] for eqn in joins}

    def packing(self, v: Var, out: Atom) -> Packing:
        """Returns the packing of a carry, whose new value is `out`."""
        shape = v.aval.shape
        whole = Packing(shape, shape)
        if not shape or not jaxprs.is_in(out, self.producers):
            return whole
        if not all(map(jaxprs.is_known, shape)):
            return whole

        # Only reshapes read and write it.
        last = self.producers[out]
        reads = self.readers.get(v, ())
        if reads and {e.primitive.name for e in (last, *reads)} == {"reshape"}:
            shapes = {e.outvars[0].aval.shape for e in reads}
            shapes.add(last.invars[0].aval.shape)
            return Packing(shape, *shapes) if len(shapes) == 1 and v not in self.outputs else whole
        for axis in sorted(self._joined_axes):
            packing = self._packing_along(v, out, axis) if axis < len(shape) else None
            if packing is not None:
                return packing
        return whole

    def _packing_along(self, v: Var, out: Var, axis: int) -> Packing | None:
        """Returns the packing of a carry along an axis, or None if it has to stay whole."""
        divisions = self._divisions_along(axis)
        division = divisions.get(out)
        if division is None or not division.cuts or division.carry not in (None, v):
            return None
        computed = self._computed_from(v, axis, divisions)
        if computed is None:
            return None

        cuts, followers = computed
        shape = v.aval.shape
        inner = (division.cuts | cuts) - {0, shape[axis]}
        packing = Packing(shape, shape, axis, tuple(sorted(inner)))
        if not 1 < packing.count <= _MAX_PARTS:
            return None

        values = self._joined_for(out, packing)
        if values is None:
            return None
        self.unpacked.update(dict.fromkeys([*values, *followers], packing))
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

    def _computed_from(
        self, carry: Var, axis: int, divisions: Divisions
    ) -> tuple[set[int], dict[Var, None]] | None:
        """Follows a carry through elementwise equations to the slices that read it.

        Returns:
            The indices where these slices begin and end, and the results of the elementwise
            equations; None if something else reads one of the values.
        """
        cuts: set[int] = set()
        followers: dict[Var, None] = {}
        pending = [carry]
        while pending:
            for eqn in self.readers.get(pending.pop(), ()):
                bounds = _slice_bounds(eqn, axis)
                if bounds is not None:
                    cuts |= bounds
                    continue
                out = eqn.outvars[0]
                division = divisions.get(out)
                if not primitives.is_kind(eqn, "elementwise") or division is None:
                    return None
                if division.carry is not carry:
                    return None
                if out not in followers:
                    followers[out] = None
                    pending.append(out)
        return cuts, followers

    def _joined_for(self, out: Var, packing: Packing) -> dict[Var, None] | None:
        """Returns the joins, and the elementwise results, from which a new carry is computed.

        None if one of them is packed in another way for another carry.
        """
        values: dict[Var, None] = {}
        pending: list[Atom] = [out]
        while pending:
            atom = pending.pop()
            eqn = None if jaxprs.is_literal(atom) else self.producers.get(atom)
            if eqn is None or not atom.aval.shape or atom in values:
                continue
            if eqn.primitive.name == "broadcast_in_dim":
                continue
            other = self.unpacked.get(atom)
            if other is not None and other != packing:
                return None
            if other is None:
                values[atom] = None
                pending += () if eqn.primitive.name in _JOINS else eqn.invars
        return values


def _division_of_result(eqn: Eqn, axis: int, divisions: Divisions) -> _Division | None:
    """Returns where the result of an equation may be divided along an axis, or None."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return _ANYWHERE
    if name in _JOINS:
        return _Division(_ends_of_joined(eqn, axis)) if eqn.params[_JOINS[name]] == axis else None
    if not primitives.is_kind(eqn, "elementwise") or len(eqn.outvars) > 1:
        return None

    cuts: frozenset[int] = frozenset()
    carry = None
    for atom in eqn.invars:
        if jaxprs.is_literal(atom) or not atom.aval.shape:
            continue
        division = divisions.get(atom)
        if division is None:
            return None
        if division.carry is not None:
            if carry not in (None, division.carry):
                return None
            carry = division.carry
        cuts |= division.cuts
    return _Division(_bounded(cuts), carry)


def _ends_of_joined(eqn: Eqn, axis: int) -> frozenset[int]:
    """Returns the indices where joined arrays meet. None is returned for axes of symbolic sizes."""
    if eqn.primitive.name == "stack":
        return _bounded(range(1, len(eqn.invars)))
    sizes = [a.aval.shape[axis] for a in eqn.invars]
    if not all(map(jaxprs.is_known, sizes)):
        return frozenset()
    return _bounded(int(end) for end in np.cumsum(sizes[:-1]))


def _bounded(cuts: Iterable[int]) -> frozenset[int]:
    """Returns the first of many cuts: a carry of more than `_MAX_PARTS` parts stays whole."""
    return frozenset(sorted(cuts)[:_MAX_PARTS])


def _slice_bounds(eqn: Eqn, axis: int) -> set[int] | None:
    """Returns where the slices that an equation takes along an axis begin and end; None for another equation."""
    name = eqn.primitive.name
    shape = eqn.invars[0].aval.shape
    if name == "slice" and {*(eqn.params["strides"] or (1,))} == {1}:
        cuts = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"])
        moved = [a for a, (n, lo, hi) in enumerate(cuts) if (lo, hi) != (0, n)]
        if moved != [axis]:
            return None
        return {eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]}
    if name == "split" and eqn.params["axis"] == axis:
        return {int(end) for end in np.cumsum([0, *eqn.params["sizes"]])}
    if name == "unstack" and eqn.params["axis"] == axis:
        return {*range(shape[axis] + 1)}
    return None


class _UnpackedStep:
    """Evaluates a step whose carries are unpacked."""

    def __init__(self, loop: Loop, carries: UnpackedCarries, uses: _CarryUses):
        self.loop = loop
        self.carries = carries
        self.uses = uses
        self.packing_of = {**dict(zip(loop.carry, carries.packings)), **uses.unpacked}

    def run(self, *args: Array) -> list[Array]:
        values_of_inputs = iter(args)
        loop = self.loop
        env: Env = {v: next(values_of_inputs) for v in loop.consts}
        parts_of: dict[Var, list[Array]] = {}
        for v, packing in zip(loop.carry, self.carries.packings):
            values = [*islice(values_of_inputs, packing.count)]
            if packing.is_whole:
                env[v] = values[0]
            else:
                parts_of[v] = values
        env.update(zip(loop.xs, values_of_inputs))
        for eqn in loop.eqns:
            with jaxprs.in_scope(eqn):
                self._evaluate(eqn, env, parts_of)
        results: list[Array] = []
        for out, packing in zip(loop.carry_out, self.carries.packings):
            if packing.is_whole:
                results.append(self._whole_array(out, env, parts_of))
            else:
                results += self._parts(out, packing, env, parts_of)
        return results + [self._whole_array(y, env, parts_of) for y in loop.ys]

    def _evaluate(self, eqn: Eqn, env: Env, parts_of: dict[Var, list[Array]]) -> None:
        out = eqn.outvars[0] if eqn.outvars else None
        source = eqn.invars[0] if eqn.invars else None
        packing = self.packing_of[source] if jaxprs.is_in(source, parts_of) else None
        if out in self.uses.unpacked:
            parts_of[out] = self._parts_of_result(eqn, self.uses.unpacked[out], env, parts_of)
        elif packing is not None and packing.cuts and _slice_bounds(eqn, packing.axis) is not None:
            self._slice_parts(eqn, packing, env, parts_of)
        elif packing is not None and not packing.cuts and eqn.primitive.name == "reshape":
            env[out] = parts_of[source][0]
        else:
            operands = [self._whole(a, env, parts_of) for a in eqn.invars]
            env.update(zip(eqn.outvars, jaxprs.bind(eqn, *operands)))

    def _parts_of_result(
        self, eqn: Eqn, packing: Packing, env: Env, parts_of: dict[Var, list[Array]]
    ) -> list[Array]:
        """Evaluates a join, or an elementwise equation part by part."""
        if eqn.primitive.name in _JOINS:
            return self._of_join(eqn, packing, env, parts_of)
        operands = [self._parts(a, packing, env, parts_of) for a in eqn.invars]
        return [jaxprs.bind(eqn, *of_part)[0] for of_part in zip(*operands)]

    def _of_join(
        self, eqn: Eqn, packing: Packing, env: Env, parts_of: dict[Var, list[Array]]
    ) -> list[Array]:
        """Returns the parts of joined arrays, each of which has one or several of them."""
        values = [self._whole(a, env, parts_of) for a in eqn.invars]
        if eqn.primitive.name == "stack":
            values = [jax.lax.expand_dims(v, [packing.axis]) for v in values]
        parts = []
        at = 0
        for value in values:
            end = at + value.shape[packing.axis]
            for lo, hi in packing.bounds:
                if at <= lo and hi <= end:
                    parts.append(_sliced(value, lo - at, hi - at, packing.axis))
            at = end
        return parts

    def _slice_parts(
        self, eqn: Eqn, packing: Packing, env: Env, parts_of: dict[Var, list[Array]]
    ) -> None:
        """Evaluates slices of a value whose parts are known."""
        parts = parts_of[eqn.invars[0]]
        axis = packing.axis
        if eqn.primitive.name == "slice":
            ranges = [(eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis])]
        else:
            sizes = eqn.params["sizes"] if eqn.primitive.name == "split" else [1] * len(eqn.outvars)
            ranges = list(pairwise([0, *map(int, np.cumsum(sizes))]))
        for v, (lo, hi) in zip(eqn.outvars, ranges):
            inside = []
            for part, (first, end) in zip(parts, packing.bounds):
                if lo <= first and end <= hi:
                    inside.append(part)
            value = jax.lax.concatenate(inside, axis) if len(inside) > 1 else inside[0]
            if eqn.primitive.name == "unstack":
                value = jax.lax.squeeze(value, [axis])
            env[v] = value

    def _parts(
        self, atom: Atom, packing: Packing, env: Env, parts_of: Mapping[Var, list[Array]]
    ) -> list[Array]:
        """Returns the parts of a value."""
        if jaxprs.is_in(atom, parts_of):
            return parts_of[atom]
        value = jaxprs.read(env, atom)
        if not packing.cuts:
            return [jax.lax.reshape(value, packing.shape)]
        if len(atom.aval.shape) <= packing.axis or atom.aval.shape[packing.axis] == 1:
            return [value] * packing.count
        return [_sliced(value, lo, hi, packing.axis) for lo, hi in packing.bounds]

    def _whole(self, atom: Atom, env: Env, parts_of: Mapping[Var, list[Array]]) -> Any:
        """Returns a value, packed if it is computed in parts; a literal stays a number."""
        if jaxprs.is_in(atom, parts_of):
            return self.packing_of[atom].pack(parts_of[atom])
        return jaxprs.read(env, atom)

    def _whole_array(self, atom: Atom, env: Env, parts_of: Mapping[Var, list[Array]]) -> Array:
        return jnp.asarray(self._whole(atom, env, parts_of), atom.aval.dtype)


def _sliced(value: Array, lo: int, hi: int, axis: int) -> Array:
    """Returns a part of an array, without an equation if it is the whole one."""
    if (lo, hi) == (0, value.shape[axis]):
        return value
    return jax.lax.slice_in_dim(value, lo, hi, axis=axis)
