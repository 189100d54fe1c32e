"""Rules for reading and writing at indices: Gather, ScatterAssign, SparseToDense, and Where for slices that move.

An index outside of its axis is an error in Caffe2, where JAX clamps it, fills or drops.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jrnn.convert.emit import BOOL, INT32, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.elementwise import binary, extreme, spread_to
from jrnn.convert.rules.shapes import cut, join, pick, transpose
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError


def _start(e: Emitter, index: Value, size: int, most: int) -> Value:
    """A start index as JAX means it: moved so that `size` elements from it lie within `most`."""
    if isinstance(index, np.ndarray):
        return np.clip(index, 0, most - size)
    limits = np.asarray(0, index.dtype), np.asarray(most - size, index.dtype)
    return extreme(e, "Min", extreme(e, "Max", index, limits[0]), limits[1])


@rule("dynamic_slice")
def _(e: Emitter, node: Node, x, *starts):
    for axis, (start, size) in enumerate(zip(starts, node.params["slice_sizes"])):
        most = x.shape[axis]
        if size == most:
            continue
        start = _start(e, start, size, most)
        if isinstance(start, np.ndarray):
            x = cut(e, x, axis, int(start), int(start) + size)
        else:
            x = pick(e, x, axis, binary(e, "Add", np.arange(size, dtype=start.dtype), start))
    return x


@rule("dynamic_update_slice")
def _(e: Emitter, node: Node, x, update, *starts):
    shape = x.shape
    inside: Value = None
    for axis, (start, size) in enumerate(zip(starts, update.shape)):
        most = shape[axis]
        if size == most:
            continue
        start = _start(e, start, size, most)
        places = np.arange(most, dtype=start.dtype)
        if isinstance(start, np.ndarray):
            offset: Value = places - start
        else:
            offset = binary(e, "Sub", places, start)
        last = np.asarray(size - 1, start.dtype)
        zero = np.zeros((), start.dtype)
        if isinstance(offset, np.ndarray):
            here: Value = (offset >= 0) & (offset < size)
            nearest: Value = np.clip(offset, 0, size - 1)
        else:
            here = binary(e, "And", binary(e, "GE", offset, zero, BOOL), binary(e, "LE", offset, last, BOOL))
            nearest = extreme(e, "Min", extreme(e, "Max", offset, zero), last)
        update = pick(e, update, axis, nearest)
        here = _along(e, here, axis, len(shape))
        inside = here if inside is None else binary(e, "And", inside, here)
    if inside is None:
        return update
    condition, yes, no = (e.blob(v) for v in (spread_to(inside, shape), update, x))
    return e.op("Where", [condition, yes, no], shape, no.dtype)


def _along(e: Emitter, x: Value, axis: int, rank: int) -> Value:
    """A vector as an array that varies along one axis, to be spread along the others."""
    held = tuple(x.shape[0] if k == axis else 1 for k in range(rank))
    return x.reshape(held) if isinstance(x, np.ndarray) else e.reshaped(e.blob(x), held)


# Windows at indices ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Elements of an array along some of its axes: `flat` counts them, [*outer, *windows], as if the axes were one."""

    axes: tuple[int, ...]
    windows: tuple[int, ...]  # the axes along which more than one element is taken for an index
    outer: tuple[int, ...]
    flat: Value

    @property
    def amount(self) -> int:
        return math.prod(self.flat.shape)


def _starts(e: Emitter, indices: Value, axes: Sequence[int], batch: Mapping[int, int], shape, sizes, clip: bool):
    """Where windows of `sizes` start: along the axes that `indices` [..., K] name, and along those of the batch."""
    outer = tuple(indices.shape[:-1])
    found: dict[int, Value] = {}
    for axis, at in batch.items():
        held = [n if k == at else 1 for k, n in enumerate(outer)]
        found[axis] = np.broadcast_to(np.arange(shape[axis], dtype=indices.dtype).reshape(held), outer)
    for k, axis in enumerate(axes):
        part = cut(e, indices, len(outer), k, k + 1)
        part = part.reshape(outer) if isinstance(part, np.ndarray) else e.reshaped(e.blob(part), outer)
        found[axis] = _start(e, part, sizes[axis], shape[axis]) if clip else part
    return found


def _places(e: Emitter, starts: Mapping[int, Value], outer: tuple[int, ...], shape, sizes) -> _Places:
    axes = tuple(sorted(starts))
    windows = tuple(k for k in axes if sizes[k] > 1)
    flat: Value = None
    for axis in axes:
        part = starts[axis]
        lead = (*outer, *(1 for _ in windows))
        part = part.reshape(lead) if isinstance(part, np.ndarray) else e.reshaped(e.blob(part), lead)
        if axis in windows:
            held = [1] * len(outer) + [sizes[k] if k == axis else 1 for k in windows]
            part = _sum(e, part, np.arange(sizes[axis], dtype=part.dtype).reshape(held))
        flat = part if flat is None else _sum(e, _product(e, flat, shape[axis]), part)
    full = (*outer, *(sizes[k] for k in windows))
    return _Places(axes, windows, outer, spread_to(flat, full))


def _sum(e: Emitter, a: Value, b: Value) -> Value:
    both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return a + b if both else binary(e, "Add", a, b)


def _product(e: Emitter, a: Value, size: int) -> Value:
    number = np.asarray(size, a.dtype)
    return a * number if isinstance(a, np.ndarray) else binary(e, "Mul", a, number)


def _vector(e: Emitter, places: _Places) -> Blob:
    flat = places.flat
    if isinstance(flat, np.ndarray):
        return e.constant(flat.reshape(-1).astype(np.int32))
    return e.reshaped(e.blob(flat), (places.amount,))


def _reordered(e: Emitter, x: Value, have: Sequence[Any], wanted: Sequence[Any]) -> Value:
    """x, whose dimensions are called `have`, with those in `wanted`, in that order; the others are of size 1."""
    kept = [label for label in have if label in wanted]
    x = e.reshaped(e.blob(x), [n for n, label in zip(x.shape, have) if label in wanted])
    return transpose(e, x, [kept.index(label) for label in wanted if label in kept])


@rule("gather")
def _(e: Emitter, node: Node, x, indices):
    """One Gather along the indexed axes, which are made one where they are several."""
    d, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    batch = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims))
    clip = node.params["mode"] == lax.GatherScatterMode.CLIP
    starts = _starts(e, indices, d.start_index_map, batch, x.shape, sizes, clip)
    for axis in set(range(len(x.shape))).difference(starts):  # indices of 0
        x = cut(e, x, axis, 0, sizes[axis])
    if not starts:
        starts = {0: np.zeros(indices.shape[:-1], np.int32)}
    places = _places(e, starts, tuple(indices.shape[:-1]), x.shape, sizes)
    rest = [k for k in range(len(x.shape)) if k not in places.axes]
    if len(places.axes) == 1:
        (axis,) = places.axes
        front, moved = [k for k in rest if k < axis], x
    else:
        front, axis = [], 0
        moved = e.blob(transpose(e, x, [*places.axes, *rest]))
        moved = e.reshaped(moved, (math.prod(x.shape[k] for k in places.axes), *(x.shape[k] for k in rest)))
    found = pick(e, moved, axis, _vector(e, places))
    back = [k for k in rest if k not in front]
    outer = [f"outer {k}" for k in range(len(places.outer))]
    have = [*front, *outer, *places.windows, *back]
    found = e.reshaped(found, (*(x.shape[k] for k in front), *places.flat.shape, *(x.shape[k] for k in back)))
    shown = iter(k for k in range(len(x.shape)) if k not in (*d.collapsed_slice_dims, *d.operand_batching_dims))
    beside = iter(outer)
    shape = node.outputs[0].shape
    wanted = [next(shown) if k in d.offset_dims else next(beside) for k in range(len(shape))]
    return e.reshaped(e.blob(_reordered(e, found, have, wanted)), shape)


_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


@rule(*_SCATTERS)
def _(e: Emitter, node: Node, x, indices, updates):
    d, name = node.params["dimension_numbers"], node.name
    if not x.shape:
        raise ConversionError("writes at indices of an array without dimensions; compute the value itself")
    shown = [k for k in range(len(x.shape)) if k not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    taken = {k: updates.shape[at] for k, at in zip(shown, d.update_window_dims)}
    sizes = [taken.get(k, 1) for k in range(len(x.shape))]
    outer = tuple(indices.shape[:-1])
    batch = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims))
    clip = node.params["mode"] == lax.GatherScatterMode.CLIP
    starts = _starts(e, indices, d.scatter_dims_to_operand_dims, batch, x.shape, sizes, clip)
    partial = [k for k in range(len(x.shape)) if k not in starts and sizes[k] < x.shape[k]]
    starts |= {k: np.zeros(outer, indices.dtype) for k in partial or ([] if starts else [0])}
    places = _places(e, starts, outer, x.shape, sizes)
    rest = [k for k in range(len(x.shape)) if k not in places.axes]

    inside, beside = iter(shown), iter(f"outer {k}" for k in range(len(outer)))
    have = [next(inside) if k in d.update_window_dims else next(beside) for k in range(len(updates.shape))]
    wanted = [*(f"outer {k}" for k in range(len(outer))), *places.windows, *rest]
    row = tuple(x.shape[k] for k in rest)
    rows = e.reshaped(e.blob(_reordered(e, updates, have, wanted)), (places.amount, *row))
    order = [*places.axes, *rest]
    moved = e.blob(transpose(e, x, order))
    data = e.reshaped(moved, (math.prod(x.shape[k] for k in places.axes), *row))
    unique = node.params["unique_indices"] or places.amount == 1
    how = name.removeprefix("scatter").strip("-")
    if not how and isinstance(places.flat, np.ndarray) and _is_range(places.flat, data.shape[0]):
        first = int(places.flat.min())
        parts = (cut(e, data, 0, 0, first), rows, cut(e, data, 0, first + places.amount, data.shape[0]))
        found = join(e, [part for part in parts if part.shape[0]], 0)
    else:
        found = _written(e, how, data, _vector(e, places), rows, unique)
    return transpose(e, e.reshaped(found, moved.shape), np.argsort(order))


def _is_range(places: np.ndarray, size: int) -> bool:
    flat = places.reshape(-1)
    return bool(flat.size and flat[0] >= 0 and flat[-1] < size and (np.diff(flat) == 1).all())


def _written(e: Emitter, how: str, data: Blob, at: Blob, rows: Blob, unique: bool) -> Blob:
    """The data with rows [K, ...] put, added, ... at the places `at` [K]."""
    if how in ("add", "sub"):
        dense = e.op("SparseToDense", [at, rows, data], data.shape, data.dtype)
        return binary(e, how.capitalize(), data, dense)
    if how:
        if not unique:
            raise ConversionError(
                f"scatter-{how} at indices that may be equal: Caffe2 adds, but does nothing else at equal indices; say "
                "unique_indices=True where they are not"
            )
        before = pick(e, data, 0, at)
        rows = binary(e, "Mul", before, rows) if how == "mul" else extreme(e, how.capitalize(), before, rows)
    if data.dtype == BOOL:  # ScatterAssign has no booleans
        return e.cast(_written(e, "", e.cast(data, INT32), at, e.cast(rows, INT32), unique), BOOL)
    made = e.copy(data)
    e.b.op("ScatterAssign", [made.name, at.name, rows.name], [made.name])
    return made
