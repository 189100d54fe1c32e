"""Rules for reductions, running results, and order: sort and top_k are TopK, which ranks equal elements by their index."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emitter import BOOL, FLOAT, INT32, INT64, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import binary, unary
from jrnn.convert.rules.shape_rules import other_axes, sizes_at, transpose
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation

# The high and low half of an int32 are below this, so that float32 holds them exactly.
_HALF = 2**16
_TYPES = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin"}


@rule(*_TYPES)
def _(e: Emitter, node: FlatEquation, x):
    return reduce(e, _TYPES[node.name], x, node.params["axes"])


def reduce(e: Emitter, type: str, x: Value, axes: Sequence[int]) -> Value:
    """Reduces x along some axes, which leave the shape."""
    if not axes:
        return x
    shape = sizes_at(x, other_axes(x, *axes))
    return e.op(type, [x], shape, x.dtype, axes=tuple(axes), keepdims=0)


def _halved(combine: Callable, axes: Sequence[int], x: Any) -> Any:
    """Combines the first half of the elements along each axis with the second half, until one is left."""
    for axis in sorted(axes, reverse=True):
        while x.shape[axis] > 1:
            half, is_odd = divmod(x.shape[axis], 2)
            ends = [half, 2 * half] if is_odd else [half]
            low, high, *rest = jnp.split(x, ends, axis)
            x = jnp.concatenate([combine(low, high), *rest], axis)
        x = jnp.squeeze(x, axis)
    return x


_HALVED = {
    "reduce_prod": jnp.multiply, "reduce_xor": lax.bitwise_xor, "reduce_or": lax.bitwise_or,
    "reduce_and": lax.bitwise_and,
}  # fmt: skip


@rule(*_HALVED)
def _(e: Emitter, node: FlatEquation, x):
    axes = node.params["axes"]
    if x.dtype == BOOL and node.name in ("reduce_or", "reduce_and"):
        type = "ReduceMax" if node.name == "reduce_or" else "ReduceMin"
        return e.cast(reduce(e, type, e.cast(x, INT32), axes), BOOL)
    return e.call(partial(_halved, _HALVED[node.name], axes), x)


@rule("argmax", "argmin")
def _(e: Emitter, node: FlatEquation, x):
    (axis,) = node.params["axes"]
    if x.dtype == BOOL:
        x = e.cast(x, INT32)
    type = "ArgMax" if node.name == "argmax" else "ArgMin"
    (out,) = node.outputs
    return e.cast(e.op(type, [x], out.shape, INT64, axis=axis, keepdims=0), out.dtype)


# Running results -------------------------------------------------------------------------------------------------------


def _running(combine: Callable, axis: int, reverse: bool, x: Any) -> Any:
    """Combines each element with all before it: with the previous one, then with the two, the four before that."""
    size = x.shape[axis]
    step = 1
    cut = partial(lax.slice_in_dim, axis=axis)
    while step < size:
        low = cut(x, 0, size - step)
        high = cut(x, step, size)
        if reverse:
            parts = [combine(low, high), cut(x, size - step, size)]
        else:
            parts = [cut(x, 0, step), combine(high, low)]
        x = jnp.concatenate(parts, axis)
        step *= 2
    return x


_RUNNING = {
    "cumlogsumexp": jnp.logaddexp, "cummax": jnp.maximum, "cummin": jnp.minimum, "cumprod": jnp.multiply,
    "cumsum": jnp.add,
}  # fmt: skip


@rule(*_RUNNING)
def _(e: Emitter, node: FlatEquation, x):
    axis = node.params["axis"]
    reverse = node.params["reverse"]
    if node.name != "cumsum" or x.dtype != FLOAT:
        return e.call(partial(_running, _RUNNING[node.name], axis, reverse), x)
    size = x.shape[axis]
    order = _last(x, axis)
    summed = np.tril(np.ones((size, size), np.float32))
    if reverse:
        summed = summed.T
    shape = sizes_at(x, order)
    inputs = [transpose(e, x, order), summed, np.zeros(size, np.float32)]
    sums = e.op("FC", inputs, shape, FLOAT, axis=len(shape) - 1)
    return transpose(e, sums, np.argsort(order))


def _last(x: Value, axis: int) -> list[int]:
    """The order of dimensions that moves `axis` to the end."""
    return [*other_axes(x, axis), axis]


# Order -----------------------------------------------------------------------------------------------------------------


def _keys(e: Emitter, x: Blob) -> list[Blob]:
    """Floats that sort like x, the most significant last: TopK sorts floats alone."""
    if x.dtype == FLOAT:
        return [x]
    if x.dtype == BOOL:
        return [e.cast(x, FLOAT)]
    if x.dtype != INT32:
        raise ConversionError(
            f"sorting {x.dtype}: Caffe2 sorts floats; convert to int32 or float32 first"
        )
    return [e.cast(v, FLOAT) for v in reversed(halves(e, x))]


def halves(e: Emitter, x: Value) -> tuple[Value, Value]:
    """The high and low half of int32 numbers, both as int32."""
    unit = np.asarray(_HALF, np.int32)
    high = binary(e, "Div", x, unit)
    return high, binary(e, "Sub", x, binary(e, "Mul", high, unit))


def from_halves(e: Emitter, high: Value, low: Value) -> Value:
    return binary(e, "Add", binary(e, "Mul", high, np.asarray(_HALF, np.int32)), low)


def _ranked(e: Emitter, keys: Sequence[Blob], k: int, ascending: bool) -> Blob:
    """The places in the flat array of the first k elements of each row, by keys [..., D], the most significant last."""
    places: Any = None
    for key in keys:
        count = k if key is keys[-1] else key.shape[-1]
        if places is not None:
            key = e.reshaped(_at(e, key, places), key.shape)
        if ascending:
            key = unary(e, "Negative", key)
        shape = (*key.shape[:-1], count)
        outputs = [(shape, FLOAT), (shape, INT64), ((math.prod(shape),), INT64)]
        _, _, largest = e.ops("TopK", [key], outputs, k=count)
        places = largest if places is None else _at(e, places, largest)
    return places


def _at(e: Emitter, x: Blob, places: Blob) -> Blob:
    """The elements of x at places of its flat array."""
    flat = e.reshaped(x, (math.prod(x.shape),))
    return e.op("Gather", [flat, places], places.shape, x.dtype, dense_gradient=1)


@rule("sort")
def _(e: Emitter, node: FlatEquation, *xs):
    order = _last(xs[0], node.params["dimension"])
    rows = [e.blob(transpose(e, x, order)) for x in xs]
    keys = []
    for x in reversed(rows[: node.params["num_keys"]]):
        keys += _keys(e, x)
    places = _ranked(e, keys, rows[0].shape[-1], ascending=True)
    ordered = [e.reshaped(_at(e, x, places), x.shape) for x in rows]
    return tuple(transpose(e, x, np.argsort(order)) for x in ordered)


@rule("top_k")
def _(e: Emitter, node: FlatEquation, x: Value):
    rank = len(x.shape)
    k = node.params["k"]
    order = _last(x, node.params.get("axis", rank - 1) % rank)
    rows = e.blob(transpose(e, x, order))
    shape = (*rows.shape[:-1], k)
    places = _ranked(e, _keys(e, rows), k, ascending=False)
    values = e.reshaped(_at(e, rows, places), shape)
    lead = math.prod(shape[:-1])
    first = np.arange(lead, dtype=np.int32).reshape(lead, 1) * rows.shape[-1]
    within = binary(e, "Sub", e.reshaped(e.cast(places, INT32), (lead, k)), first)
    indices = e.cast(e.reshaped(within, shape), node.outputs[1].dtype)
    return transpose(e, values, np.argsort(order)), transpose(e, indices, np.argsort(order))
