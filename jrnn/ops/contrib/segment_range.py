"""Reductions of consecutive rows: segments named by sorted ids that begin at 0 and have no gaps.

Shapes: data [N, ...], segment_ids [N] -> [K, ...] for K segments, which must be known when a net is traced.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.ops.contrib.segment_ids import counts_of, mean_of_segments, segment_count, sum_of_segments
from jrnn.ops.values import as_float
from jrnn.registry import op


@jax.custom_jvp
def _max(rows: Any, ids: Any, count: Any) -> Any:
    return jax.ops.segment_max(rows, ids, count.size)


@_max.defjvp
def _(primals, tangents):
    rows, ids, count = primals
    y = _max(rows, ids, count)
    return y, sum_of_segments(jnp.where(rows == y[ids], tangents[0], 0), ids, count.size)  # ties get the whole gradient


def _log_sum_exp(rows: Any, ids: Any, count: int) -> Any:
    largest = jax.lax.stop_gradient(jax.ops.segment_max(rows, ids, count))
    return jnp.log(sum_of_segments(jnp.exp(rows - largest[ids]), ids, count)) + largest


def _log_mean_exp(rows: Any, ids: Any, count: int) -> Any:
    y = _log_sum_exp(rows, ids, count)
    return y - jnp.log(counts_of(ids, count, y))


def _register(kind: str, reduced: Callable, derivative: Callable) -> None:
    """`derivative(x, y, ids)` is what each row's gradient is times that of its segment; x and y are row by row."""
    name = f"SortedSegmentRange{kind}"

    @op(name, dynamic=True, gradient=f"{name}Gradient(data, y, dy, segment_ids)")
    def forward(data, segment_ids):
        return reduced(as_float(data), segment_ids, segment_count(segment_ids, data.shape[0], is_sorted=True))

    @op(name + "Gradient")
    def backward(data, y, dy, segment_ids):
        per_segment = counts_of(segment_ids, y.shape[0], y)
        return dy[segment_ids] * derivative(data, y[segment_ids], per_segment[segment_ids])


_register("Sum", sum_of_segments, lambda x, y, n: 1)
_register("Mean", mean_of_segments, lambda x, y, n: 1 / n)
_register("Max", lambda x, ids, count: _max(x, ids, jnp.zeros(count)), lambda x, y, n: jnp.where(x == y, 1, 0))
_register("LogSumExp", _log_sum_exp, lambda x, y, n: jnp.exp(x - y))
_register("LogMeanExp", _log_mean_exp, lambda x, y, n: jnp.exp(x - y) / n)
