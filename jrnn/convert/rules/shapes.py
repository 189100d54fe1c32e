"""Rules for primitives that move elements: reshaping, spreading, ordering, cutting, joining, picking by index."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax

from ...errors import ConversionError
from ..emit import BOOL, FLOAT, INT32, INT64, Blob, Emitter, Value
from ..flat import Node
from .elementwise import binary, extreme
from .table import rule


@rule("reshape", "squeeze", "expand_dims")
def _(e: Emitter, node: Node, x):
    if node.params.get("dimensions") is not None and node.name == "reshape":
        raise ConversionError("a reshape that reorders dimensions; transpose, then reshape")
    shape = node.outputs[0].shape
    return e.reshaped(e.blob(x), shape)


@rule("broadcast_in_dim")
def _(e: Emitter, node: Node, x, *sizes):
    if sizes:
        raise ConversionError("a broadcast to a size that is not known before the function runs")
    shape, at = node.params["shape"], node.params["broadcast_dimensions"]
    full = x.held if len(x.held) == len(x.shape) else (1,) * (len(x.shape) - len(x.held)) + x.held
    held = [1] * len(shape)
    for axis, size in zip(at, full):
        held[axis] = size
    if math.prod(held) == 1 and not full:
        return replace(x, shape=shape)
    return replace(e.reshaped(replace(x, shape=x.held), held), shape=shape)


@rule("transpose")
def _(e: Emitter, node: Node, x):
    return transpose(e, x, node.params["permutation"])


def transpose(e: Emitter, x: Value, axes: Any) -> Value:
    """Dimension k of the result is dimension axes[k] of x."""
    axes = tuple(axes)
    if axes == tuple(range(len(x.shape))):
        return x
    if isinstance(x, np.ndarray):
        return x.transpose(axes)
    shape = tuple(x.shape[k] for k in axes)
    kept = [k for k in axes if x.shape[k] != 1]
    if kept == sorted(kept) and x.is_full:
        return e.reshaped(x, shape)
    x = e.blob(x)
    if x.dtype == BOOL:  # Transpose has no booleans
        return e.cast(transpose(e, e.cast(x, INT32), axes), BOOL)
    return e.op("Transpose", [x], shape, x.dtype, axes=axes)


def cut(e: Emitter, x: Value, axis: int, start: int, end: int) -> Value:
    """Elements `start` to `end` along one axis."""
    if (start, end) == (0, x.shape[axis]):
        return x
    if isinstance(x, np.ndarray):
        return x[(slice(None),) * axis + (slice(start, end),)]
    x = e.blob(x)
    shape = (*x.shape[:axis], end - start, *x.shape[axis + 1 :])
    starts = [start if k == axis else 0 for k in range(len(x.shape))]
    ends = [end if k == axis else -1 for k in range(len(x.shape))]
    return e.op("Slice", [x], shape, x.dtype, starts=starts, ends=ends)


@rule("slice")
def _(e: Emitter, node: Node, x):
    p = node.params
    strides = p["strides"] or (1,) * len(x.shape)
    for axis, (start, end, stride) in enumerate(zip(p["start_indices"], p["limit_indices"], strides)):
        if stride == 1:
            x = cut(e, x, axis, start, end)
        else:
            x = pick(e, x, axis, np.arange(start, end, stride))
    return x


@rule("split")
def _(e: Emitter, node: Node, x):
    axis, sizes = node.params["axis"], node.params["sizes"]
    ends = np.cumsum(sizes)
    if x.dtype != FLOAT:
        return tuple(cut(e, x, axis, int(end) - size, int(end)) for size, end in zip(sizes, ends))
    x = e.blob(x)
    names = [e.claim("Split") for _ in sizes]
    e.b.op("Split", [x.name], names, axis=axis, split=sizes)
    return tuple(Blob.of(name, v.shape, v.dtype) for name, v in zip(names, node.outputs))


def pick(e: Emitter, x: Value, axis: int, indices: Value) -> Value:
    """Slices of x along an axis, at a vector of indices."""
    x, indices = e.blob(x), e.blob(np.asarray(indices, np.int32) if isinstance(indices, np.ndarray) else indices)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    args = {"axis": axis} if axis else {"dense_gradient": 1}
    return e.op("Gather", [x, indices], shape, x.dtype, **args)


@rule("rev")
def _(e: Emitter, node: Node, x):
    for axis in node.params["dimensions"]:
        x = pick(e, x, axis, np.arange(x.shape[axis])[::-1])
    return x


@rule("stack")
def _(e: Emitter, node: Node, *xs):
    axis = node.params["axis"]
    shape = node.outputs[0].shape
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    return join(e, [x.reshape(one) if isinstance(x, np.ndarray) else e.reshaped(e.blob(x), one) for x in xs], axis)


@rule("concatenate")
def _(e: Emitter, node: Node, *xs):
    return join(e, xs, node.params["dimension"])


def join(e: Emitter, xs: Any, axis: int) -> Blob:
    """Values one after the other along an axis."""
    blobs = [e.blob(x) for x in xs]
    shape = list(blobs[0].shape)
    shape[axis] = sum(b.shape[axis] for b in blobs)
    return e.op("Concat", blobs, shape, blobs[0].dtype, axis=axis, extra=1)


@rule("pad")
def _(e: Emitter, node: Node, x, value):
    for axis, (low, high, inside) in enumerate(node.params["padding_config"]):
        if inside:
            raise ConversionError("padding between elements; Caffe2 has no operator for it")
        size = x.shape[axis]
        x = cut(e, x, axis, max(0, -low), size - max(0, -high))
        parts = [x]
        for amount, first in ((low, True), (high, False)):
            if amount > 0:
                shape = (*x.shape[:axis], amount, *x.shape[axis + 1 :])
                extra = np.broadcast_to(value, shape) if isinstance(value, np.ndarray) else replace(value, shape=shape)
                parts.insert(0, extra) if first else parts.append(extra)
        if len(parts) > 1:
            x = join(e, parts, axis)
    return x


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
        here = _along(e, here, axis, shape)
        inside = here if inside is None else binary(e, "And", inside, here)
    if inside is None:
        return update
    condition, yes, no = (e.blob(v) for v in (_spread(inside, shape), update, x))
    return e.op("Where", [condition, yes, no], shape, no.dtype)


def _spread(value: Value, shape: tuple[int, ...]) -> Value:
    return np.broadcast_to(value, shape) if isinstance(value, np.ndarray) else replace(value, shape=shape)


def _along(e: Emitter, x: Value, axis: int, shape: tuple[int, ...]) -> Value:
    """A vector as an array that varies along one axis, to be spread along the others."""
    held = tuple(size if k == axis else 1 for k, size in enumerate(shape))
    if isinstance(x, np.ndarray):
        return x.reshape(held)
    return e.reshaped(e.blob(x), held)


@rule("gather")
def _(e: Emitter, node: Node, x, indices):
    """Slices of size 1 along the indexed axes, whole along the others: one Gather, of what the indices count to."""
    p = node.params
    d, sizes = p["dimension_numbers"], p["slice_sizes"]
    axes = [*d.operand_batching_dims, *d.start_index_map]
    if any(sizes[k] != (1 if k in axes else n) for k, n in enumerate(x.shape)):
        raise ConversionError("indexing that takes more than one element for an index; slice with constant bounds")
    outer = indices.shape[:-1]
    parts: dict[int, Value] = {}
    for operand, at in zip(d.operand_batching_dims, d.start_indices_batching_dims):
        along = [n if k == at else 1 for k, n in enumerate(outer)]
        parts[operand] = np.broadcast_to(np.arange(x.shape[operand], dtype=indices.dtype).reshape(along), outer)
    for k, axis in enumerate(d.start_index_map):
        last = len(indices.shape) - 1
        part = cut(e, indices, last, k, k + 1)
        part = part.reshape(outer) if isinstance(part, np.ndarray) else e.reshaped(e.blob(part), outer)
        clip = p["mode"] == lax.GatherScatterMode.CLIP
        parts[axis] = _start(e, part, 1, x.shape[axis]) if clip else part
    axes = sorted(parts)
    rest = [k for k in range(len(x.shape)) if k not in axes]
    if len(axes) == 1:  # where it stands
        front, moved, axis = rest[: axes[0]], x, axes[0]
    else:
        front, axis = [], 0
        moved = transpose(e, x, [*axes, *rest])
        count = math.prod(x.shape[k] for k in axes)
        moved = e.reshaped(e.blob(moved), (count, *(x.shape[k] for k in rest)))
    flat = parts[axes[0]]
    for k in axes[1:]:
        size = np.asarray(x.shape[k], indices.dtype)
        flat = _counted(e, flat, size, parts[k])
    amount = math.prod(outer)
    flat = flat.reshape(amount) if isinstance(flat, np.ndarray) else e.reshaped(e.blob(flat), (amount,))
    found = pick(e, moved, axis, flat)
    # [front..., indices..., back...], then the dimensions where the result has them, and 1s that were not collapsed
    found = e.reshaped(found, (*(x.shape[k] for k in front), *outer, *(x.shape[k] for k in rest if k not in front)))
    whole = [k for k in range(len(x.shape)) if k not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    offsets = [at for at, k in zip(d.offset_dims, whole) if k in rest]
    ones = [at for at, k in zip(d.offset_dims, whole) if k not in rest]
    places = [k for k in range(len(node.outputs[0].shape)) if k not in ones]
    from_outer = iter(range(len(front), len(front) + len(outer)))
    from_rest = iter([*range(len(front)), *range(len(front) + len(outer), len(found.shape))])
    order = [next(from_rest) if k in offsets else next(from_outer) for k in places]
    return e.reshaped(e.blob(transpose(e, found, order)), node.outputs[0].shape)


def _counted(e: Emitter, high: Value, size: np.ndarray, low: Value) -> Value:
    """high * size + low: the place of an element in an array of two dimensions read as one."""
    if isinstance(high, np.ndarray):
        high = high * size
    else:
        high = binary(e, "Mul", high, size)
    both = isinstance(high, np.ndarray) and isinstance(low, np.ndarray)
    return high + low if both else binary(e, "Add", high, low)


@rule("argmax", "argmin")
def _(e: Emitter, node: Node, x):
    (axis,) = node.params["axes"]
    if x.dtype != FLOAT:
        raise ConversionError(f"{node.name} of {x.dtype}: convert to float32 before")
    type = "ArgMax" if node.name == "argmax" else "ArgMin"
    found = e.op(type, [e.blob(x)], node.outputs[0].shape, INT64, axis=axis, keepdims=0)
    return e.cast(found, node.outputs[0].dtype)
