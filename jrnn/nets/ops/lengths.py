"""Operators on segments, the consecutive rows of a blob that a blob of lengths cuts: reductions, repeating, gathering.

Shapes: `lengths` is [S], and cuts the L rows of `data` [L, ...] into S segments. A reduction is [S, ...], 0 where a segment
is empty.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.memory import check_size
from jrnn.nets.ops.values import (
    check_float,
    check_integers,
    check_rank,
    check_shape,
    describe,
    is_concrete,
    raise_if,
)
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import gradient, op


def check_lengths(lengths: Any, rows: int | None = None) -> None:
    """Raises OpError unless `lengths` is a vector of integers that are not negative and add up to `rows`.

    Values can only be checked where they are not traced.
    """
    check_rank(lengths, 1, "lengths")
    check_integers(lengths, "lengths")
    if is_concrete(lengths):
        values = np.asarray(lengths)
        if (values < 0).any():
            raise OpError(f"lengths has a negative length: {values.tolist()[:8]}")
        if rows is not None and values.sum() != rows:
            raise OpError(
                f"lengths adds up to {values.sum()}, but the data has {rows} rows; they must be equal"
            )


def known_lengths(lengths: Any, rows: int | None = None) -> np.ndarray:
    """Lengths as numpy, for operators whose output's shape depends on them; they must not be traced."""
    values = np.asarray(lengths)
    check_lengths(values, rows)
    check_size((sum(values.tolist()),), np.int64)
    return values.astype(np.int64)


def segment_ids(lengths: Any, rows: int) -> Any:
    """The segment that each of `rows` rows belongs to; rows past the last segment get the number of segments.

    >>> segment_ids(np.array([2, 0, 1]), 3).tolist()
    [0, 0, 2]
    """
    return jnp.searchsorted(jnp.cumsum(jnp.asarray(lengths)), jnp.arange(rows), side="right")


def rows_from(starts: Any, counts: np.ndarray) -> np.ndarray:
    """The rows start, start + 1, ... of each segment, one segment after the other.

    >>> rows_from(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    check_size((sum(counts.tolist()),), np.int64)
    return np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def per_row(values: Any, rows: Any) -> Any:
    """One value per row, with dimensions of size 1 appended so that it broadcasts with `rows`."""
    return values.reshape(values.shape + (1,) * (rows.ndim - values.ndim))


def over_lengths(rows: Any, lengths: Any) -> Any:
    """Sums over segments divided by the lengths of the segments; an empty one counts 1."""
    return rows / per_row(jnp.maximum(jnp.asarray(lengths), 1).astype(rows.dtype), rows)


def _rows_of(data):
    """The data, checked: numbers with a fraction, of a dimension at least."""
    check_float(data, "data")
    raise_if(data.ndim == 0, "it must have a dimension at least", data=data)
    return data


def bag(rows: Any, weights: Any, lengths: Any, mean: bool = False) -> Any:
    """Rows [L, ...], each times its weight (None: 1), added up over segments; with `mean` divided by their lengths."""
    check_lengths(lengths, rows.shape[0])
    if weights is not None:
        check_shape(weights, rows.shape[:1], "weights")
        rows = rows * per_row(jnp.asarray(weights), rows)
    total = jax.ops.segment_sum(rows, segment_ids(lengths, rows.shape[0]), lengths.size)
    return over_lengths(total, lengths) if mean else total


@op("LengthsSum", gradient="LengthsIndicesInGradientSumGradient(dy, lengths, data)")
def lengths_sum(data, lengths):
    return bag(_rows_of(data), None, lengths)


@op("LengthsMean", gradient="LengthsIndicesInGradientMeanGradient(dy, lengths, data)")
def lengths_mean(data, lengths):
    return bag(_rows_of(data), None, lengths, mean=True)


@jax.custom_jvp
def segment_max(data, ids, lengths):
    """The maximum of each segment, 0 of an empty one."""
    greatest = jax.ops.segment_max(data, ids, lengths.shape[0])
    return jnp.where(per_row(jnp.asarray(lengths) > 0, greatest), greatest, 0)


@segment_max.defjvp
def _(primals, tangents):
    data, ids, lengths = primals
    greatest = segment_max(data, ids, lengths)
    # compat: every row that ties for the maximum gets the whole gradient
    taken = jnp.where(data == greatest[ids], tangents[0], 0)
    return greatest, jax.ops.segment_sum(taken, ids, lengths.shape[0])


@op_with_vjp(
    "LengthsMax", gradient="LengthsMaxWithMainInputAndForwardOutputGradient(y, dy, lengths, data)"
)
def lengths_max(data, lengths):
    count = _rows_of(data).shape[0]
    check_lengths(lengths, count)
    return segment_max(data, segment_ids(lengths, count), jnp.asarray(lengths))


@op("LengthsWeightedSum")
def lengths_weighted_sum(data, weights, lengths, *, grad_on_weights: bool = False):
    """The sum of each segment's rows, each times its weight [L]. Without `grad_on_weights` the weights get no gradient."""
    weights = weights if grad_on_weights else jax.lax.stop_gradient(weights)
    return bag(_rows_of(data), weights, lengths)


def of_rows(dy: Any, lengths: Any, count: int) -> Any:
    """The gradient of a sum: for each of `count` rows, the gradient of its segment."""
    check_lengths(lengths, count)
    return jnp.take(dy, segment_ids(lengths, count), axis=0, mode="fill")


def mean_gradient(dy, lengths, rows):
    return of_rows(over_lengths(dy, lengths), lengths, rows.shape[0])


def weighted_sum_gradient(weights, dy, lengths, *, grad_on_weights: bool = False):
    rows = of_rows(dy, lengths, weights.size)
    return rows * per_row(weights, rows)


def sum_gradient(dy, lengths, rows):
    """`rows` are the data, or the indices of the gathered rows."""
    return of_rows(dy, lengths, rows.shape[0])


for _type in ("Lengths", "SparseLengths"):
    op(_type + "IndicesInGradientSumGradient")(sum_gradient)
    op(_type + "IndicesInGradientMeanGradient")(mean_gradient)
    op(_type + "WeightedSumGradient")(weighted_sum_gradient)
    op(_type + "SumGradient", dynamic=True)(
        lambda dy, lengths: jnp.repeat(dy, known_lengths(lengths), axis=0)
    )
    op(_type + "MeanGradient", dynamic=True)(
        lambda dy, lengths: jnp.repeat(over_lengths(dy, lengths), known_lengths(lengths), axis=0)
    )


@op("LengthsWeightedSumWithMainInputGradient", outputs=2)
def lengths_weighted_sum_gradients(weights, dy, lengths, data, *, grad_on_weights: bool = False):
    rows = of_rows(dy, lengths, weights.size)
    return rows * per_row(weights, rows), (rows * data).reshape(len(weights), -1).sum(1)


@gradient("LengthsWeightedSum")
def _(g):
    inputs = [g.input(1), g.grad_output(0), g.input(2)]
    if g.arg("grad_on_weights", 0):
        outputs = [g.grad_input(0), g.grad_input(1)]
        g.emit("LengthsWeightedSumWithMainInputGradient", [*inputs, g.input(0)], outputs)
    else:
        g.emit("LengthsWeightedSumGradient", inputs, [g.grad_input(0)])


@op("LengthsTile", gradient="LengthsSum(dy, lengths)")
def lengths_tile(data, lengths):
    """Repeats row s of data [S, ...] lengths[s] times."""
    counts = known_lengths(lengths)
    if data.ndim == 0 or len(counts) != data.shape[0]:
        raise OpError(
            f"data is {describe(data)} and there are {len(counts)} lengths; each row of data must have one"
        )
    return jnp.asarray(data)[np.repeat(np.arange(len(counts)), counts)]


@op("LengthsGather", gradient="forbidden")
def lengths_gather(items, lengths, indices):
    """Concatenates the segments of `items` that `indices` name."""
    counts = known_lengths(lengths, items.shape[0])
    wanted = np.asarray(indices).reshape(-1)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(counts)):
        raise OpError(
            f"indices are {wanted.tolist()[:8]}; there are {len(counts)} segments, 0 to {len(counts) - 1}"
        )
    starts = np.cumsum(counts) - counts
    return jnp.asarray(items)[rows_from(starts[wanted], counts[wanted])]


@op("LengthsPad", gradient="stops")
def lengths_pad(data, lengths, *, target_length: int, padding_value: float = -1.0):
    """Each segment padded to `target_length` rows: [S * target_length, ...]."""
    raise_if(
        target_length < 1, f"argument 'target_length' is {target_length}; it must be at least 1"
    )
    counts = known_lengths(lengths, data.shape[0])
    if counts.max(initial=0) > target_length:
        raise OpError(
            f"a length is {counts.max()}; argument target_length={target_length} must be at least that"
        )
    padded = jnp.full((len(counts) * target_length, *data.shape[1:]), padding_value, data.dtype)
    return padded.at[rows_from(np.arange(len(counts)) * target_length, counts)].set(data)


@op("LengthsRangeFill", gradient="stops")
def lengths_range_fill(lengths):
    """0, 1, ... length - 1 for each segment, as int32."""
    counts = known_lengths(lengths)
    return rows_from(0 * counts, counts).astype(np.int32)


@op("LengthsToRanges")
def lengths_to_ranges(lengths):
    """(start, length) of each segment, int32 [S, 2]."""
    check_lengths(lengths)
    lengths = jnp.asarray(lengths)
    return jnp.stack([jnp.cumsum(lengths) - lengths, lengths], axis=1).astype(jnp.int32)


@op("LengthsToSegmentIds", gradient="forbidden")
def lengths_to_segment_ids(lengths):
    """The segment of each row, int32 [L]."""
    counts = known_lengths(lengths)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


@op("LengthsToShape", gradient="forbidden")
def lengths_to_shape(lengths):
    """[S, length], where all lengths are equal."""
    counts = known_lengths(lengths)
    if not len(counts) or (counts != counts[0]).any():
        raise OpError(f"lengths are {counts.tolist()[:8]}; they must be equal, and at least one")
    return np.array([len(counts), counts[0]], np.int32)


@op("LengthsToOffsets")
def lengths_to_offsets(lengths, *, include_last_offset: bool = False):
    """The first row of each segment, int32 [S]; with `include_last_offset` also the end of the last one."""
    check_lengths(lengths)
    ends = jnp.cumsum(jnp.asarray(lengths)).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return starts if include_last_offset else starts[:-1]


@op("LengthsToWeights")
def lengths_to_weights(lengths, *, power: float = 0.5):
    """1 / length ** power for each row, float32 [L]."""
    counts = known_lengths(lengths)
    return jnp.asarray(np.repeat(np.maximum(counts, 1.0) ** -power, counts).astype(np.float32))


def _segment_counts(ids, data):
    check_rank(ids, 1, "segment_ids")
    ids = np.asarray(ids)
    if (np.diff(ids) < 0).any() or (ids < 0).any():
        raise OpError(f"segment_ids are {ids.tolist()[:8]}; they must be sorted, and none negative")
    count = int(ids.max(initial=-1)) + 1
    if data is not None and data.shape[0] < count:
        raise OpError(
            f"segment_ids name {count} segments, but data is {describe(data)}; it must have that many rows"
        )
    return np.bincount(ids, minlength=count if data is None else data.shape[0])


@op("SegmentIdsToLengths", gradient="forbidden")
def segment_ids_to_lengths(ids, data=None):
    """The number of rows of each segment, int32. `data` has one row per segment; without it the greatest id is the last."""
    return _segment_counts(ids, data).astype(np.int32)


@op("SegmentIdsToRanges", gradient="forbidden")
def segment_ids_to_ranges(ids, data=None):
    """(start, length) of each segment, int32 [S, 2]; (0, 0) for those past the last id."""
    counts = _segment_counts(ids, data)
    starts = np.where(
        np.arange(len(counts)) <= np.max(ids, initial=-1), np.cumsum(counts) - counts, 0
    )
    return np.stack([starts, counts], axis=1).astype(np.int32)
