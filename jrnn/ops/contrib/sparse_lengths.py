"""Embedding bags: rows of a table gathered by indices and reduced over segments that lengths cut.

Shapes: data [M, ...], indices [L], lengths [S] that add up to L -> [S, ...], 0 where a segment is empty. The gradient of the
table is a slice: the indices, and the gradient of each row gathered, [L, ...].
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.autodiff import GradientSlice
from jrnn.ir import Op
from jrnn.ops.lengths import check_lengths, known_lengths, per_row, segment_ids
from jrnn.ops.values import as_float, check_indices, check_rank, check_shape
from jrnn.registry import gradient, op


def _rows(data: Any, indices: Any, lengths: Any) -> tuple[Any, Any]:
    """The rows gathered, of at least 32 bits, and the segment of each."""
    check_rank(indices, 1, "indices")
    check_indices(indices, data.shape[0])
    check_lengths(lengths, indices.size)
    rows = jnp.take(as_float(data), indices, axis=0, mode="fill")
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), segment_ids(lengths, indices.size)


def _over_lengths(rows: Any, lengths: Any) -> Any:
    """Sums divided by the lengths of their segments; an empty one counts 1."""
    return rows / per_row(jnp.maximum(jnp.asarray(lengths), 1).astype(rows.dtype), rows)


@op("SparseLengthsSum")
def sparse_lengths_sum(data, indices, lengths):
    rows, ids = _rows(data, indices, lengths)
    return jax.ops.segment_sum(rows, ids, lengths.size)


@op("SparseLengthsMean")
def sparse_lengths_mean(data, indices, lengths):
    rows, ids = _rows(data, indices, lengths)
    return _over_lengths(jax.ops.segment_sum(rows, ids, lengths.size), lengths)


def _cut(op: Op) -> str | None:
    return (
        None if op.arg("grad_on_weights", 0) else "argument grad_on_weights is 0, so that the weights get no gradient"
    )


@op("SparseLengthsWeightedSum", cuts=_cut)
def sparse_lengths_weighted_sum(data, weights, indices, lengths, *, grad_on_weights: bool = False):
    """Rows times their weights [L], summed. Without `grad_on_weights` the weights get no gradient."""
    check_shape(weights, indices.shape, "weights")
    rows, ids = _rows(data, indices, lengths)
    weights = weights if grad_on_weights else jax.lax.stop_gradient(weights)
    return jax.ops.segment_sum(rows * per_row(weights, rows), ids, lengths.size)


def _spread(dy: Any, lengths: Any, count: int) -> Any:
    """The gradient of a sum: that of its segment for each of `count` rows."""
    check_lengths(lengths, count)
    return jnp.take(dy, segment_ids(lengths, count), axis=0, mode="fill")


@op("SparseLengthsIndicesInGradientSumGradient")
def sum_gradient(dy, lengths, indices):
    return _spread(dy, lengths, indices.size)


@op("SparseLengthsIndicesInGradientMeanGradient")
def mean_gradient(dy, lengths, indices):
    return _spread(_over_lengths(dy, lengths), lengths, indices.size)


@op("SparseLengthsIndicesInGradientWeightedSumGradient")
def weighted_sum_gradient(weights, dy, lengths, indices, *, grad_on_weights: bool = False):
    rows = _spread(dy, lengths, indices.size)
    return rows * per_row(weights, rows)


@op("SparseLengthsIndicesInGradientWeightedSumWithMainInputGradient", outputs=2)
def weighted_sum_gradients(weights, dy, lengths, data, indices, *, grad_on_weights: bool = True):
    rows = _spread(dy, lengths, indices.size)
    own = jnp.take(data, indices, axis=0, mode="fill")
    return rows * per_row(weights, rows), jnp.sum(rows * own, axis=tuple(range(1, rows.ndim)))


@op("SparseLengthsSumGradient", dynamic=True)
def sum_gradient_of_lengths(dy, lengths):
    return jnp.repeat(dy, known_lengths(lengths), axis=0)


@op("SparseLengthsMeanGradient", dynamic=True)
def mean_gradient_of_lengths(dy, lengths):
    return jnp.repeat(_over_lengths(dy, lengths), known_lengths(lengths), axis=0)


@op("SparseLengthsWeightedSumGradient")
def weighted_sum_gradient_of_lengths(weights, dy, lengths, *, grad_on_weights: bool = False):
    rows = _spread(dy, lengths, weights.size)
    return rows * per_row(weights, rows)


@gradient("SparseLengthsSum", "SparseLengthsMean")
def _(g):
    rows = g.grad_input_slice(0).values
    kind = g.op.type.removeprefix("SparseLengths")
    inputs = [g.grad_output(0), g.input(2), g.input(1)]
    g.emit(f"SparseLengthsIndicesInGradient{kind}Gradient", inputs, [rows])
    g.set_grad(0, GradientSlice(g.input(1), rows))


@gradient("SparseLengthsWeightedSum")
def _(g):
    rows = g.grad_input_slice(0).values
    type = "SparseLengthsIndicesInGradientWeightedSum"
    inputs = [g.input(1), g.grad_output(0), g.input(3)]
    if g.arg("grad_on_weights", 0):
        inputs += [g.input(0), g.input(2)]
        g.emit(type + "WithMainInputGradient", inputs, [rows, g.grad_input(1)])
    else:
        g.emit(type + "Gradient", [*inputs, g.input(2)], [rows])
    g.set_grad(0, GradientSlice(g.input(2), rows))
