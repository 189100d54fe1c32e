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
from jrnn.convert.rules.shape_rules import cut, join, other_axes, pick, sizes_at, transpose
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.nets.ir import Shape


def _clip(e: Emitter, x: Value, low: int, high: int) -> Value:
    """x between two numbers."""
    at_least = extreme(e, "Max", x, np.asarray(low, x.dtype))
    return extreme(e, "Min", at_least, np.asarray(high, x.dtype))


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
        after_first = binary(e, "GE", offset, np.asarray(0, start.dtype), BOOL)
        before_last = binary(e, "LE", offset, np.asarray(size - 1, start.dtype), BOOL)
        here = binary(e, "And", after_first, before_last)
        update = pick(e, update, axis, _clip(e, offset, 0, size - 1))
        here = e.reshaped(here, _along(axis, most, len(shape)))
        inside = here if inside is None else binary(e, "And", inside, here)
    if inside is None:
        return update
    return where(e, inside, update, x, shape)


def _along(axis: int, size: int, rank: int) -> list[int]:
    """The shape of a vector along one axis of an array."""
    shape = [1] * rank
    shape[axis] = size
    return shape


# Windows at indices ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Elements of an array along some axes. `flat` [*outer, *windows] numbers them as if these axes were one."""

    axes: Shape
    windows: Shape  # the axes along which an index selects more than one element
    outer: Shape
    flat: Value

    @property
    def amount(self) -> int:
        return math.prod(self.flat.shape)

    def vector(self, e: Emitter) -> Value:
        """The numbers of all elements, [K]."""
        flat = self.flat.astype(np.int32) if is_static(self.flat) else self.flat
        return e.reshaped(flat, (self.amount,))


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
    # Where each window starts, along each axis.
    outer = tuple(indices.shape[:-1])
    starts: dict[int, Value] = {axis: np.zeros(outer, indices.dtype) for axis in first}
    for axis, dimension in batch.items():
        numbers = np.arange(shape[axis], dtype=indices.dtype)
        along = _along(dimension, outer[dimension], len(outer))
        starts[axis] = np.broadcast_to(numbers.reshape(along), outer)
    for k, axis in enumerate(axes):
        starts[axis] = e.reshaped(cut(e, indices, len(outer), k, k + 1), outer)
        if node.params["mode"] == lax.GatherScatterMode.CLIP:
            starts[axis] = _clip(e, starts[axis], 0, shape[axis] - sizes[axis])

    # The number of each element, as if these axes were one.
    window_axes = tuple(axis for axis in sorted(starts) if sizes[axis] > 1)
    rank = len(outer) + len(window_axes)
    flat: Value = None
    for axis in sorted(starts):
        part = e.reshaped(starts[axis], (*outer, *[1] * len(window_axes)))
        if axis in window_axes:
            dimension = len(outer) + window_axes.index(axis)
            offsets = np.arange(sizes[axis], dtype=part.dtype)
            part = binary(e, "Add", part, offsets.reshape(_along(dimension, sizes[axis], rank)))
        if flat is not None:
            rows = binary(e, "Mul", flat, np.asarray(shape[axis], flat.dtype))
            part = binary(e, "Add", rows, part)
        flat = part
    flat = spread_to(flat, (*outer, *(sizes[axis] for axis in window_axes)))
    return _Places(axes=tuple(sorted(starts)), windows=window_axes, outer=outer, flat=flat)


def _reordered(e: Emitter, x: Value, have: Sequence[Any], wanted: Sequence[Any]) -> Value:
    """Reorders the dimensions of x, labeled `have`, as `wanted`. Dimensions that are not wanted have size 1."""
    present = [label for label in have if label in wanted]
    x = e.reshaped(x, [n for n, label in zip(x.shape, have) if label in wanted])
    return transpose(e, x, [present.index(label) for label in wanted if label in present])


def _labels(rank: int, special: Sequence[int], names: Sequence[Any], others: Sequence[Any]):
    """The labels of an array's dimensions: `names` for the dimensions `special`, in order, and `others` for the rest."""
    next_name = iter(names)
    next_other = iter(others)
    return [next(next_name if k in special else next_other) for k in range(rank)]


@rule("gather")
def gather_rule(e: Emitter, node: FlatEquation, x, indices):
    """One Gather along the indexed axes, which are merged into one if there are several."""
    d = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    batch = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims))
    for axis in set(range(len(x.shape))).difference(d.start_index_map, batch):  # their index is 0
        x = cut(e, x, axis, 0, sizes[axis])
    first = () if batch or d.start_index_map else (0,)
    places = _places(
        e=e,
        node=node,
        indices=indices,
        axes=d.start_index_map,
        batch=batch,
        first=first,
        shape=x.shape,
        sizes=sizes,
    )
    rest = other_axes(x, *places.axes)
    if len(places.axes) == 1:
        (axis,) = places.axes
        front = [k for k in rest if k < axis]
        merged = x
    else:
        front = []
        axis = 0
        merged = transpose(e, x, [*places.axes, *rest])
        merged = e.reshaped(merged, (math.prod(sizes_at(x, places.axes)), *sizes_at(x, rest)))
    gathered = pick(e, merged, axis, places.vector(e))
    back = [k for k in rest if k not in front]
    outer = [f"outer {k}" for k in range(len(places.outer))]
    have = [*front, *outer, *places.windows, *back]
    gathered = e.reshaped(gathered, (*sizes_at(x, front), *places.flat.shape, *sizes_at(x, back)))
    visible = other_axes(x, *d.collapsed_slice_dims, *d.operand_batching_dims)
    shape = node.shape
    wanted = _labels(len(shape), d.offset_dims, visible, outer)
    return e.reshaped(_reordered(e, gathered, have, wanted), shape)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter_rule(e: Emitter, node: FlatEquation, x, indices, updates):
    d = node.params["dimension_numbers"]
    if not x.shape:
        raise ConversionError("a write at indices of a scalar; compute the new value instead")
    visible = other_axes(x, *d.inserted_window_dims, *d.operand_batching_dims)
    sizes = [1] * len(x.shape)
    for axis, dimension in zip(visible, d.update_window_dims):
        sizes[axis] = updates.shape[dimension]
    batch = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims))
    axes = d.scatter_dims_to_operand_dims
    first = [axis for axis in other_axes(x, *axes, *batch) if sizes[axis] < x.shape[axis]]
    if not (first or axes or batch):
        first = [0]
    places = _places(
        e=e,
        node=node,
        indices=indices,
        axes=axes,
        batch=batch,
        first=first,
        shape=x.shape,
        sizes=sizes,
    )

    # The updates as rows [K, ...], and the array as rows that places number.
    rest = other_axes(x, *places.axes)
    row = sizes_at(x, rest)
    outer = [f"outer {k}" for k in range(len(places.outer))]
    have = _labels(len(updates.shape), d.update_window_dims, visible, outer)
    rows = _reordered(e, updates, have, [*outer, *places.windows, *rest])
    rows = e.blob(e.reshaped(rows, (places.amount, *row)))
    order = [*places.axes, *rest]
    rows_first = e.blob(transpose(e, x, order))
    data = e.reshaped(rows_first, (math.prod(sizes_at(x, places.axes)), *row))

    how = node.name.removeprefix("scatter").strip("-")
    if not how and is_static(places.flat) and _is_range(places.flat, data.shape[0]):
        begin = int(places.flat.min())
        before = cut(e, data, 0, 0, begin)
        after = cut(e, data, 0, begin + places.amount, data.shape[0])
        written = join(e, [part for part in (before, rows, after) if part.shape[0]], 0)
    else:
        unique = node.params["unique_indices"] or places.amount == 1
        written = _written(
            e=e,
            how=how,
            data=data,
            at=e.blob(places.vector(e)),
            rows=rows,
            unique=unique,
        )
    return transpose(e, e.reshaped(written, rows_first.shape), np.argsort(order))


def _is_range(places: np.ndarray, size: int) -> bool:
    flat = places.reshape(-1)
    return bool(flat.size and flat[0] >= 0 and flat[-1] < size and (np.diff(flat) == 1).all())


def _written(e: Emitter, how: str, data: Blob, at: Blob, rows: Blob, unique: bool) -> Blob:
    """The data with rows [K, ...] assigned, added, ... at the places `at` [K]."""
    if how in ("add", "sub"):
        change = e.op("SparseToDense", [at, rows, data], data.shape, data.dtype)
        return binary(e, how.capitalize(), data, change)
    if how:
        if not unique:
            raise ConversionError(
                f"scatter-{how} at indices that may be equal: at equal indices Caffe2 can only add; pass "
                "unique_indices=True if they are not equal"
            )
        before = pick(e, data, 0, at)
        if how == "mul":
            rows = binary(e, "Mul", before, rows)
        else:
            rows = extreme(e, how.capitalize(), before, rows)
    if data.dtype == BOOL:  # ScatterAssign has no booleans
        numbers = _written(
            e=e,
            how="",
            data=e.cast(data, INT32),
            at=at,
            rows=e.cast(rows, INT32),
            unique=unique,
        )
        return e.cast(numbers, BOOL)
    copy = e.copy(data)
    e.b.op("ScatterAssign", [copy.name, at.name, e.blob(rows).name], [copy.name])
    return copy
