"""Rules for primitives that read and write elements by their places: gather, scatter, sort, and running reductions.

Shapes: S the axes of the indices, W the axes of a window, n the number of elements of the operand.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation, flatten
from jrnn.jaxprs.queries import is_floating
from jrnn.onnx.emit import GraphEmitter, Value, ints, rule


def traced(e: GraphEmitter, fn: Callable[..., Any], *values: Value) -> list[Value]:
    """Emits the nodes of a JAX function of values."""
    return e.run(
        flatten(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values))),
        values,
    )


def _linear(
    shape: Sequence[Any],
    window: Sequence[Any],
    starts: Any,
    batch: Sequence[tuple[int, int]],
    indices: Any,
    mode,
):
    """The indices of windows' elements in the flat array, [S, W]; n for a window that lies partly outside.

    Args:
        window: the size of the window along each axis.
        starts: the axes that the last axis of `indices` [S, K] gives the starts of.
        batch: pairs of an axis of the array and the axis of S that runs along it.
    """
    where = indices.shape[:-1]
    rank = len(shape)
    first: list[Any] = [jnp.zeros(where, jnp.int32)] * rank
    for k, axis in enumerate(starts):
        first[axis] = indices[..., k].astype(jnp.int32)
    for axis, k in batch:
        first[axis] = lax.broadcasted_iota(jnp.int32, where, k)
    spans = []
    for size, width in zip(shape, window, strict=True):
        spans.append(size - width)
    inside = jnp.ones(where, bool)
    for axis in starts:
        if mode == Mode.CLIP:
            first[axis] = jnp.clip(first[axis], 0, spans[axis])
        else:
            inside &= (first[axis] >= 0) & (first[axis] <= spans[axis])
    linear = jnp.zeros((*where, *window), jnp.int32)
    step = 1
    for axis in reversed(range(rank)):
        along = lax.broadcasted_iota(jnp.int32, linear.shape, len(where) + axis)
        linear += (along + first[axis].reshape((*where, *[1] * rank))) * jnp.int32(step)
        step = shape[axis] * step
    return jnp.where(inside.reshape((*where, *[1] * rank)), linear, jnp.int32(step))


def _padded(e: GraphEmitter, x: Value, value: Any) -> Value:
    """x as a flat array, with one more element at the end, where places outside lead."""
    return e.concat([e.reshape(x, (math.prod(x.shape),)), np.full((1,), value, x.dtype)], 0)


def gathered(e: GraphEmitter, node: FlatEquation, x: Value, indices: Value) -> Value:
    """A gather of any windows, element by element."""
    d = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    mode = node.params["mode"]
    batch = list(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    mode = Mode.CLIP if mode == Mode.PROMISE_IN_BOUNDS else mode  # as XLA does
    (places,) = traced(
        e, lambda i: _linear(x.shape, sizes, d.start_index_map, batch, i, mode), indices
    )
    out = node.outputs[0]
    rank = len(indices.shape) - 1
    dropped = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    kept = [n for axis, n in enumerate(sizes) if axis not in dropped]
    places = e.reshape(places, (*indices.shape[:-1], *kept))
    picked = e.op(
        "Gather", [_padded(e, x, filling(node, x)), places], places.shape, x.dtype, axis=0
    )
    order = [0] * len(out.shape)
    others = [k for k in range(len(out.shape)) if k not in d.offset_dims]
    for k, axis in enumerate([*others, *d.offset_dims]):
        order[axis] = k
    assert len(others) == rank
    return e.transpose(picked, order)


def filling(node: FlatEquation, x: Value) -> Any:
    """The value of places outside."""
    fill = node.params["fill_value"]
    if fill is not None:
        return fill
    if is_floating(x):
        return np.nan
    if x.dtype == bool:
        return True
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return np.iinfo(x.dtype).min
    return np.iinfo(x.dtype).max


_SCATTERS = {
    "scatter": "none",
    "scatter-add": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}


@rule(*_SCATTERS, "scatter-sub")
def scatter_rule(
    e: GraphEmitter,
    node: FlatEquation,
    x,
    indices,
    updates,
):
    d = node.params["dimension_numbers"]
    mode = node.params["mode"]
    way = "add" if node.name == "scatter-sub" else _SCATTERS[node.name]
    if way in ("min", "max") and e.root.opset < 18:
        raise ConversionError("it needs the operator set 18")
    if node.name == "scatter-sub":
        updates = e.op("Neg", [updates], updates.shape, updates.dtype)
    dropped = (*d.inserted_window_dims, *d.operand_batching_dims)
    axes = iter(d.update_window_dims)
    window = []
    for axis in range(len(x.shape)):
        window.append(1 if axis in dropped else updates.shape[next(axes)])
    batch = list(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
    (places,) = traced(
        e,
        lambda i: _linear(x.shape, window, d.scatter_dims_to_operand_dims, batch, i, mode),
        indices,
    )
    others = []
    for k in range(len(updates.shape)):
        if k not in d.update_window_dims:
            others.append(k)
    updates = e.transpose(updates, [*others, *d.update_window_dims])
    count = math.prod(updates.shape)
    flat = _padded(e, x, 0)
    inputs = [flat, e.reshape(places, (count,)), e.reshape(updates, (count,))]
    written = e.op("ScatterElements", inputs, flat.shape, x.dtype, axis=0, reduction=way)
    written = e.op("Slice", [written, ints(0), ints(-1), ints(0)], (flat.shape[0] - 1,), x.dtype)
    return e.reshape(written, x.shape)


def _largest(
    e: GraphEmitter,
    x: Value,
    axis: int,
    count: Any,
    largest: int,
) -> tuple[Value, Value]:
    """The first `count` values along an axis in order, and their indices; equal values stay in order."""
    dtype = x.dtype
    if x.dtype == bool:
        x = e.cast(x, np.int32)
    shape = []
    for k, size in enumerate(x.shape):
        shape.append(count if k == axis else size)
    wanted = e.reshape(e.size(count), (1,))
    values, index = e.ops(
        "TopK", [x, wanted], [(shape, x.dtype), (shape, np.int64)], axis=axis, largest=largest
    )
    return e.cast(values, dtype), index


@rule("sort")
def _(e: GraphEmitter, node: FlatEquation, *values):
    """By each key, the last one first: equal ones stay in order."""
    axis = node.params["dimension"]
    order = None
    for key in reversed(values[: node.params["num_keys"]]):
        if order is None:
            here = key
        else:
            here = e.op("GatherElements", [key, order], key.shape, key.dtype, axis=axis)
        ordered, index = _largest(e, here, axis, key.shape[axis], 0)
        if order is None:
            order = index
        else:
            order = e.op("GatherElements", [order, index], key.shape, np.int64, axis=axis)
    if len(values) == 1:
        return ordered
    return tuple(e.op("GatherElements", [v, order], v.shape, v.dtype, axis=axis) for v in values)


@rule("top_k")
def _(e: GraphEmitter, node: FlatEquation, x):
    largest, index = _largest(e, x, node.params.get("axis", len(x.shape) - 1), node.params["k"], 1)
    return largest, e.cast(index, node.outputs[1].dtype)


_RUNNING: dict[str, tuple[Callable, Any]] = {
    "cumprod": (lambda a, b: a * b, 1),
    "cummax": (jnp.maximum, -np.inf),
    "cummin": (jnp.minimum, np.inf),
    "cumlogsumexp": (jnp.logaddexp, -np.inf),
}


@rule(*_RUNNING)
def _(e: GraphEmitter, node: FlatEquation, x):
    """A Scan along the axis."""
    function, start = _RUNNING[node.name]
    axis = node.params["axis"]
    reverse = int(node.params["reverse"])
    if np.isinf(start) and not is_floating(x):
        if start < 0:
            start = np.iinfo(x.dtype).min
        else:
            start = np.iinfo(x.dtype).max
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])

    def body(e: GraphEmitter, refs: Sequence[Value]) -> list[Value]:
        (new,) = traced(e, function, *refs)
        return [new, new]

    graph, _ = e.inner("step", [(shape, x.dtype)] * 2, body)
    first = e.expand(np.full((1,) * len(shape), start, x.dtype), shape)
    options = {
        "scan_input_axes": [axis],
        "scan_output_axes": [axis],
        "scan_input_directions": [reverse],
        "scan_output_directions": [reverse],
    }
    types = [(shape, x.dtype), (x.shape, x.dtype)]
    return e.ops("Scan", [first, x], types, body=graph, num_scan_inputs=1, **options)[1]
