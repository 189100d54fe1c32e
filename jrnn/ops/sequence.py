"""Sequences in a batch: masking, reversing, packing and unpacking.

Shapes: T the greatest length, N sequences, L rows of all sequences one after the other, which `lengths` [N] cut.
"""

import math

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.lengths import check_lengths, known_lengths, per_row
from jrnn.ops.values import canonical_axis, check_float, check_rank, describe, is_concrete
from jrnn.registry import gradient, op

_TRIANGLES = {
    "upper": lambda row, column: column > row,
    "lower": lambda row, column: column < row,
    "upperdiag": lambda row, column: column >= row,
    "lowerdiag": lambda row, column: column <= row,
}


@op("SequenceMask")
def sequence_mask(
    x, lengths=None, *, mode: str, axis: int = 1, batch: int | None = None, repeat_from_axis: int | None = None,
    radius: int = 10, grad: bool = False, fill_val: float = -math.inf,
):  # fmt: skip
    """x with some elements of its rows replaced by `fill_val`, or in the gradient by 0.

    Rows are the dimensions before `axis`, columns those from it. Replaced are, with mode "sequence", the columns from
    lengths[row] on; with "window", those farther than `radius` from lengths[row]; with "upper" and "lower" those beyond
    the diagonal, and with "upperdiag" and "lowerdiag" the diagonal too. `batch` makes each index of the dimensions up to
    it a batch of its own, in which rows are counted anew. `repeat_from_axis` makes the dimensions from it share a column.
    """
    check_float(x, "x")
    axis = canonical_axis(axis, x.ndim)
    batches = 1 if batch is None else math.prod(x.shape[: canonical_axis(batch, x.ndim, "batch") + 1])
    rows = math.prod(x.shape[:axis]) // max(batches, 1)
    columns = math.prod(x.shape[axis:])
    repeats = 1
    if repeat_from_axis is not None:
        if mode != "sequence" or batch is not None:
            raise OpError("argument 'repeat_from_axis' goes with mode 'sequence' only, without argument 'batch'")
        repeats = math.prod(x.shape[canonical_axis(repeat_from_axis, x.ndim, "repeat_from_axis") :])
    row, column = jnp.arange(rows)[:, None], (jnp.arange(columns) // max(repeats, 1))[None, :]
    if mode in _TRIANGLES:
        masked = _TRIANGLES[mode](row, column)
    elif mode in ("sequence", "window"):
        if lengths is None:
            raise OpError(f"mode {mode!r} needs input 1: the {'lengths' if mode == 'sequence' else 'centers'} of rows")
        if math.prod(lengths.shape) < rows:
            raise OpError(
                f"lengths is {describe(lengths)}, but x {describe(x)} has {rows} rows; it must have one for each"
            )
        of_row = jnp.reshape(lengths, -1)[:rows, None]
        masked = column >= of_row if mode == "sequence" else abs(column - of_row) > radius
    else:
        raise OpError(f"argument 'mode' is {mode!r}; it must be one of {['sequence', 'window', *_TRIANGLES]}")
    fill = jnp.asarray(0.0 if grad else fill_val, x.dtype)
    x3 = x.reshape(batches, rows, columns)
    return jnp.where(jnp.broadcast_to(masked[None], x3.shape), fill, x3).reshape(x.shape)


@gradient("SequenceMask")
def _(g):
    more = [g.input(1)] if len(g.op.inputs) > 1 else []
    g.emit("SequenceMask", [g.grad_output(0), *more], [g.grad_input(0)], grad=1)


@op("ReversePackedSegs", gradient="ReversePackedSegs(dy, lengths)")
def reverse_packed_segs(data, lengths):
    """[T, N, D] with the first lengths[n] rows of column n turned around; the rest stays."""
    check_rank(data, 3, "data")
    check_lengths(lengths)
    if lengths.shape[0] != data.shape[1]:
        raise OpError(
            f"lengths is {describe(lengths)} and data is {describe(data)}; there must be {data.shape[1]} lengths"
        )
    if is_concrete(lengths) and lengths.size and int(np.max(np.asarray(lengths))) > data.shape[0]:
        raise OpError(f"a length is {np.max(np.asarray(lengths))}, but data is {describe(data)}: {data.shape[0]} steps")
    t, n = jnp.arange(data.shape[0])[:, None], jnp.asarray(lengths)[None, :]
    source = jnp.where(t < n, n - 1 - t, t)  # [T, N]
    return jnp.take_along_axis(jnp.asarray(data), source[:, :, None], axis=0)


def _packed_rows(lengths, width):
    """For each place of [N, width]: the row of the data that belongs there, and whether there is one."""
    start = np.cumsum(lengths) - lengths
    step = np.arange(width)[None, :]
    present = step < lengths[:, None]
    return np.where(present, start[:, None] + step, 0), present


def _take(data, rows, present, fill):
    if isinstance(data, np.ndarray) and data.dtype.kind in "OS":
        taken = data[rows] if data.size else np.zeros(rows.shape + data.shape[1:], data.dtype)
        return np.where(present.reshape(present.shape + (1,) * (taken.ndim - 2)), taken, b"")
    if data.shape[0] == 0:
        return jnp.full(rows.shape + data.shape[1:], fill, data.dtype)
    taken = jnp.asarray(data)[rows]
    return jnp.where(per_row(present, taken), taken, jnp.asarray(fill, data.dtype))


@op("PackSegments", outputs=(1, 2), gradient="UnpackSegments(lengths, dy) -> data")
def pack_segments(
    lengths, data, *, max_length: int = -1, pad_minf: bool = False, return_presence_mask: bool = False
):  # fmt: skip
    """[L, ...] -> [N, T, ...], padded with 0, or with -inf; and which places are no padding, bool [N, T].

    `max_length` sets T; longer sequences lose their ends.
    """
    if data.ndim == 0:
        raise OpError(f"data is {describe(data)}; it must have a dimension at least")
    counts = known_lengths(lengths, data.shape[0])
    width = max_length if max_length >= 0 else int(counts.max(initial=0))
    rows, present = _packed_rows(counts, width)
    fill = -math.inf if pad_minf and data.dtype.kind not in "iub" else 0
    return _take(data, rows, present, fill), present


@op("UnpackSegments", gradient="PackSegments(lengths, dy) -> packed")
def unpack_segments(lengths, packed, *, max_length: int = -1):
    """[N, T, ...] -> [L, ...], the first lengths[n] rows of each sequence."""
    if packed.ndim < 2:
        raise OpError(f"packed is {describe(packed)}; it must have two dimensions at least")
    counts = known_lengths(lengths)
    if len(counts) != packed.shape[0]:
        raise OpError(
            f"lengths is {describe(lengths)} and packed is {describe(packed)}; there must be {packed.shape[0]} lengths"
        )
    if max_length >= 0:
        if max_length != packed.shape[1]:
            raise OpError(
                f"packed is {describe(packed)}; argument max_length={max_length} must be its second dimension"
            )
        counts = np.minimum(counts, max_length)
    if counts.max(initial=0) > packed.shape[1]:
        raise OpError(
            f"a length is {counts.max()}, but packed is {describe(packed)}: {packed.shape[1]} rows a sequence"
        )
    sequence = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return packed[sequence, step] if isinstance(packed, np.ndarray) else jnp.asarray(packed)[sequence, step]


@op("PackRNNSequence", gradient="UnpackRNNSequence(dy, lengths)")
def pack_rnn_sequence(values, lengths):
    """[L, ...] -> [T, N, ...], padded with 0."""
    if values.ndim < 2:
        raise OpError(f"values is {describe(values)}; it must have two dimensions at least")
    counts = known_lengths(lengths, values.shape[0])
    rows, present = _packed_rows(counts, int(counts.max(initial=0)))
    return _take(values, rows.T, present.T, 0)


@op("UnpackRNNSequence", gradient="PackRNNSequence(dy, lengths)")
def unpack_rnn_sequence(values, lengths):
    """[T, N, ...] -> [L, ...], the reverse of PackRNNSequence."""
    if values.ndim < 3:
        raise OpError(f"values is {describe(values)}; it must have three dimensions at least")
    counts = known_lengths(lengths)
    if len(counts) != values.shape[1] or counts.max(initial=0) > values.shape[0]:
        raise OpError(
            f"lengths is {counts.tolist()} and values is {describe(values)}; there must be {values.shape[1]} lengths, at "
            f"most {values.shape[0]}"
        )
    sequence = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return jnp.asarray(values)[step, sequence]


@op("VariableLengthSequencePadding", inplace={0: 0})
def variable_length_sequence_padding(x, lengths):
    """[T, N, D] with zeros from step lengths[n] on."""
    check_rank(x, 3, "x")
    check_lengths(lengths)
    if lengths.shape[0] != x.shape[1]:
        raise OpError(f"lengths is {describe(lengths)} and x is {describe(x)}; there must be {x.shape[1]} lengths")
    valid = jnp.arange(x.shape[0])[:, None] < jnp.asarray(lengths)[None, :]
    return jnp.where(valid[:, :, None], x, 0)
