"""The stage that unpacks carries: a carry that is only read in slices, and written by joining arrays.

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
        """The start and the end of each part."""
        return list(pairwise((0, *self.cuts, self.shape[self.axis]))) if self.cuts else []

    @property
    def is_whole(self) -> bool:
        return not self.cuts and self.shape == self.whole

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part."""
        return [
            tuple(jaxprs.replaced(self.shape, [self.axis], [hi - lo])) for lo, hi in self.bounds
        ] or [self.shape]

    def unpack(self, value: Any) -> list[Any]:
        value = jnp.reshape(value, self.shape)
        return [jax.lax.slice_in_dim(value, lo, hi, axis=self.axis) for lo, hi in self.bounds] or [
            value
        ]

    def pack(self, parts: Sequence[Any]) -> Any:
        return jnp.reshape(
            jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0], self.whole
        )


@dataclass(frozen=True)
class UnpackedCarries:
    """The carries of the rewritten loop are the parts of those of the original one."""

    packings: tuple[Packing, ...]

    def around(
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        parts = [
            part for packing, value in zip(self.packings, init) for part in packing.unpack(value)
        ]
        last, ys = run(consts, parts, xs, length)
        leaves = iter(last)
        whole = [
            packing.pack([next(leaves) for _ in range(packing.count)]) for packing in self.packings
        ]
        return whole, list(ys)

    def map_inputs(
        self, consts: Sequence[T], carry: Sequence[T], xs: Sequence[T]
    ) -> list[Sequence[T]]:
        """Maps one value for each input of the original loop, such as its name, to one for each of the rewritten loop."""
        return [
            consts,
            [value for packing, value in zip(self.packings, carry) for _ in range(packing.count)],
            xs,
        ]


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
    carries = UnpackedCarries(
        tuple(
            Packing(v.aval.shape, v.aval.shape) if i in sums else uses.packing(v, out)
            for i, (v, out) in enumerate(zip(loop.carry, loop.carry_out))
        )
    )
    if all(packing.is_whole for packing in carries.packings):
        return loop, None
    step = _UnpackedStep(loop, carries, uses)
    types = [
        (v.aval, packing, shape)
        for v, packing in zip(loop.carry, carries.packings)
        for shape in packing.shapes
    ]
    avals = [
        aval if packing.is_whole else aval.update(shape=shape) for aval, packing, shape in types
    ]
    input_avals = [*(v.aval for v in loop.consts), *avals, *(v.aval for v in loop.xs)]
    return loop.traced(step.run, input_avals, len(avals)), carries


class _CarryUses:
    """What reads and writes the carries of a loop.

    Attributes:
        unpacked: values other than carries that are computed in parts, with their packings.
    """

    def __init__(self, loop: Loop, readers: Mapping[Var, Sequence[Eqn]]):
        self.loop = loop
        self.readers = readers
        self.producers = jaxprs.producers(loop.eqns)
        self.inputs = {*loop.consts, *loop.xs}
        self.unpacked: dict[Var, Packing] = {}

    def packing(self, v: Var, out: Atom) -> Packing:
        """Returns the packing of a carry, whose new value is `out`."""
        shape = v.aval.shape
        whole = Packing(shape, shape)
        last = None if jaxprs.is_literal(out) else self.producers.get(out)
        if not shape or last is None or not all(map(jaxprs.is_known, shape)):
            return whole
        reads = self.readers.get(v, ())
        if (
            last.primitive.name == "reshape"
            and reads
            and all(e.primitive.name == "reshape" for e in reads)
        ):
            shapes = {e.outvars[0].aval.shape for e in reads} | {last.invars[0].aval.shape}
            outside = v in self.loop.carry_out or v in self.loop.ys
            return Packing(shape, *shapes) if len(shapes) == 1 and not outside else whole
        for axis in range(len(shape)):
            chain: dict[Var, None] = {}
            joined = self._join_positions(out, v, axis, chain)
            cuts = None if not joined else self._slice_positions(v, v, axis, chain)
            if cuts is None:
                continue
            packing = Packing(shape, shape, axis, tuple(sorted((joined | cuts) - {0, shape[axis]})))
            if 1 < packing.count <= _MOST_PARTS:
                self.unpacked.update(dict.fromkeys(chain, packing))
                return packing
        return whole

    def _join_positions(
        self, atom: Atom, carry: Var, axis: int, chain: dict[Var, None]
    ) -> set[int] | None:
        """Returns the indices where a value is joined along an axis: none if it can be sliced anywhere, None if nowhere."""
        if jaxprs.is_literal(atom) or atom is carry or atom in self.inputs or not atom.aval.shape:
            return set()
        eqn = self.producers.get(atom)
        name = None if eqn is None else eqn.primitive.name
        if eqn is None or name == "broadcast_in_dim":
            return set() if eqn is not None else None
        if name in _JOINS:
            if eqn.params[_JOINS[name]] != axis:
                return None
            sizes = (
                [1] * len(eqn.invars)
                if name == "stack"
                else [a.aval.shape[axis] for a in eqn.invars]
            )
            chain[atom] = None
            return {int(end) for end in np.cumsum([0, *sizes])}
        if not primitives.is_kind(eqn, "elementwise"):
            return None
        places: set[int] = set()
        for a in eqn.invars:
            of = self._join_positions(a, carry, axis, chain)
            if of is None:
                return None
            places |= of
        chain[atom] = None
        return places

    def _slice_positions(
        self, v: Var, carry: Var, axis: int, chain: dict[Var, None]
    ) -> set[int] | None:
        """Returns the indices where slices of a value begin and end, or None if something else reads it."""
        places: set[int] = set()
        for eqn in self.readers.get(v, ()):
            own = _slice_bounds(eqn, axis)
            if own is None and primitives.is_kind(eqn, "elementwise"):
                out = eqn.outvars[0]
                rest = [a for a in eqn.invars if a is not v]
                if out not in chain and any(
                    self._join_positions(a, carry, axis, {}) is None for a in rest
                ):
                    return None
                own = self._slice_positions(out, carry, axis, chain)
                chain[out] = None
            if own is None:
                return None
            places |= own
        return places


def _slice_bounds(eqn: Eqn, axis: int) -> set[int] | None:
    """Returns where the slices that an equation takes along an axis begin and end; None for another equation."""
    name = eqn.primitive.name
    shape = eqn.invars[0].aval.shape
    if name == "slice" and {*(eqn.params["strides"] or (1,))} == {1}:
        cuts = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"])
        moved = [a for a, (n, lo, hi) in enumerate(cuts) if (lo, hi) != (0, n)]
        return (
            {eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]}
            if moved == [axis]
            else None
        )
    if name == "split" and eqn.params["axis"] == axis:
        return {int(end) for end in np.cumsum([0, *eqn.params["sizes"]])}
    return {*range(shape[axis] + 1)} if name == "unstack" and eqn.params["axis"] == axis else None


class _UnpackedStep:
    """Evaluates a step whose carries are unpacked."""

    def __init__(self, loop: Loop, carries: UnpackedCarries, uses: _CarryUses):
        self.loop = loop
        self.carries = carries
        self.uses = uses
        of_carry = {
            v: packing for v, packing in zip(loop.carry, carries.packings) if not packing.is_whole
        }
        self.packing_of = {**of_carry, **uses.unpacked}

    def run(self, *args: Any) -> list[Any]:
        values_of_inputs = iter(args)
        loop = self.loop
        env: Env = {v: next(values_of_inputs) for v in loop.consts}
        parts_of: dict[Var, list[Any]] = {}
        for v, packing in zip(loop.carry, self.carries.packings):
            values = [next(values_of_inputs) for _ in range(packing.count)]
            if packing.is_whole:
                env[v] = values[0]
            else:
                parts_of[v] = values
        env.update((v, next(values_of_inputs)) for v in loop.xs)
        for eqn in loop.eqns:
            with jaxprs.in_scope(eqn):
                self._evaluate(eqn, env, parts_of)
        new: list[Any] = []
        for out, packing in zip(loop.carry_out, self.carries.packings):
            new += (
                [jaxprs.value(env, out)]
                if packing.is_whole
                else self._parts(out, packing, env, parts_of)
            )
        return [*new, *(jnp.asarray(self._whole(y, env, parts_of), y.aval.dtype) for y in loop.ys)]

    def _evaluate(self, eqn: Eqn, env: Env, parts_of: dict[Var, list[Any]]) -> None:
        out, source = (atoms[0] if atoms else None for atoms in (eqn.outvars, eqn.invars))
        of_source = self.packing_of[source] if jaxprs.is_in(source, parts_of) else None
        if out in self.uses.unpacked:
            packing = self.uses.unpacked[out]
            if eqn.primitive.name in _JOINS:
                parts_of[out] = self._of_join(eqn, packing, env, parts_of)
            else:
                each = zip(*(self._parts(a, packing, env, parts_of) for a in eqn.invars))
                parts_of[out] = [jaxprs.bind(eqn, *operands)[0] for operands in each]
        elif (
            of_source is not None
            and of_source.cuts
            and _slice_bounds(eqn, of_source.axis) is not None
        ):
            self._slice_parts(eqn, of_source, env, parts_of)
        elif of_source is not None and not of_source.cuts and eqn.primitive.name == "reshape":
            env[out] = parts_of[source][0]
        else:
            operands = [self._whole(a, env, parts_of) for a in eqn.invars]
            env.update(zip(eqn.outvars, jaxprs.bind(eqn, *operands)))

    def _of_join(
        self, eqn: Eqn, packing: Packing, env: Env, parts_of: dict[Var, list[Any]]
    ) -> list[Any]:
        values = [self._whole(a, env, parts_of) for a in eqn.invars]
        if eqn.primitive.name == "stack":
            values = [jax.lax.expand_dims(v, [packing.axis]) for v in values]
        parts = []
        at = 0
        for value in values:
            end = at + value.shape[packing.axis]
            inside = [(lo - at, hi - at) for lo, hi in packing.bounds if at <= lo and hi <= end]
            parts += [_sliced(value, lo, hi, packing.axis) for lo, hi in inside]
            at = end
        return parts

    def _slice_parts(
        self, eqn: Eqn, packing: Packing, env: Env, parts_of: dict[Var, list[Any]]
    ) -> None:
        """Evaluates slices of a value whose parts are known."""
        parts = parts_of[eqn.invars[0]]
        bounds = packing.bounds
        if eqn.primitive.name == "slice":
            ranges = [
                (
                    eqn.params["start_indices"][packing.axis],
                    eqn.params["limit_indices"][packing.axis],
                )
            ]
        else:
            sizes = eqn.params["sizes"] if eqn.primitive.name == "split" else [1] * len(eqn.outvars)
            ranges = list(pairwise([0, *map(int, np.cumsum(sizes))]))
        for v, (lo, hi) in zip(eqn.outvars, ranges):
            inside = [
                part for part, (first, end) in zip(parts, bounds) if lo <= first and end <= hi
            ]
            value = jax.lax.concatenate(inside, packing.axis) if len(inside) > 1 else inside[0]
            env[v] = (
                jax.lax.squeeze(value, [packing.axis]) if eqn.primitive.name == "unstack" else value
            )

    def _parts(
        self, atom: Atom, packing: Packing, env: Env, parts_of: Mapping[Var, list[Any]]
    ) -> list[Any]:
        """Returns the parts of a value."""
        if jaxprs.is_in(atom, parts_of):
            return parts_of[atom]
        value = jaxprs.read(env, atom)
        if not packing.cuts:
            return [jax.lax.reshape(value, packing.shape)]
        if len(atom.aval.shape) <= packing.axis or atom.aval.shape[packing.axis] == 1:
            return [value] * packing.count
        return [_sliced(value, lo, hi, packing.axis) for lo, hi in packing.bounds]

    def _whole(self, atom: Atom, env: Env, parts_of: Mapping[Var, list[Any]]) -> Any:
        return (
            self.packing_of[atom].pack(parts_of[atom])
            if jaxprs.is_in(atom, parts_of)
            else jaxprs.read(env, atom)
        )


def _sliced(value: Any, lo: int, hi: int, axis: int) -> Any:
    return (
        value
        if (lo, hi) == (0, value.shape[axis])
        else jax.lax.slice_in_dim(value, lo, hi, axis=axis)
    )
