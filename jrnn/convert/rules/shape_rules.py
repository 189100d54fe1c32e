"""Rules for primitives that move elements: reshaping, broadcasting, transposing, slicing, joining, padding."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jrnn.convert.emitter import BOOL, FLOAT, INT32, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import is_static, spread_to
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation


@rule("reshape", "squeeze")
def _(e: Emitter, node: FlatEquation, x):
    order = node.params.get("dimensions") if node.name == "reshape" else None
    if order is not None:
        x = transpose(e, x, order)
    return e.reshaped(x, node.outputs[0].shape)


@rule("broadcast_in_dim")
def _(e: Emitter, node: FlatEquation, x, *sizes):
    if sizes:
        raise ConversionError("a broadcast to a size that is only known when the function runs")
    shape = node.params["shape"]
    at = node.params["broadcast_dimensions"]
    full = x.held if len(x.held) == len(x.shape) else (1,) * (len(x.shape) - len(x.held)) + x.held
    held = [1] * len(shape)
    for axis, size in zip(at, full):
        held[axis] = size
    if math.prod(held) == 1 and not full:
        return replace(x, shape=shape)
    return replace(e.reshaped(replace(x, shape=x.held), held), shape=shape)


def transpose(e: Emitter, x: Value, axes: Sequence[int]) -> Value:
    """Dimension k of the result is dimension axes[k] of x."""
    axes = tuple(axes)
    if axes == tuple(range(len(x.shape))):
        return x
    if is_static(x):
        return x.transpose(axes)
    shape = tuple(x.shape[k] for k in axes)
    kept = [k for k in axes if x.shape[k] != 1]
    if kept == sorted(kept) and x.held == x.shape:
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
    starts = [start if k == axis else 0 for k in range(len(x.shape))]
    ends = [end if k == axis else -1 for k in range(len(x.shape))]
    return e.op("Slice", [x], shape, x.dtype, starts=starts, ends=ends)


@rule("slice")
def _(e: Emitter, node: FlatEquation, x):
    p = node.params
    strides = p["strides"] or (1,) * len(x.shape)
    for axis, (start, end, stride) in enumerate(
        zip(p["start_indices"], p["limit_indices"], strides)
    ):
        if stride == 1:
            x = cut(e, x, axis, start, end)
        else:
            x = pick(e, x, axis, np.arange(start, end, stride))
    return x


@rule("split")
def _(e: Emitter, node: FlatEquation, x):
    axis = node.params["axis"]
    sizes = node.params["sizes"]
    if x.dtype == FLOAT:
        return e.ops(
            "Split", [x], [(v.shape, v.dtype) for v in node.outputs], axis=axis, split=sizes
        )
    ends = np.cumsum(sizes).tolist()
    return tuple(cut(e, x, axis, end - size, end) for size, end in zip(sizes, ends))


def pick(e: Emitter, x: Value, axis: int, indices: Value) -> Blob:
    """Slices of x along an axis, at a vector of indices."""
    if is_static(indices):
        indices = indices.astype(np.int32)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    args = {"axis": axis} if axis else {"dense_gradient": 1}
    return e.op("Gather", [x, indices], shape, x.dtype, **args)


def reverse(e: Emitter, x: Value, axis: int) -> Value:
    return np.flip(x, axis) if is_static(x) else pick(e, x, axis, np.arange(x.shape[axis])[::-1])


@rule("rev")
def _(e: Emitter, node: FlatEquation, x):
    for axis in node.params["dimensions"]:
        x = reverse(e, x, axis)
    return x


@rule("stack")
def _(e: Emitter, node: FlatEquation, *xs):
    axis = node.params["axis"]
    shape = node.outputs[0].shape
    return join(e, [e.reshaped(x, (*shape[:axis], 1, *shape[axis + 1 :])) for x in xs], axis)


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
        x = cut(e, x, axis, max(0, -low), size - max(0, -high))
        around = [spread_to(value, (*before, n, *after)) if n > 0 else None for n in (low, high)]
        x = join(e, [part for part in (around[0], x, around[1]) if part is not None], axis)
    return x


rule("concatenate")(lambda e, node, *xs: join(e, xs, node.params["dimension"]))
rule("pad")(lambda e, node, x, value: padded(e, x, value, node.params["padding_config"]))
rule("transpose")(lambda e, node, x: transpose(e, x, node.params["permutation"]))
