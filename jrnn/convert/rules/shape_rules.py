"""Rules for primitives that move elements: reshaping, broadcasting, transposing, slicing, joining, padding."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jrnn.convert.emitter import BOOL, FLOAT, INT32, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import is_static, spread_to
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.nets.ir import Shape


@rule("reshape", "squeeze")
def _(e: Emitter, node: FlatEquation, x):
    order = node.params.get("dimensions") if node.name == "reshape" else None
    if order is not None:
        x = transpose(e, x, order)
    return e.reshaped(x, node.shape)


@rule("broadcast_in_dim")
def _(e: Emitter, node: FlatEquation, x, *sizes):
    if sizes:
        raise ConversionError("a broadcast to a size that is only known when the function runs")
    shape = node.params["shape"]
    missing = len(x.shape) - len(x.own_shape)
    full = (1,) * missing + x.own_shape
    own_shape = [1] * len(shape)
    for axis, size in zip(node.params["broadcast_dimensions"], full):
        own_shape[axis] = size
    if not full:
        return replace(x, shape=shape)
    return replace(e.reshaped(replace(x, shape=x.own_shape), own_shape), shape=shape)


def sizes_at(x: Value, axes: Iterable[int]) -> Shape:
    """The sizes of some axes of x, in their order."""
    return tuple(x.shape[axis] for axis in axes)


def other_axes(x: Value, *axes: int) -> list[int]:
    """The axes of x that are not among `axes`."""
    return [axis for axis in range(len(x.shape)) if axis not in axes]


def moves_elements(x: Value, axes: Iterable[int]) -> bool:
    """Whether a transposition moves elements: it does not if only axes of size 1 change places."""
    larger = [axis for axis in axes if x.shape[axis] != 1]
    return larger != sorted(larger)


def transpose(e: Emitter, x: Value, axes: Sequence[int]) -> Value:
    """Dimension k of the result is dimension axes[k] of x."""
    axes = tuple(axes)
    if axes == tuple(range(len(x.shape))):
        return x
    if is_static(x):
        return x.transpose(axes)
    shape = sizes_at(x, axes)
    if x.own_shape == x.shape and not moves_elements(x, axes):
        return e.reshaped(x, shape)
    if x.dtype == BOOL:  # Transpose has no booleans
        return e.cast(transpose(e, e.cast(e.blob(x), INT32), axes), BOOL)
    return e.op("Transpose", [x], shape, x.dtype, axes=axes)


def cut(e: Emitter, x: Value, axis: int, start: int, end: int) -> Value:
    """Elements `start` to `end` along one axis."""
    if (start, end) == (0, x.shape[axis]):
        return x
    if is_static(x):
        return x[(slice(None),) * axis + (slice(start, end),)]
    shape = (*x.shape[:axis], end - start, *x.shape[axis + 1 :])
    starts = [0] * len(x.shape)
    ends = [-1] * len(x.shape)
    starts[axis] = start
    ends[axis] = end
    return e.op("Slice", [x], shape, x.dtype, starts=starts, ends=ends)


@rule("slice")
def _(e: Emitter, node: FlatEquation, x):
    p = node.params
    strides = p["strides"] or (1,) * len(x.shape)
    bounds = zip(p["start_indices"], p["limit_indices"], strides)
    for axis, (start, end, stride) in enumerate(bounds):
        if stride == 1:
            x = cut(e, x, axis, start, end)
        else:
            x = pick(e, x, axis, np.arange(start, end, stride))
    return x


@rule("split")
def _(e: Emitter, node: FlatEquation, x):
    axis = node.params["axis"]
    part_sizes = node.params["sizes"]
    if x.dtype == FLOAT:
        outputs = [(v.shape, v.dtype) for v in node.outputs]
        return e.ops("Split", [x], outputs, axis=axis, split=part_sizes)
    parts = []
    start = 0
    for size in part_sizes:
        parts.append(cut(e, x, axis, start, start + size))
        start += size
    return tuple(parts)


def pick(e: Emitter, x: Value, axis: int, indices: Value) -> Blob:
    """Slices of x along an axis, at a vector of indices."""
    if is_static(indices):
        indices = indices.astype(np.int32)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    args = {"axis": axis} if axis else {"dense_gradient": 1}
    return e.op("Gather", [x, indices], shape, x.dtype, **args)


def reverse(e: Emitter, x: Value, axis: int) -> Value:
    if is_static(x):
        return np.flip(x, axis)
    return pick(e, x, axis, np.arange(x.shape[axis])[::-1])


@rule("rev")
def _(e: Emitter, node: FlatEquation, x):
    for axis in node.params["dimensions"]:
        x = reverse(e, x, axis)
    return x


@rule("stack")
def _(e: Emitter, node: FlatEquation, *xs):
    axis = node.params["axis"]
    part = list(node.shape)
    part[axis] = 1
    return join(e, [e.reshaped(x, part) for x in xs], axis)


def join(e: Emitter, xs: Sequence[Value], axis: int) -> Value:
    """Values one after the other along an axis."""
    if len(xs) == 1:
        return xs[0]
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    return e.ops("Concat", xs, [(shape, xs[0].dtype), None], axis=axis)[0]


def padded(e: Emitter, x: Value, value: Value, config: Any) -> Value:
    """x padded with `value`: (before, after, between elements) for each axis; negative numbers crop."""
    for axis, (low, high, inside) in enumerate(config):
        before = x.shape[:axis]
        size = x.shape[axis]
        after = x.shape[axis + 1 :]
        if inside and size > 1:
            column = e.reshaped(x, (*before, size, 1, *after))
            wide = join(e, [column, spread_to(value, (*before, size, inside, *after))], axis + 1)
            x = e.reshaped(wide, (*before, size * (inside + 1), *after))
            size += (size - 1) * inside
        parts = [cut(e, x, axis, max(0, -low), size - max(0, -high))]
        if low > 0:
            parts.insert(0, spread_to(value, (*before, low, *after)))
        if high > 0:
            parts.append(spread_to(value, (*before, high, *after)))
        x = join(e, parts, axis)
    return x


@rule("concatenate")
def _(e: Emitter, node: FlatEquation, *xs):
    return join(e, xs, node.params["dimension"])


@rule("pad")
def _(e: Emitter, node: FlatEquation, x, value):
    return padded(e, x, value, node.params["padding_config"])


@rule("transpose")
def _(e: Emitter, node: FlatEquation, x):
    return transpose(e, x, node.params["permutation"])
