"""Rules for primitives that move elements: reshaping, spreading, ordering, cutting, joining, picking by index."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from jrnn.convert.emit import BOOL, FLOAT, INT32, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError


@rule("reshape", "squeeze")
def _(e: Emitter, node: Node, x):
    order = node.params.get("dimensions") if node.name == "reshape" else None
    if order is not None:
        x = transpose(e, x, order)
    return e.reshaped(e.blob(x), node.outputs[0].shape)


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
    return padded(e, x, value, node.params["padding_config"])


def padded(e: Emitter, x: Value, value: Value, config: Any) -> Value:
    """x with `value` around and between its elements: (before, after, between) for each axis; fewer than 0 cuts off."""

    def filled(shape: tuple[int, ...]) -> Value:
        return np.broadcast_to(value, shape) if isinstance(value, np.ndarray) else replace(value, shape=shape)

    for axis, (low, high, inside) in enumerate(config):
        before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        if inside and size > 1:
            column = e.reshaped(e.blob(x), (*before, size, 1, *after))
            wide = join(e, [column, filled((*before, size, inside, *after))], axis + 1)
            x = e.reshaped(wide, (*before, size * (inside + 1), *after))
            size += (size - 1) * inside
        x = cut(e, x, axis, max(0, -low), size - max(0, -high))
        parts = [x]
        if low > 0:
            parts.insert(0, filled((*before, low, *after)))
        if high > 0:
            parts.append(filled((*before, high, *after)))
        if len(parts) > 1:
            x = join(e, parts, axis)
    return x
