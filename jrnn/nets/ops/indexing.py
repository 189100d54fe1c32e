"""Gathering and scattering by blobs of indices, one-hot codes, and sparse data made dense.

Shapes: with `match_outer` the indices have the dimensions of the data before the axis too, and each outer element has its
own indices; without, all elements share them.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.autodiff import GradientSlice
from jrnn.nets.ir import Ints
from jrnn.nets.memory import check_size
from jrnn.nets.ops.lengths import check_lengths, per_row, segment_ids
from jrnn.nets.ops.values import (
    STRINGS,
    as_float,
    canonical_axis,
    check_indices,
    check_integers,
    check_rank,
    check_shape,
    describe,
    known_integer,
    scalar,
)
from jrnn.nets.ops.vjp import pulled_back
from jrnn.nets.registry import SAVE, SEED, gradient, op


def _check(data: Any, indices: Any, axis: int, match_outer: bool) -> tuple[int, int]:
    """The axis counted from the front, and how many outer dimensions the indices have."""
    axis = canonical_axis(axis, data.ndim)
    check_integers(indices, "indices")
    outer = axis if match_outer else 0
    if indices.shape[:outer] != data.shape[:outer]:
        raise OpError(
            f"indices are {describe(indices)}; with match_outer=1 their first {outer} dimensions must equal data's, "
            f"{list(data.shape[:outer])}"
        )
    return axis, outer


def _wrapped(indices: Any, size: int) -> Any:
    """Indices in [0, size), for indices that count from the end where they are negative."""
    where = np.where if isinstance(indices, np.ndarray) else jnp.where
    return where(indices < 0, indices + size, indices)


def _gathered(data: Any, indices: Any, axis: int, outer: int) -> Any:
    if data.shape[axis] == 0:
        return data  # compat: an empty axis gives the empty data, whatever the indices
    if data.size:
        check_indices(indices, data.shape[axis])
    if data.dtype.kind in STRINGS:
        return np.take(data, np.asarray(indices), axis=axis)
    if outer == 0:
        return jnp.take(data, indices, axis=axis, mode="fill")
    shape = (*indices.shape, *data.shape[axis + 1 :])
    ones = (1,) * (data.ndim - axis - 1)
    flat = jnp.reshape(
        indices, (*indices.shape[:outer], int(np.prod(indices.shape[outer:])), *ones)
    )
    return jnp.reshape(jnp.take_along_axis(data, flat, axis=axis, mode="fill"), shape)


@op("Gather")
def gather(
    data, indices, *, axis: int = 0, match_outer: bool = False, dense_gradient: bool = False
):
    """Slices of `data` at `indices`; negative indices count from the end.

    The gradient is sparse, indices and slices, unless `dense_gradient` is set.
    """
    axis, outer = _check(data, indices, axis, match_outer)
    return _gathered(data, _wrapped(indices, data.shape[axis]), axis, outer)


@gradient("Gather")
def _(g):
    if g.arg("axis", 0):
        g.emit("BatchGatherGradient", [g.input(0), g.input(1), g.grad_output(0)], [g.grad_input(0)])
    elif g.arg("dense_gradient", 0):
        g.emit("SparseToDense", [g.input(1), g.grad_output(0), g.input(0)], [g.grad_input(0)])
    else:
        g.set_grad(0, GradientSlice(g.input(1), g.grad_output(0)))


@op("BatchGather", gradient="BatchGatherGradient(data, indices, dy)")
def batch_gather(data, indices, *, match_outer: bool = False):
    axis, outer = _check(data, indices, 1, match_outer)
    return _gathered(data, indices, axis, outer)


@op("BatchGatherGradient")
def batch_gather_gradient(data, indices, dy, *, axis: int = 1, match_outer: bool = False):
    """Adds up `dy` at the indices that it was gathered from, in the shape of `data`."""
    axis, outer = _check(data, indices, axis, match_outer)
    indices = _wrapped(indices, data.shape[axis])
    return pulled_back(lambda x: _gathered(x, indices, axis, outer), data, dy)


def _slices(data: Any, indices: Any, slices: Any) -> Any:
    """Checked slices [K, ...] for the rows `indices` [K] of data [N, ...], in their shape."""
    check_rank(indices, 1, "indices")
    check_indices(indices, data.shape[0])
    if slices.dtype != data.dtype or slices.size != indices.size * int(np.prod(data.shape[1:])):
        raise OpError(
            f"data is {describe(data)}, indices are {describe(indices)}, the slices {describe(slices)}; they must hold the "
            "same type, and one row for each index"
        )
    return jnp.reshape(slices, (indices.size, *data.shape[1:]))


@op("ScatterAssign", inplace={0: 0})
def scatter_assign(data, indices, slices):
    return jnp.asarray(data).at[indices].set(_slices(data, indices, slices))


@gradient("ScatterAssign")
def _(g):
    """Caffe2 has no gradient of ScatterAssign. Rows that are written twice are not defined, nor are their gradients."""
    indices = g.input(1)
    dy = g.grad_output(0)
    rows = g.grad_input(2)
    zeros = g.temporary(dy + "_zeros")
    g.emit("Gather", [dy, indices], [rows], copy_args=False)
    g.emit(SEED, [rows], [zeros], copy_args=False, value=0.0)
    kept = g.temporary(dy + "_kept")
    g.emit(SAVE, [dy], [kept], copy_args=False)
    g.emit("ScatterAssign", [kept, indices, zeros], [kept], copy_args=False)
    g.emit(SAVE, [kept], [g.grad_input(0)], copy_args=False)


@op("ScatterWeightedSum", gradient="forbidden", inplace={0: 0})
def scatter_weighted_sum(x, w, indices, *pairs):
    """Multiplies rows of x at `indices` by w (once per occurrence), and adds w_k times slices_k, for X1, w1, X2, w2, ..."""
    if not pairs or len(pairs) % 2:
        raise OpError(
            f"takes slices and their weights in pairs after the indices, was given {len(pairs)} more inputs"
        )
    y = as_float(x).at[indices].multiply(scalar(w, "a weight"))
    for slices, weight in zip(pairs[::2], pairs[1::2]):
        y = y.at[indices].add(_slices(x, indices, slices) * scalar(weight, "a weight"))
    return y


@op("Scatter", gradient="forbidden", inplace={0: 0})
def scatter(data, indices, updates, *, axis: int = 1):
    """Writes `updates` to `data` at their own positions, except along `axis`, where `indices` are the positions.

    The dimensions before the axis count as one dimension, and the dimensions after it as another.
    """
    over = canonical_axis(axis, data.ndim)
    check_shape(updates, indices.shape, "updates")
    check_indices(indices, data.shape[over])

    def around(x: Any) -> tuple[int, int, int]:
        return math.prod(x.shape[:over]), x.shape[over], math.prod(x.shape[over + 1 :])

    if (
        indices.ndim != data.ndim
        or around(indices)[0] > around(data)[0]
        or around(indices)[2] > around(data)[2]
    ):
        raise OpError(
            f"indices are {describe(indices)}, data {describe(data)}; they must fit in data, except along the axis"
        )
    outer, _, inner = jnp.indices(around(indices), sparse=True)
    along = jnp.reshape(indices, around(indices))
    flat = (
        jnp.reshape(data, around(data))
        .at[outer, along, inner]
        .set(jnp.reshape(updates, along.shape))
    )
    return jnp.reshape(flat, data.shape)


@op("OneHot", gradient="stops", dynamic=True)
def one_hot(indices, index_size):
    """[N] -> [N, index_size]; 1 at the index of each row."""
    check_rank(indices, 1, "indices")
    size = known_integer(index_size, "index_size")
    check_size((indices.size, size), np.float32)
    check_indices(indices, size)
    return (indices[:, None] == np.arange(size, dtype=indices.dtype)[None, :]).astype(np.float32)


@op("BatchOneHot", gradient="stops")
def batch_one_hot(data, lengths, values):
    """One-hot codes of the columns of `data` [N, D], side by side.

    Column d is coded by lengths[d] of the values: [N, sum of lengths], 1 where an element equals the value.
    """
    check_rank(data, 2, "data")
    check_rank(values, 1, "values")
    check_shape(lengths, data.shape[1:], "lengths")
    check_lengths(lengths, values.size)
    if data.dtype != values.dtype or data.dtype.kind not in "iu":
        raise OpError(
            f"data is {describe(data)}, values {describe(values)}; both must hold integers of one type"
        )
    column = segment_ids(lengths, values.size)
    return (jnp.take(data, column, axis=1) == values[None, :]).astype(data.dtype)


@op("SegmentOneHot", gradient="stops", dynamic=True)
def segment_one_hot(lengths, indices, index_size):
    """Segments of indices -> for each a row of index_size numbers, 1 at the indices of the segment."""
    check_lengths(lengths, indices.size)
    size = known_integer(index_size, "index_size")
    check_size((lengths.size, size), np.float32)
    check_indices(indices, size)
    return (
        jnp.zeros((lengths.size, size), np.float32)
        .at[segment_ids(lengths, indices.size), indices]
        .set(1)
    )


@op("SparseToDense", dynamic=True)
def sparse_to_dense(indices, values, like=None):
    """Adds `values` [K, ...] up in the rows `indices` [K]; there are as many rows as in `like`, or as the indices need."""
    check_rank(indices, 1, "indices")
    check_integers(indices, "indices")
    if values.ndim == 0 or values.shape[0] != indices.size or values.dtype.kind == "b":
        raise OpError(
            f"values are {describe(values)}; they must be numbers, a row for each of {indices.size} indices"
        )
    if like is None:
        known = np.asarray(indices)
        rows = int(known.max()) + 1 if known.size else 0
    else:
        rows = like.shape[0]
    check_indices(indices, rows)
    return (
        jnp.zeros(check_size((rows, *values.shape[1:]), values.dtype), values.dtype)
        .at[indices]
        .add(values)
    )


@gradient("SparseToDense")
def _(g):
    g.emit("Gather", [g.grad_output(0), g.input(0)], [g.grad_input(1)], copy_args=False)


def _last_entries(indices: Any, lengths: Any, mask: Ints) -> Any:
    """The last entry of each cell of a dense table, -1 of an empty one.

    The row of an entry is its segment, the column is the place of its id in the mask.
    """
    if not mask or len(set(mask)) < len(mask):
        raise OpError(f"argument 'mask' is {list(mask)}; it must hold ids, each once")
    check_rank(indices, 1, "indices")
    check_integers(indices, "indices")
    rows = 1
    row = jnp.zeros(indices.size, int)
    if lengths is not None:
        check_lengths(lengths, indices.size)
        rows = lengths.size
        row = segment_ids(lengths, indices.size)
    same = jnp.asarray(indices)[:, None] == jnp.asarray(mask, indices.dtype)[None, :]
    cell = jnp.where(same.any(1), row * len(mask) + jnp.argmax(same, 1), rows * len(mask))
    return (
        jnp.full(rows * len(mask), -1, cell.dtype)
        .at[cell]
        .max(jnp.arange(indices.size), mode="drop")
    )


@op(
    "SparseToDenseMask",
    outputs=(1, 2),
    gradient="SparseToDenseMaskGradient(indices, dy, lengths) -> values",
)
def sparse_to_dense_mask(
    indices,
    values,
    default_value,
    lengths=None,
    *,
    mask: Ints,
    return_presence_mask: bool = False,
):
    """The values of the ids in `mask`, in its order; `default_value` for missing ids.

    indices [K], values [K, ...], default_value [...] -> [len(mask), ...]; with lengths [B], [B, len(mask), ...]. The second
    output tells which ids are present.
    """
    check_shape(default_value, values.shape[1:], "default_value")
    if values.shape[:1] != indices.shape:
        raise OpError(
            f"values are {describe(values)}; there must be one for each of {indices.size} indices"
        )
    entry = _last_entries(indices, lengths, mask)
    shape = (len(mask),) if lengths is None else (lengths.size, len(mask))
    present = entry >= 0
    default = jnp.broadcast_to(default_value, (entry.size, *values.shape[1:]))
    if values.shape[0]:
        default = jnp.where(per_row(present, default), values[entry], default)
    return jnp.reshape(default, shape + values.shape[1:]), jnp.reshape(present, shape)


@op("SparseToDenseMaskGradient")
def sparse_to_dense_mask_gradient(
    indices, dy, lengths=None, *, mask: Ints, return_presence_mask: bool = False
):
    zero = jnp.zeros(dy.shape[1 if lengths is None else 2 :], dy.dtype)
    values = jnp.broadcast_to(zero, (indices.size, *zero.shape))
    return pulled_back(
        lambda v: sparse_to_dense_mask(indices, v, zero, lengths, mask=mask)[0], values, dy
    )
