"""Reductions of rows into segments that are named by a blob of segment ids, directly or after a gather.

Shapes: data [N, ...], segment_ids [N] -> [K, ...] for K segments. A Sparse operator gathers data [M, ...] at indices [N]
first, and its gradient is a slice: the indices, and the gradients of the rows gathered. Sorted ids run from 0 without gaps.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.autodiff import GradientSlice
from jrnn.errors import OpError
from jrnn.ops.lengths import per_row
from jrnn.ops.values import as_float, check_indices, check_integers, check_rank, check_shape, describe, is_concrete
from jrnn.registry import gradient, op


def _check_sorted(ids: Any) -> None:
    found = np.asarray(ids)
    if found.size and (found[0] != 0 or not np.isin(np.diff(found), (0, 1)).all()):
        raise OpError(f"segment_ids are {found.tolist()[:8]}; they must be sorted, begin at 0 and have no gaps")


def segment_count(ids: Any, rows: int, is_sorted: bool, num_segments: int = -1) -> int:
    """How many segments there are, with their ids checked; the values must be known unless num_segments says it."""
    check_rank(ids, 1, "segment_ids")
    check_integers(ids, "segment_ids")
    if ids.size != rows:
        raise OpError(f"segment_ids are {describe(ids)} for {rows} rows; each row must have one")
    if is_sorted:
        _check_sorted(ids)
    if num_segments < 0:
        known = np.asarray(ids)
        num_segments = int(known.max()) + 1 if known.size else 0
    check_indices(ids, num_segments, "segment_ids")
    return num_segments


def sum_of_segments(rows: Any, ids: Any, count: int) -> Any:
    return jax.ops.segment_sum(rows, ids, count)


def counts_of(ids: Any, count: int, like: Any) -> Any:
    """The number of rows of each segment, at least 1, in a shape that lies beside `like`."""
    ones = jax.ops.segment_sum(jnp.ones(ids.shape, like.dtype), ids, count)
    return per_row(jnp.maximum(ones, 1), like)


def mean_of_segments(rows: Any, ids: Any, count: int) -> Any:
    total = sum_of_segments(rows, ids, count)
    return total / counts_of(ids, count, total)


def _weighted(rows: Any, weights: Any) -> Any:
    """Rows times their weights [N], which get no gradient."""
    check_shape(weights, rows.shape[:1], "weights")
    return rows * per_row(jax.lax.stop_gradient(weights), rows)


def _gathered(data: Any, indices: Any) -> Any:
    check_rank(indices, 1, "indices")
    check_indices(indices, data.shape[0])
    return jnp.take(as_float(data), indices, axis=0, mode="fill")


def _spread(dy: Any, ids: Any, is_sorted: bool) -> Any:
    """The gradient of a sum: that of its segment for each row."""
    if is_sorted and is_concrete(ids):
        _check_sorted(ids)
    check_indices(ids, dy.shape[0], "segment_ids")
    return jnp.take(dy, ids, axis=0, mode="fill")


def _register(family: str, kind: str, reduced: Callable, is_sorted: bool) -> None:
    """Registers `familySegmentKind`, its sparse form, and their gradients, for a sum or a mean."""
    name = f"{family}Segment{kind}"

    @op(name, dynamic=True, gradient=f"{name}Gradient(dy, segment_ids)")
    def forward(data, segment_ids, *, num_segments: int = -1):
        count = segment_count(segment_ids, data.shape[0], is_sorted, num_segments)
        return reduced(as_float(data), segment_ids, count)

    @op("Sparse" + name, dynamic=True)
    def sparse(data, indices, segment_ids, *, num_segments: int = -1):
        count = segment_count(segment_ids, indices.size, is_sorted, num_segments)
        return reduced(_gathered(data, indices), segment_ids, count)

    @op(name + "Gradient")
    def backward(dy, segment_ids, *, num_segments: int = -1):
        if kind == "Mean":
            dy = dy / counts_of(segment_ids, dy.shape[0], dy)
        return _spread(dy, segment_ids, is_sorted)

    @gradient("Sparse" + name)
    def _(g):
        rows = g.grad_input_slice(0).values
        g.emit(name + "Gradient", [g.grad_output(0), g.input(2)], [rows])
        g.set_grad(0, GradientSlice(g.input(1), rows))


def _register_weighted(family: str, is_sorted: bool) -> None:
    """Registers `familySegmentWeightedSum`, its sparse form, and their gradients."""
    name = f"{family}SegmentWeightedSum"

    @op(name, dynamic=True, gradient=f"{name}Gradient(weights, dy, segment_ids)")
    def forward(data, weights, segment_ids, *, num_segments: int = -1):
        count = segment_count(segment_ids, data.shape[0], is_sorted, num_segments)
        return sum_of_segments(_weighted(as_float(data), weights), segment_ids, count)

    @op("Sparse" + name, dynamic=True)
    def sparse(data, weights, indices, segment_ids, *, num_segments: int = -1):
        count = segment_count(segment_ids, indices.size, is_sorted, num_segments)
        return sum_of_segments(_weighted(_gathered(data, indices), weights), segment_ids, count)

    @op(name + "Gradient")
    def backward(weights, dy, segment_ids, *, num_segments: int = -1):
        rows = _spread(dy, segment_ids, is_sorted)
        return rows * per_row(weights, rows)

    @gradient("Sparse" + name)
    def _(g):
        rows = g.grad_input_slice(0).values
        g.emit(name + "Gradient", [g.input(1), g.grad_output(0), g.input(3)], [rows])
        g.set_grad(0, GradientSlice(g.input(2), rows))


for _family, _is_sorted in (("Unsorted", False), ("Sorted", True)):
    _register(_family, "Sum", sum_of_segments, _is_sorted)
    _register(_family, "Mean", mean_of_segments, _is_sorted)
    _register_weighted(_family, _is_sorted)
