"""Rules for reading and writing at indices: Gather, ScatterAssign, SparseToDense, and Where for slices that move.

An index outside of its axis is an error in Caffe2; JAX clamps, fills or drops it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jrnn.convert.emitter import BOOL, INT32, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import binary, extreme, is_static, spread_to, where
from jrnn.convert.rules.shape_rules import cut, join, pick, transpose
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation


def _clip(e: Emitter, x: Value, low: int, high: int) -> Value:
    return extreme(
        e, "Min", extreme(e, "Max", x, np.asarray(low, x.dtype)), np.asarray(high, x.dtype)
    )


@rule("dynamic_slice")
def _(e: Emitter, node: FlatEquation, x, *starts):
    for axis, (start, size) in enumerate(zip(starts, node.params["slice_sizes"])):
        most = x.shape[axis]
        if size == most:
            continue
        start = _clip(e, start, 0, most - size)
        if is_static(start):
            x = cut(e, x, axis, int(start), int(start) + size)
        else:
            x = pick(e, x, axis, binary(e, "Add", np.arange(size, dtype=start.dtype), start))
    return x


@rule("dynamic_update_slice")
def _(e: Emitter, node: FlatEquation, x, update, *starts):
    shape = x.shape
    inside: Value = None  # whether each element is replaced
    for axis, (start, size) in enumerate(zip(starts, update.shape)):
        most = shape[axis]
        if size == most:
            continue
        start = _clip(e, start, 0, most - size)
        offset = binary(e, "Sub", np.arange(most, dtype=start.dtype), start)
        zero, last = (np.asarray(k, start.dtype) for k in (0, size - 1))
        here = binary(
            e, "And", binary(e, "GE", offset, zero, BOOL), binary(e, "LE", offset, last, BOOL)
        )
        update = pick(e, update, axis, _clip(e, offset, 0, size - 1))
        here = e.reshaped(here, [most if k == axis else 1 for k in range(len(shape))])
        inside = here if inside is None else binary(e, "And", inside, here)
    return update if inside is None else where(e, inside, update, x, shape)


# Windows at indices ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Elements of an array along some axes. `flat` [*outer, *windows] numbers them as if these axes were one."""

    axes: tuple[int, ...]
    windows: tuple[int, ...]  # the axes along which an index selects more than one element
    outer: tuple[int, ...]
    flat: Value

    @property
    def amount(self) -> int:
        return math.prod(self.flat.shape)

    def vector(self, e: Emitter) -> Value:
        return e.reshaped(
            self.flat.astype(np.int32) if is_static(self.flat) else self.flat, (self.amount,)
        )


def _places(
    e: Emitter,
    node: FlatEquation,
    indices: Value,
    axes: Sequence[int],
    batch: Mapping[int, int],
    first: Iterable[int],
    shape,
    sizes,
) -> _Places:
    """The elements in windows of `sizes`.

    A window starts at the indices [..., K] along `axes`, at 0 along the axes `first`, and at each element along the batch
    axes, which are mapped to dimensions of the indices.
    """
    outer = tuple(indices.shape[:-1])
    starts: dict[int, Value] = {axis: np.zeros(outer, indices.dtype) for axis in first}
    for axis, at in batch.items():
        held = [n if k == at else 1 for k, n in enumerate(outer)]
        starts[axis] = np.broadcast_to(
            np.arange(shape[axis], dtype=indices.dtype).reshape(held), outer
        )
    for k, axis in enumerate(axes):
        starts[axis] = e.reshaped(cut(e, indices, len(outer), k, k + 1), outer)
        if node.params["mode"] == lax.GatherScatterMode.CLIP:
            starts[axis] = _clip(e, starts[axis], 0, shape[axis] - sizes[axis])
    windows = tuple(k for k in sorted(starts) if sizes[k] > 1)
    flat: Value = None
    for axis in sorted(starts):
        part = e.reshaped(starts[axis], (*outer, *(1 for _ in windows)))
        if axis in windows:
            held = [1] * len(outer) + [sizes[k] if k == axis else 1 for k in windows]
            part = binary(e, "Add", part, np.arange(sizes[axis], dtype=part.dtype).reshape(held))
        if flat is not None:
            part = binary(
                e, "Add", binary(e, "Mul", flat, np.asarray(shape[axis], flat.dtype)), part
            )
        flat = part
    return _Places(
        tuple(sorted(starts)),
        windows,
        outer,
        spread_to(flat, (*outer, *(sizes[k] for k in windows))),
    )


def _reordered(e: Emitter, x: Value, have: Sequence[Any], wanted: Sequence[Any]) -> Value:
    """Reorders the dimensions of x, labeled `have`, as `wanted`. Dimensions that are not wanted have size 1."""
    kept = [label for label in have if label in wanted]
    x = e.reshaped(x, [n for n, label in zip(x.shape, have) if label in wanted])
    return transpose(e, x, [kept.index(label) for label in wanted if label in kept])


@rule("gather")
def gather_rule(e: Emitter, node: FlatEquation, x, indices):
    """One Gather along the indexed axes, which are merged into one if there are several."""
    d = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    batch = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims))
    for axis in set(range(len(x.shape))).difference(d.start_index_map, batch):  # their index is 0
        x = cut(e, x, axis, 0, sizes[axis])
    first = () if batch or d.start_index_map else (0,)
    places = _places(e, node, indices, d.start_index_map, batch, first, x.shape, sizes)
    rest = [k for k in range(len(x.shape)) if k not in places.axes]
    if len(places.axes) == 1:
        (axis,) = places.axes
        front = [k for k in rest if k < axis]
        moved = x
    else:
        front = []
        axis = 0
        moved = transpose(e, x, [*places.axes, *rest])
        moved = e.reshaped(
            moved, (math.prod(x.shape[k] for k in places.axes), *(x.shape[k] for k in rest))
        )
    picked = pick(e, moved, axis, places.vector(e))
    back = [k for k in rest if k not in front]
    outer = [f"outer {k}" for k in range(len(places.outer))]
    have = [*front, *outer, *places.windows, *back]
    picked = e.reshaped(
        picked, (*(x.shape[k] for k in front), *places.flat.shape, *(x.shape[k] for k in back))
    )
    shown = iter(
        k
        for k in range(len(x.shape))
        if k not in (*d.collapsed_slice_dims, *d.operand_batching_dims)
    )
    others = iter(outer)
    shape = node.outputs[0].shape
    wanted = [next(shown) if k in d.offset_dims else next(others) for k in range(len(shape))]
    return e.reshaped(_reordered(e, picked, have, wanted), shape)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter_rule(e: Emitter, node: FlatEquation, x, indices, updates):
    d = node.params["dimension_numbers"]
    if not x.shape:
        raise ConversionError("a write at indices of a scalar; compute the new value instead")
    shown = [
        k
        for k in range(len(x.shape))
        if k not in (*d.inserted_window_dims, *d.operand_batching_dims)
    ]
    taken = {k: updates.shape[at] for k, at in zip(shown, d.update_window_dims)}
    sizes = [taken.get(k, 1) for k in range(len(x.shape))]
    batch = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims))
    axes = d.scatter_dims_to_operand_dims
    first = [k for k in range(len(x.shape)) if k not in (*axes, *batch) and sizes[k] < x.shape[k]]
    if not (first or axes or batch):
        first = [0]
    places = _places(e, node, indices, axes, batch, first, x.shape, sizes)
    rest = [k for k in range(len(x.shape)) if k not in places.axes]

    outer = [f"outer {k}" for k in range(len(places.outer))]
    inside = iter(shown)
    others = iter(outer)
    have = [
        next(inside) if k in d.update_window_dims else next(others)
        for k in range(len(updates.shape))
    ]
    row = tuple(x.shape[k] for k in rest)
    rows = _reordered(e, updates, have, [*outer, *places.windows, *rest])
    rows = e.blob(e.reshaped(rows, (places.amount, *row)))
    order = [*places.axes, *rest]
    moved = e.blob(transpose(e, x, order))
    data = e.reshaped(moved, (math.prod(x.shape[k] for k in places.axes), *row))
    how = node.name.removeprefix("scatter").strip("-")
    if not how and is_static(places.flat) and _is_range(places.flat, data.shape[0]):
        first = int(places.flat.min())
        parts = (
            cut(e, data, 0, 0, first),
            rows,
            cut(e, data, 0, first + places.amount, data.shape[0]),
        )
        written = join(e, [part for part in parts if part.shape[0]], 0)
    else:
        unique = node.params["unique_indices"] or places.amount == 1
        written = _written(e, how, data, e.blob(places.vector(e)), rows, unique)
    return transpose(e, e.reshaped(written, moved.shape), np.argsort(order))


def _is_range(places: np.ndarray, size: int) -> bool:
    flat = places.reshape(-1)
    return bool(flat.size and flat[0] >= 0 and flat[-1] < size and (np.diff(flat) == 1).all())


def _written(e: Emitter, how: str, data: Blob, at: Blob, rows: Blob, unique: bool) -> Blob:
    """The data with rows [K, ...] assigned, added, ... at the places `at` [K]."""
    if how in ("add", "sub"):
        return binary(
            e,
            how.capitalize(),
            data,
            e.op("SparseToDense", [at, rows, data], data.shape, data.dtype),
        )
    if how:
        if not unique:
            raise ConversionError(
                f"scatter-{how} at indices that may be equal: at equal indices Caffe2 can only add; pass "
                "unique_indices=True if they are not equal"
            )
        before = pick(e, data, 0, at)
        rows = (
            binary(e, "Mul", before, rows)
            if how == "mul"
            else extreme(e, how.capitalize(), before, rows)
        )
    if data.dtype == BOOL:  # ScatterAssign has no booleans
        return e.cast(_written(e, "", e.cast(data, INT32), at, e.cast(rows, INT32), unique), BOOL)
    copy = e.copy(data)
    e.b.op("ScatterAssign", [copy.name, at.name, e.blob(rows).name], [copy.name])
    return copy
