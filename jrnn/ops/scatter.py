"""Writing and adding slices at indices, one-hot codes, and sparse data made dense."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.lengths import check_lengths, per_row, segment_ids
from jrnn.ops.values import (
    as_float,
    canonical_axis,
    check_indices,
    check_integers,
    check_rank,
    check_shape,
    check_size,
    describe,
)
from jrnn.registry import gradient, op


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


@op("ScatterAssign", gradient="forbidden", inplace={0: 0})
def scatter_assign(data, indices, slices):
    return jnp.asarray(data).at[indices].set(_slices(data, indices, slices))


@op("ScatterWeightedSum", gradient="forbidden", inplace={0: 0})
def scatter_weighted_sum(x, w, indices, *pairs):
    """Rows of x at `indices` times w (each time that an index is named), plus w_k times slices_k, for X1, w1, X2, w2, ..."""
    if not pairs or len(pairs) % 2:
        raise OpError(f"takes slices and their weights in pairs after the indices, was given {len(pairs)} more inputs")
    if any(v.size != 1 for v in (w, *pairs[1::2])):
        raise OpError("a weight must have 1 element")
    y = jnp.asarray(as_float(x)).at[indices].multiply(jnp.reshape(w, ()))
    for slices, weight in zip(pairs[::2], pairs[1::2]):
        y = y.at[indices].add(_slices(x, indices, slices) * jnp.reshape(weight, ()))
    return y


@op("Scatter", gradient="forbidden", inplace={0: 0})
def scatter(data, indices, updates, *, axis: int = 1):
    """Writes `updates` to `data` at positions that are their own, but along `axis` are the `indices`.

    The dimensions before the axis count as one, and so do those after it.
    """
    over = canonical_axis(axis, data.ndim)
    check_shape(updates, indices.shape, "updates")
    check_indices(indices, data.shape[over])

    def around(x: Any) -> tuple[int, int, int]:
        return math.prod(x.shape[:over]), x.shape[over], math.prod(x.shape[over + 1 :])

    if indices.ndim != data.ndim or around(indices)[0] > around(data)[0] or around(indices)[2] > around(data)[2]:
        raise OpError(
            f"indices are {describe(indices)}, data is {describe(data)}; they must fit in data, but for the axis"
        )
    outer, _, inner = jnp.indices(around(indices), sparse=True)
    along = jnp.reshape(indices, around(indices))
    flat = jnp.reshape(data, around(data)).at[outer, along, inner].set(jnp.reshape(updates, along.shape))
    return jnp.reshape(flat, data.shape)


def _number(blob: Any, name: str) -> int:
    check_integers(blob, name)
    if blob.size != 1:
        raise OpError(f"{name} is {describe(blob)}; it must have 1 element")
    return int(np.asarray(blob).reshape(()))


@op("OneHot", gradient="stops", dynamic=True)
def one_hot(indices, index_size):
    """[N] -> [N, index_size]; 1 at the index of each row."""
    check_rank(indices, 1, "indices")
    size = _number(index_size, "index_size")
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
            f"data is {describe(data)} and values are {describe(values)}; both must hold integers of one type"
        )
    column = segment_ids(lengths, values.size)
    return (jnp.take(data, column, axis=1) == values[None, :]).astype(data.dtype)


@op("SegmentOneHot", gradient="stops", dynamic=True)
def segment_one_hot(lengths, indices, index_size):
    """Segments of indices -> for each, a row of index_size numbers with 1 at every index in it."""
    check_lengths(lengths, indices.size)
    size = _number(index_size, "index_size")
    check_size((lengths.size, size), np.float32)
    check_indices(indices, size)
    return jnp.zeros((lengths.size, size), np.float32).at[segment_ids(lengths, indices.size), indices].set(1)


@op("SparseToDense", dynamic=True)
def sparse_to_dense(indices, values, like=None):
    """Adds up `values` [K, ...] in the rows `indices` [K]; there are as many rows as in `like`, or as the indices need."""
    check_rank(indices, 1, "indices")
    check_integers(indices, "indices")
    if values.ndim == 0 or values.shape[0] != indices.size or values.dtype.kind == "b":
        raise OpError(f"values are {describe(values)}; they must be numbers, a row for each of {indices.size} indices")
    if like is None:
        known = np.asarray(indices)
        rows = int(known.max()) + 1 if known.size else 0
    else:
        rows = like.shape[0]
    check_indices(indices, rows)
    return jnp.zeros(check_size((rows, *values.shape[1:]), values.dtype), values.dtype).at[indices].add(values)


@gradient("SparseToDense")
def _(g):
    g.emit("Gather", [g.grad_output(0), g.input(0)], [g.grad_input(1)], copy_args=False)


class _Table:
    """Where entries go in a dense table: to the row of their segment and the column of their id in the mask."""

    def __init__(self, indices: Any, lengths: Any, mask: tuple[int, ...]):
        if not mask or len(set(mask)) < len(mask):
            raise OpError(f"argument 'mask' is {list(mask)}; it must hold ids, each once")
        check_rank(indices, 1, "indices")
        check_integers(indices, "indices")
        count, self.columns = indices.size, len(mask)
        self.rows = 1 if lengths is None else lengths.size
        row = jnp.zeros(count, int) if lengths is None else segment_ids(lengths, count)
        if lengths is not None:
            check_lengths(lengths, count)
        same = jnp.asarray(indices)[:, None] == jnp.asarray(mask, indices.dtype)[None, :]
        cells = self.rows * self.columns
        self.cell = jnp.where(same.any(1), row * self.columns + jnp.argmax(same, 1), cells)
        # of several entries for a cell, the last one counts; a cell without any has -1
        order = jnp.arange(count, dtype=self.cell.dtype)
        self.entry = jnp.full(cells, -1, self.cell.dtype).at[self.cell].max(order, mode="drop")

    def counts(self) -> Any:
        """Whether each entry is the one that counts for its cell."""
        return self.entry.at[self.cell].get(mode="fill", fill_value=-1) == jnp.arange(self.cell.size)


@op("SparseToDenseMask", outputs=(1, 2), gradient="SparseToDenseMaskGradient(indices, dy, lengths) -> values")
def sparse_to_dense_mask(
    indices, values, default_value, lengths=None, *, mask: tuple[int, ...], return_presence_mask: bool = False
):
    """The values of the ids in `mask`, in its order; `default_value` for an id that is missing.

    indices [K], values [K, ...], default_value [...] -> [len(mask), ...]; with lengths [B], [B, len(mask), ...]. The second
    output says which ids were there.
    """
    check_shape(default_value, values.shape[1:], "default_value")
    if values.shape[:1] != indices.shape:
        raise OpError(f"values are {describe(values)}; there must be one for each of {indices.size} indices")
    table = _Table(indices, lengths, mask)
    shape = (table.columns,) if lengths is None else (table.rows, table.columns)
    present = table.entry >= 0
    default = jnp.broadcast_to(default_value, (table.entry.size, *values.shape[1:]))
    if values.shape[0]:
        default = jnp.where(per_row(present, default), values[table.entry], default)
    return jnp.reshape(default, shape + values.shape[1:]), jnp.reshape(present, shape)


@op("SparseToDenseMaskGradient")
def sparse_to_dense_mask_gradient(
    indices, dy, lengths=None, *, mask: tuple[int, ...], return_presence_mask: bool = False
):
    table = _Table(indices, lengths, mask)
    inner = dy.shape[1 if lengths is None else 2 :]
    cells = jnp.reshape(dy, (table.rows * table.columns, *inner))
    taken = cells.at[table.cell].get(mode="fill", fill_value=0)
    return jnp.where(per_row(table.counts(), taken), taken, 0)
