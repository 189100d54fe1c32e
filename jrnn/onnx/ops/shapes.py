"""Operators that make, move and pick elements. Random numbers are drawn from the key of the call or from a seed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import TensorProto, helper

from jrnn.errors import ConversionError
from jrnn.nets.memory import check_size
from jrnn.nn.checks import concrete
from jrnn.onnx.graph import OnnxNode, known, op, xp


# Sequences and optionals are lists, and values or None, while the graph is traced.
@op("Concat")
def _(node, *values):
    return xp(*values).concatenate(values, axis=node.get("axis", 1))


@op("Expand")
def _(node, x, shape):
    return xp(x).broadcast_to(x, np.broadcast_shapes(x.shape, node.ints("shape", shape)))


@op("NonZero")
def _(node, x):
    return np.asarray(np.nonzero(node.known(x, "its input")), np.int64)


@op("Optional")
def _(node, value=None):
    return value


@op("OptionalHasElement")
def _(node, value=None):
    return np.asarray(value is not None)


@op("SequenceAt")
def _(node, sequence, position):
    return sequence[_position(node, position)]


@op("SequenceConstruct")
def _(node, *values):
    return list(values)


@op("SequenceEmpty")
def _(node):
    return []


@op("SequenceLength")
def _(node, sequence):
    return np.asarray(len(sequence), np.int64)


@op("Shape")
def _(node, x):
    return np.asarray(x.shape, np.int64)[slice(node.get("start", 0), node.get("end"))]


@op("Size")
def _(node, x):
    return np.asarray(math.prod(x.shape), np.int64)


@op("Squeeze")
def _(node, x, axes=None):
    return xp(x).squeeze(x, node.ints("axes", axes))


@op("Transpose")
def _(node, x):
    return xp(x).transpose(x, node.get("perm"))


@op("Unsqueeze")
def _(node, x, axes=None):
    return xp(x).expand_dims(x, node.ints("axes", axes))


@op("EyeLike")
def _(node, x):
    code = node.get("dtype")
    return np.eye(
        *check_size(x.shape, np.float64),
        k=node.get("k", 0),
        dtype=x.dtype if code is None else helper.tensor_dtype_to_np_dtype(code),
    )


def _position(node: OnnxNode, position) -> int:
    return int(node.known(position, "position").item())


@op("Tile")
def _(node, x, repeats):
    counts = node.ints("repeats", repeats)
    if known(x):
        check_size([size * times for size, times in zip(x.shape, counts)], x.dtype)
    return xp(x).tile(x, counts)


@op("Reshape")
def _(node, x, shape=None):
    sizes = node.ints("shape", shape)
    if not node.get("allowzero", 0):
        sizes = [size or x.shape[k] for k, size in enumerate(sizes)]
    return x.reshape(tuple(sizes))


@op("Flatten")
def _(node, x):
    axis = node.get("axis", 1)
    return x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("Split")
def _(node, x, split=None):
    axis = node.get("axis", 0)
    sizes = node.ints("split", split)
    count = len(node.outputs)
    if sizes is None:
        piece = math.ceil(x.shape[axis] / count)
        sizes = []
        for k in range(count):
            sizes.append(min(piece, x.shape[axis] - k * piece))
    if sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise ValueError(
            f"split {list(sizes)} does not sum to the size {x.shape[axis]} of axis {axis}"
        )
    return tuple(xp(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis))


@op("Slice")
def _(
    node,
    x,
    starts=None,
    ends=None,
    axes=None,
    steps=None,
):
    starts = node.ints("starts", starts)
    ends = node.ints("ends", ends)
    axes = node.ints("axes", axes) or range(len(starts))
    steps = node.ints("steps", steps) or [1] * len(starts)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 0 and end < -x.shape[axis]:
            end = None  # including the first element
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _inside(node, indices, size):
    """Indices from 0 to `size`: negative ones count from the end; `size` stands for an index out of range.

    Raises:
        ConversionError: for indices that are known and out of range.
    """
    values = concrete(indices)
    if values is not None and values.size and not -size <= values.min() <= values.max() < size:
        wrong = values[(values < -size) | (values >= size)].ravel()[0]
        raise ConversionError(
            f"{node}: the index {wrong} is out of range of an axis of size {size}"
        )
    if known(indices):
        return np.where(indices < 0, indices + size, indices)
    is_inside = (indices >= -size) & (indices < size)
    return jnp.where(is_inside, jnp.where(indices < 0, indices + size, indices), size)


@op("Gather")
def _(node, x, indices):
    axis = node.get("axis", 0) % max(x.ndim, 1)
    indices = _inside(node, indices, x.shape[axis])
    if not x.shape[axis] and np.size(indices):  # as in a body that runs for no steps
        nothing = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        x = jnp.full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), nothing, x.dtype)
    if known(x, indices):
        return np.take(x, indices, axis=axis)
    return jnp.take(jnp.asarray(x), jnp.asarray(indices), axis=axis, mode="fill")


@op("GatherElements")
def _(node, x, indices):
    axis = node.get("axis", 0)
    return xp(x, indices).take_along_axis(x, _inside(node, indices, x.shape[axis]), axis=axis)


@op("GatherND")
def _(node, x, indices):
    def pick(x, *indices):
        return x.at[indices].get(mode="fill")

    batch = node.get("batch_dims", 0)
    sizes = x.shape[batch : batch + indices.shape[-1]]
    parts = []
    for k, size in enumerate(sizes):
        parts.append(jnp.asarray(_inside(node, indices[..., k], size)))
    for _ in range(batch):
        pick = jax.vmap(pick)
    return pick(jnp.asarray(x), *parts)


def _scatter(node, x, index, updates):
    at = jnp.asarray(x).at[tuple(index)]
    write = {"none": at.set, "add": at.add, "mul": at.multiply, "max": at.max, "min": at.min}
    return write[node.get("reduction", "none")](updates)


@op("ScatterND")
def _(node, x, indices, updates):
    return _scatter(
        node,
        x,
        [_inside(node, indices[..., k], x.shape[k]) for k in range(indices.shape[-1])],
        updates,
    )


@op("ScatterElements", "Scatter")
def _(node, x, indices, updates):
    axis = node.get("axis", 0)
    index = list(jnp.indices(indices.shape, sparse=True))
    index[axis] = _inside(node, indices, x.shape[axis])
    return _scatter(node, x, index, updates)


@op("Pad")
def _(
    node,
    x,
    pads=None,
    value=None,
    axes=None,
):
    pads = node.ints("pads", pads)
    mode = node.get("mode", "constant")
    axes = node.ints("axes", axes) or range(x.ndim)
    widths = np.zeros((x.ndim, 2), int)
    widths[list(axes)] = np.reshape(pads, (2, -1)).T
    if (widths < 0).any():  # negative widths crop
        kept = []
        for (low, high), size in zip(widths, x.shape):
            kept.append(slice(max(-low, 0), size - max(-high, 0)))
        x = x[tuple(kept)]
        widths = np.maximum(widths, 0)
    if known(x):
        check_size((widths.sum(axis=1) + x.shape).tolist(), x.dtype)
    if mode != "constant":
        return xp(x).pad(x, widths, mode)
    if value is None:
        value = node.get("value", 0)
    else:
        value = value.reshape(())
    return (np if known(x, np.asarray(value)) else jnp).pad(x, widths, constant_values=value)


@op("ConstantOfShape")
def _(node, shape):
    value = np.asarray(node.get("value", np.zeros(1, np.float32))).reshape(())
    return np.full(check_size(node.ints("shape", shape), value.dtype), value)


@op("Range")
def _(node, start, limit, delta):
    dtype = node.known(start, "start").dtype
    first = start.item()
    end = node.known(limit, "limit").item()
    step = node.known(delta, "delta").item()
    check_size((max(0, math.ceil((end - first) / step)),), dtype)
    return np.arange(first, end, step).astype(dtype)


@op("OneHot")
def _(node, indices, depth, values):
    depth = int(node.known(depth, "depth").item())
    axis = node.get("axis", -1)
    indices = jnp.asarray(indices).astype(jnp.int32)
    hot = jax.nn.one_hot(
        jnp.where(indices < 0, indices + depth, indices), depth, axis=axis, dtype=bool
    )
    return jnp.where(hot, values[1], values[0])


@op("Trilu")
def _(node, x, k=None):
    if k is None:
        k = 0
    else:
        k = int(node.known(k, "k").item())
    return (xp(x).triu if node.get("upper", 1) else xp(x).tril)(x, k)


@op("ReverseSequence")
def _(node, x, lengths):
    time = node.get("time_axis", 0)
    batch = node.get("batch_axis", 1)
    moved = jnp.moveaxis(jnp.asarray(x), (batch, time), (0, 1))
    steps = jnp.arange(moved.shape[1])
    lengths = jnp.asarray(lengths)[:, None]
    index = jnp.where(steps[None] < lengths, lengths - 1 - steps[None], steps[None])
    rows = jax.vmap(lambda row, k: row[k])(moved, index)
    return jnp.moveaxis(rows, (0, 1), (batch, time))


@op("CumSum", "CumProd")
def _(node, x, axis):
    axis = int(node.known(axis, "axis").item()) % x.ndim
    running = lax.cumsum if node.type == "CumSum" else lax.cumprod
    if node.get("reverse"):
        x = jnp.flip(x, axis)
    else:
        x = jnp.asarray(x)
    total = running(x, axis)
    if node.get("exclusive"):  # the neutral element comes first
        total = lax.slice_in_dim(total, 0, max(x.shape[axis] - 1, 0), axis=axis)
        first = min(x.shape[axis], 1)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (first, 0)
        total = jnp.pad(total, widths, constant_values=node.type == "CumProd")
    if node.get("reverse"):
        return jnp.flip(total, axis)
    return total


@op("Compress")
def _(node, x, condition):
    axis = node.get("axis")
    if axis is None:
        x = x.reshape(-1)
    return xp(x).compress(node.known(condition, "condition"), x, axis=0 if axis is None else axis)


@op("Unique")
def _(node, x):
    x = node.known(x, "its input")
    axis = node.get("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    if not node.get("sorted", 1):
        order = np.argsort(first)
        places = np.argsort(order)
        values = np.take(values, order, axis or 0)
        first = first[order]
        counts = counts[order]
        inverse = places[inverse]
    return (values, *(v.reshape(-1).astype(np.int64) for v in (first, inverse, counts)))


@op("TensorScatter")
def _(node, cache, update, starts=None):
    """Each row of the batch gets its update from its start on."""
    axis = node.get("axis", -2) % cache.ndim
    if starts is None:
        starts = jnp.zeros(cache.shape[:1], int)
    else:
        starts = jnp.asarray(starts)
    at = starts[:, None] + np.arange(update.shape[axis])[None]
    at = at % cache.shape[axis] if node.get("mode", "linear") == "circular" else at
    moved = jnp.moveaxis(jnp.asarray(cache), axis, 1)
    new = jnp.moveaxis(jnp.asarray(update), axis, 1)
    return jnp.moveaxis(moved.at[np.arange(cache.shape[0])[:, None], at].set(new), 1, axis)


@op("TopK")
def _(node, x, k=None):
    (count,) = node.ints("k", k)
    axis = node.get("axis", -1)
    x = jnp.asarray(x)
    order = jnp.argsort(x, axis=axis, stable=True, descending=bool(node.get("largest", 1)))
    index = lax.slice_in_dim(order, 0, count, axis=axis % x.ndim)
    return jnp.take_along_axis(x, index, axis=axis), index


@op("SequenceInsert")
def _(node, sequence, value, position=None):
    if position is None:
        at = len(sequence)
    else:
        at = _position(node, position)
    if at < 0:
        at = at + len(sequence)
    return [*sequence[:at], value, *sequence[at:]]


@op("SequenceErase")
def _(node, sequence, position=None):
    if position is None:
        at = -1
    else:
        at = _position(node, position)
    left = list(sequence)
    del left[at]
    return left


@op("ConcatFromSequence")
def _(node, sequence):
    if node.get("new_axis", 0):
        join = xp(*sequence).stack
    else:
        join = xp(*sequence).concatenate
    return join(sequence, axis=node.get("axis"))


@op("SplitToSequence")
def _(node, x, split=None):
    axis = node.get("axis", 0)
    size = x.shape[axis]
    if split is None:
        sizes = [1] * size
    else:
        sizes = node.ints("split", split)
    if split is not None and np.ndim(split) == 0:
        sizes = [sizes[0]] * (size // sizes[0]) + [size % sizes[0]] * bool(size % sizes[0])
    parts = xp(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis)
    return [p if split is not None or node.get("keepdims", 1) else p.squeeze(axis) for p in parts]


@op("OptionalGetElement")
def _(node, value):
    if value is None:
        raise ConversionError(f"{node}: the optional is empty")
    return value


def _dtype(node, default):
    code = node.get("dtype")
    return jax.dtypes.canonicalize_dtype(
        default if code is None else helper.tensor_dtype_to_np_dtype(code)
    )


@op("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def _(node, like=None):
    shape = check_size(node.get("shape") if like is None else like.shape, jnp.float32)
    dtype = _dtype(node, jnp.float32 if like is None else like.dtype)
    if "Uniform" in node.type:
        return jax.random.uniform(
            node.random(), shape, dtype, node.get("low", 0.0), node.get("high", 1.0)
        )
    drawn = jax.random.normal(node.random(), shape, dtype)
    return drawn * jnp.asarray(node.get("scale", 1.0), dtype) + jnp.asarray(
        node.get("mean", 0.0), dtype
    )


@op("Bernoulli")
def _(node, x):
    """1 with the probability x. ONNX's function for it has 1 - x."""
    return jax.random.bernoulli(node.random(), jnp.asarray(x)).astype(_dtype(node, x.dtype))


@op("Multinomial")
def _(node, logits):
    """[N, C] -> indices [N, samples]."""
    shape = check_size((logits.shape[0], node.get("sample_size", 1)), jnp.int32)
    drawn = jax.random.categorical(node.random(), jnp.asarray(logits)[:, None], shape=shape)
    return drawn.astype(_dtype(node, helper.tensor_dtype_to_np_dtype(TensorProto.INT32)))
