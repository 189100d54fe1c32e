"""Embedding bags, which gather rows of a table and add them up over segments, and reductions by blobs of segment ids.

Shapes: data [M, ...], indices [L], lengths [S] that add up to L -> [S, ...], 0 where a segment is empty. With segment_ids
[L] instead of lengths, the result is [K, ...] for K segments, and only Sparse operators gather. The gradient of a table is
a slice: the indices, and the gradient of each gathered row, [L, ...]. Sorted ids run from 0 without gaps.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.autodiff import GradientSlice
from jrnn.nets.ir import Op
from jrnn.nets.ops.lengths import (
    bag,
    of_rows,
    per_row,
    segment_max,
)
from jrnn.nets.ops.values import (
    as_float,
    check_indices,
    check_integers,
    check_rank,
    check_shape,
    describe,
    is_concrete,
)
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import gradient, op


def gathered(data: Any, indices: Any) -> Any:
    """The rows of data at `indices`."""
    check_rank(indices, 1, "indices")
    check_indices(indices, data.shape[0])
    return jnp.take(data, indices, axis=0, mode="fill")


def _rows(data: Any, indices: Any) -> Any:
    """The gathered rows, of at least 32 bits."""
    rows = gathered(as_float(data), indices)
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


op("SparseLengthsSum")(lambda data, indices, lengths: bag(_rows(data, indices), None, lengths))
op("SparseLengthsMean")(
    lambda data, indices, lengths: bag(_rows(data, indices), None, lengths, mean=True)
)


def _cut(op: Op) -> str | None:
    if op.arg("grad_on_weights", 0):
        return None
    return "argument grad_on_weights is 0, so that the weights get no gradient"


@op("SparseLengthsWeightedSum", cuts=_cut)
def sparse_lengths_weighted_sum(data, weights, indices, lengths, *, grad_on_weights: bool = False):
    """Rows times their weights [L], summed. Without `grad_on_weights` the weights get no gradient."""
    return bag(
        _rows(data, indices),
        weights if grad_on_weights else jax.lax.stop_gradient(weights),
        lengths,
    )


@op("SparseLengthsIndicesInGradientWeightedSumGradient")
def weighted_sum_gradient(weights, dy, lengths, indices, *, grad_on_weights: bool = False):
    rows = of_rows(dy, lengths, indices.size)
    return rows * per_row(weights, rows)


@op("SparseLengthsIndicesInGradientWeightedSumWithMainInputGradient", outputs=2)
def weighted_sum_gradients(weights, dy, lengths, data, indices, *, grad_on_weights: bool = True):
    rows = of_rows(dy, lengths, indices.size)
    own = jnp.take(data, indices, axis=0, mode="fill")
    return rows * per_row(weights, rows), jnp.sum(rows * own, axis=tuple(range(1, rows.ndim)))


@gradient("SparseLengthsSum", "SparseLengthsMean", "SparseLengthsWeightedSum")
def _(g):
    rows = g.grad_input_slice(0).values
    weights = [g.input(1)] if g.op.type == "SparseLengthsWeightedSum" else []
    indices, lengths = (g.input(k + len(weights)) for k in (1, 2))
    type = g.op.type.replace("SparseLengths", "SparseLengthsIndicesInGradient")
    inputs = [*weights, g.grad_output(0), lengths]
    if weights and g.arg("grad_on_weights", 0):
        g.emit(
            type + "WithMainInputGradient", [*inputs, g.input(0), indices], [rows, g.grad_input(1)]
        )
    else:
        g.emit(type + "Gradient", [*inputs, indices], [rows])
    g.set_grad(0, GradientSlice(indices, rows))


def _check_sorted(ids: Any) -> None:
    numbers = np.asarray(ids)
    if numbers.size and (numbers[0] != 0 or not np.isin(np.diff(numbers), (0, 1)).all()):
        raise OpError(
            f"segment_ids are {numbers.tolist()[:8]}; they must be sorted, begin at 0 and have no gaps"
        )


def _count(ids: Any, rows: int, is_sorted: bool, num_segments: int = -1) -> int:
    """The number of segments, with the ids checked; they must not be traced unless num_segments is given."""
    check_rank(ids, 1, "segment_ids")
    check_integers(ids, "segment_ids")
    if ids.size != rows:
        raise OpError(f"segment_ids are {describe(ids)} for {rows} rows; each row must have one")
    if is_sorted:
        _check_sorted(ids)
    if num_segments < 0:
        num_segments = int(np.asarray(ids).max(initial=-1)) + 1
    check_indices(ids, num_segments, "segment_ids")
    return num_segments


def _rows_per_segment(ids: Any, count: int, like: Any) -> Any:
    """The number of rows of each segment, at least 1, in a shape that broadcasts with `like`."""
    ones = jax.ops.segment_sum(jnp.ones(ids.shape, like.dtype), ids, count)
    return per_row(jnp.maximum(ones, 1), like)


def _mean(rows: Any, ids: Any, count: int) -> Any:
    total = jax.ops.segment_sum(rows, ids, count)
    return total / _rows_per_segment(ids, count, total)


def _weighted(rows: Any, weights: Any) -> Any:
    """Rows times their weights [N], which get no gradient."""
    check_shape(weights, rows.shape[:1], "weights")
    return rows * per_row(jax.lax.stop_gradient(weights), rows)


def _spread_by_ids(dy: Any, ids: Any, is_sorted: bool) -> Any:
    """The gradient of a sum: for each row, the gradient of its segment."""
    if is_sorted and is_concrete(ids):
        _check_sorted(ids)
    check_indices(ids, dy.shape[0], "segment_ids")
    return jnp.take(dy, ids, axis=0, mode="fill")


def _sparse_gradient(g) -> None:
    rows = g.grad_input_slice(0).values
    *weights, indices, ids = map(g.input, range(1, len(g.op.inputs)))
    g.emit(g.op.type.removeprefix("Sparse") + "Gradient", [*weights, g.grad_output(0), ids], [rows])
    g.set_grad(0, GradientSlice(indices, rows))


def _register(name: str, reduced: Callable, is_sorted: bool) -> None:
    """Registers a sum or a mean, its sparse form, and their gradients."""

    @op(name, dynamic=True, gradient=f"{name}Gradient(dy, segment_ids)")
    def forward(data, segment_ids, *, num_segments: int = -1):
        count = _count(segment_ids, data.shape[0], is_sorted, num_segments)
        return reduced(as_float(data), segment_ids, count)

    @op("Sparse" + name, dynamic=True)
    def sparse(data, indices, segment_ids, *, num_segments: int = -1):
        return forward(gathered(data, indices), segment_ids, num_segments=num_segments)

    @op(name + "Gradient")
    def backward(dy, segment_ids, *, num_segments: int = -1):
        if reduced is _mean:
            dy = dy / _rows_per_segment(segment_ids, dy.shape[0], dy)
        return _spread_by_ids(dy, segment_ids, is_sorted)

    gradient("Sparse" + name)(_sparse_gradient)


def _register_weighted(name: str, is_sorted: bool) -> None:
    """Registers a weighted sum, its sparse form, and their gradients."""

    @op(name, dynamic=True, gradient=f"{name}Gradient(weights, dy, segment_ids)")
    def forward(data, weights, segment_ids, *, num_segments: int = -1):
        count = _count(segment_ids, data.shape[0], is_sorted, num_segments)
        return jax.ops.segment_sum(_weighted(as_float(data), weights), segment_ids, count)

    @op("Sparse" + name, dynamic=True)
    def sparse(data, weights, indices, segment_ids, *, num_segments: int = -1):
        rows = gathered(data, indices)
        return forward(rows, weights, segment_ids, num_segments=num_segments)

    @op(name + "Gradient")
    def backward(weights, dy, segment_ids, *, num_segments: int = -1):
        rows = _spread_by_ids(dy, segment_ids, is_sorted)
        return rows * per_row(weights, rows)

    gradient("Sparse" + name)(_sparse_gradient)


for _family, _is_sorted in (("Unsorted", False), ("Sorted", True)):
    _register(_family + "SegmentSum", jax.ops.segment_sum, _is_sorted)
    _register(_family + "SegmentMean", _mean, _is_sorted)
    _register_weighted(_family + "SegmentWeightedSum", _is_sorted)


def _log_sum_exp(rows: Any, ids: Any, count: int) -> Any:
    largest = jax.lax.stop_gradient(jax.ops.segment_max(rows, ids, count))
    return jnp.log(jax.ops.segment_sum(jnp.exp(rows - largest[ids]), ids, count)) + largest


def _log_mean_exp(rows: Any, ids: Any, count: int) -> Any:
    y = _log_sum_exp(rows, ids, count)
    return y - jnp.log(_rows_per_segment(ids, count, y))


def _register_range(kind: str, reduced: Callable) -> None:
    """Registers a reduction of consecutive rows, whose ids are sorted."""
    name = f"SortedSegmentRange{kind}"

    @op_with_vjp(name, dynamic=True, gradient=f"{name}Gradient(data, y, dy, segment_ids)")
    def forward(data, segment_ids):
        return reduced(
            as_float(data), segment_ids, _count(segment_ids, data.shape[0], is_sorted=True)
        )


_register_range("Sum", jax.ops.segment_sum)
_register_range("Mean", _mean)
_register_range("Max", lambda x, ids, n: segment_max(x, ids, jnp.ones(n)))
_register_range("LogSumExp", _log_sum_exp)
_register_range("LogMeanExp", _log_mean_exp)
