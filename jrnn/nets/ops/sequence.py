"""Sequences in a batch: masking, reversing, packing and unpacking, and padding around segments.

Shapes: T the greatest length, N sequences, L rows of all sequences one after the other, which `lengths` [N] cut.
"""

import math

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.memory import check_size
from jrnn.nets.ops.lengths import check_lengths, known_lengths, per_row, rows_from
from jrnn.nets.ops.values import (
    STRINGS,
    canonical_axis,
    check_float,
    check_rank,
    describe,
    is_concrete,
    raise_if,
)
from jrnn.nets.registry import gradient, op

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

    x is seen as a matrix whose columns begin at `axis`. Mode "sequence" replaces the columns from lengths[row] on; "window"
    those farther than `radius` from lengths[row]; "upper" and "lower" those beyond the diagonal, "upperdiag" and "lowerdiag"
    the diagonal too. The dimensions up to `batch` are a batch, whose matrices are masked alike. The dimensions from
    `repeat_from_axis` on share a column.
    """
    check_float(x, "x")
    axis = canonical_axis(axis, x.ndim)
    batches = (
        1 if batch is None else math.prod(x.shape[: canonical_axis(batch, x.ndim, "batch") + 1])
    )
    rows = math.prod(x.shape[:axis]) // max(batches, 1)
    columns = math.prod(x.shape[axis:])
    repeats = 1
    if repeat_from_axis is not None:
        if mode != "sequence" or batch is not None:
            raise OpError(
                "argument 'repeat_from_axis' goes with mode 'sequence' only, without argument 'batch'"
            )
        repeats = math.prod(x.shape[canonical_axis(repeat_from_axis, x.ndim, "repeat_from_axis") :])
    row = jnp.arange(rows)[:, None]
    column = (jnp.arange(columns) // max(repeats, 1))[None, :]
    if mode in _TRIANGLES:
        masked = _TRIANGLES[mode](row, column)
    elif mode in ("sequence", "window"):
        if lengths is None:
            raise OpError(
                f"mode {mode!r} needs input 1: the {'lengths' if mode == 'sequence' else 'centers'} of rows"
            )
        if math.prod(lengths.shape) < rows:
            raise OpError(
                f"lengths is {describe(lengths)}, but x {describe(x)} has {rows} rows; it must have one each"
            )
        of_row = jnp.reshape(lengths, -1)[:rows, None]
        masked = column >= of_row if mode == "sequence" else abs(column - of_row) > radius
    else:
        raise OpError(
            f"argument 'mode' is {mode!r}; it must be one of {['sequence', 'window', *_TRIANGLES]}"
        )
    fill = jnp.asarray(0.0 if grad else fill_val, x.dtype)
    x3 = x.reshape(batches, rows, columns)
    return jnp.where(jnp.broadcast_to(masked[None], x3.shape), fill, x3).reshape(x.shape)


@gradient("SequenceMask")
def _(g):
    more = [g.input(1)] if len(g.op.inputs) > 1 else []
    g.emit("SequenceMask", [g.grad_output(0), *more], [g.grad_input(0)], grad=1)


@op("ReversePackedSegs", gradient="ReversePackedSegs(dy, lengths)")
def reverse_packed_segs(data, lengths):
    """[T, N, D] with the first lengths[n] steps of sequence n reversed; the rest stays."""
    check_rank(data, 3, "data")
    check_lengths(lengths)
    if lengths.shape[0] != data.shape[1]:
        raise OpError(
            f"lengths is {describe(lengths)}, data {describe(data)}; there must be {data.shape[1]} lengths"
        )
    if is_concrete(lengths) and lengths.size and int(np.max(np.asarray(lengths))) > data.shape[0]:
        raise OpError(
            f"a length is {np.max(np.asarray(lengths))}, but data is {describe(data)}: {data.shape[0]} steps"
        )
    t = jnp.arange(data.shape[0])[:, None]
    n = jnp.asarray(lengths)[None, :]
    source = jnp.where(t < n, n - 1 - t, t)  # [T, N]
    return jnp.take_along_axis(jnp.asarray(data), source[:, :, None], axis=0)


def _packed_rows(lengths, width):
    """For each place of [N, width]: its row in the data, and whether it has one."""
    start = np.cumsum(lengths) - lengths
    check_size((len(lengths), width), np.int64)
    step = np.arange(width)[None, :]
    present = step < lengths[:, None]
    return np.where(present, start[:, None] + step, 0), present


def _take(data, rows, present, fill):
    if isinstance(data, np.ndarray) and data.dtype.kind in STRINGS:
        taken = data[rows] if data.size else np.zeros(rows.shape + data.shape[1:], data.dtype)
        return np.where(per_row(present, taken), taken, b"")
    if data.shape[0] == 0:
        return jnp.full(rows.shape + data.shape[1:], fill, data.dtype)
    taken = jnp.asarray(data)[rows]
    return jnp.where(per_row(present, taken), taken, jnp.asarray(fill, data.dtype))


@op("PackSegments", outputs=(1, 2), gradient="UnpackSegments(lengths, dy) -> data")
def pack_segments(
    lengths, data, *, max_length: int = -1, pad_minf: bool = False, return_presence_mask: bool = False
):  # fmt: skip
    """[L, ...] -> [N, T, ...], padded with 0 or -inf; and which places hold data, bool [N, T].

    `max_length` sets T; longer sequences are cut.
    """
    raise_if(data.ndim == 0, "it must have a dimension at least", data=data)
    counts = known_lengths(lengths, data.shape[0])
    width = max_length if max_length >= 0 else int(counts.max(initial=0))
    rows, present = _packed_rows(counts, width)
    fill = -math.inf if pad_minf and data.dtype.kind not in "iub" else 0
    return _take(data, rows, present, fill), present


def _places(counts):
    """The sequence of each row of data, and its step."""
    return np.repeat(np.arange(len(counts)), counts), rows_from(0 * counts, counts)


@op("UnpackSegments", gradient="PackSegments(lengths, dy) -> packed")
def unpack_segments(lengths, packed, *, max_length: int = -1):
    """[N, T, ...] -> [L, ...], the first lengths[n] rows of each sequence."""
    raise_if(packed.ndim < 2, "it must have two dimensions at least", packed=packed)
    counts = known_lengths(lengths)
    if len(counts) != packed.shape[0]:
        raise OpError(
            f"lengths is {describe(lengths)}, packed {describe(packed)}; give {packed.shape[0]} lengths"
        )
    if max_length >= 0:
        raise_if(
            max_length != packed.shape[1],
            f"max_length={max_length} must be its second dimension",
            packed=packed,
        )
        counts = np.minimum(counts, max_length)
    if counts.max(initial=0) > packed.shape[1]:
        raise OpError(
            f"a length is {counts.max()}, but packed {describe(packed)} has {packed.shape[1]} rows per sequence"
        )
    sequence, step = _places(counts)
    return (
        packed[sequence, step]
        if isinstance(packed, np.ndarray)
        else jnp.asarray(packed)[sequence, step]
    )


@op("PackRNNSequence", gradient="UnpackRNNSequence(dy, lengths)")
def pack_rnn_sequence(values, lengths):
    """[L, ...] -> [T, N, ...], padded with 0."""
    raise_if(values.ndim < 2, "it must have two dimensions at least", values=values)
    counts = known_lengths(lengths, values.shape[0])
    rows, present = _packed_rows(counts, int(counts.max(initial=0)))
    return _take(values, rows.T, present.T, 0)


@op("UnpackRNNSequence", gradient="PackRNNSequence(dy, lengths)")
def unpack_rnn_sequence(values, lengths):
    """[T, N, ...] -> [L, ...], the reverse of PackRNNSequence."""
    raise_if(values.ndim < 3, "it must have three dimensions at least", values=values)
    counts = known_lengths(lengths)
    if len(counts) != values.shape[1] or counts.max(initial=0) > values.shape[0]:
        raise OpError(
            f"lengths is {counts.tolist()} and values is {describe(values)}; there must be {values.shape[1]} lengths, at "
            f"most {values.shape[0]}"
        )
    sequence, step = _places(counts)
    return jnp.asarray(values)[step, sequence]


@op("VariableLengthSequencePadding", inplace={0: 0})
def variable_length_sequence_padding(x, lengths):
    """[T, N, D] with zeros from step lengths[n] on."""
    check_rank(x, 3, "x")
    check_lengths(lengths)
    raise_if(
        lengths.shape[0] != x.shape[1], f"there must be {x.shape[1]} lengths", lengths=lengths, x=x
    )
    valid = jnp.arange(x.shape[0])[:, None] < jnp.asarray(lengths)[None, :]
    return jnp.where(valid[:, :, None], x, 0)


def _widths(start, end):
    """Rows before and after each segment; the second number defaults to the first."""
    end = start if end < 0 else end
    raise_if(start < 0, f"argument 'padding_width' is {start}; it must be at least 0")
    return start, end


def _counts(data, lengths):
    raise_if(data.ndim == 0, "it must have a dimension at least", data=data)
    return np.array([data.shape[0]]) if lengths is None else known_lengths(lengths, data.shape[0])


def _padding_rows(counts, start, end):
    """The rows of padded segments that hold padding at the start, data, and padding at the end."""
    if (counts < start + end).any():
        raise OpError(
            f"a segment has {counts.min()} rows, fewer than its padding, {start} before and {end} after"
        )
    first = np.cumsum(counts) - counts
    last = np.cumsum(counts)
    at_start = rows_from(first, np.full(len(counts), start))
    return (
        at_start,
        rows_from(first + start, counts - start - end),
        rows_from(last - end, np.full(len(counts), end)),
    )


@op("AddPadding", outputs=(1, 2))
def add_padding(
    data, lengths=None, start_padding=None, end_padding=None, *, padding_width: int = 1, end_padding_width: int = -1
):  # fmt: skip
    """Adds rows of padding before and after each segment, and returns the new lengths too.

    The padding is `start_padding` and `end_padding`, one row each. By default they are zeros, and `end_padding` is
    `start_padding`.
    """
    start, end = _widths(padding_width, end_padding_width)
    counts = _counts(data, lengths)
    padded = counts + start + end
    at_start, at_data, at_end = _padding_rows(padded, start, end)
    rows = jnp.zeros((int(padded.sum()), *data.shape[1:]), data.dtype).at[at_data].set(data)
    if start_padding is not None:
        end_padding = start_padding if end_padding is None else end_padding
        for name, places, row in (
            ("start_padding", at_start, start_padding),
            ("end_padding", at_end, end_padding),
        ):
            if row.size != np.prod(data.shape[1:], dtype=int):
                raise OpError(
                    f"{name} is {describe(row)} and data is {describe(data)}; it must be as large as a row"
                )
            rows = rows.at[places].set(row.reshape(1, *data.shape[1:]))
    return rows, padded.astype(np.int32)


@op("RemovePadding", outputs=(1, 2), gradient="AddPadding(dy, y1)")
def remove_padding(data, lengths=None, *, padding_width: int = 1, end_padding_width: int = -1):
    """Removes the rows of padding at both ends of each segment, and returns the new lengths too."""
    start, end = _widths(padding_width, end_padding_width)
    counts = _counts(data, lengths)
    _, kept, _ = _padding_rows(counts, start, end)
    return jnp.asarray(data)[kept], (counts - start - end).astype(np.int32)


@op("GatherPadding", outputs=(1, 2))
def gather_padding(data, lengths=None, *, op, padding_width: int = 1, end_padding_width: int = -1):
    """The sum of all rows of start padding, and the sum of end padding; with one output, the sum of both."""
    start, end = _widths(padding_width, end_padding_width)
    at_start, _, at_end = _padding_rows(_counts(data, lengths), start, end)
    first, last = (jnp.asarray(data)[rows].sum(0, dtype=data.dtype) for rows in (at_start, at_end))
    return (first, last) if len(op.outputs) == 2 else first + last


@gradient("AddPadding")
def _(g):
    lengths = [g.output(1)] if len(g.op.outputs) > 1 else []
    g.emit("RemovePadding", [g.grad_output(0), *lengths], [g.grad_input(0)])
    if len(g.op.inputs) > 2:
        g.emit(
            "GatherPadding",
            [g.grad_output(0), *lengths],
            list(map(g.grad_input, range(2, len(g.op.inputs)))),
        )


@op("PadEmptySamples", outputs=(1, None))
def pad_empty_samples(lengths, *features):
    """Adds a row of zeros to each empty segment, in each of the features; the first output is the new lengths."""
    counts = known_lengths(lengths)
    padded = np.maximum(counts, 1)
    places = rows_from(np.cumsum(padded) - padded, counts)
    filled: list = []
    for k, feature in enumerate(features):
        if feature.shape[:1] != (counts.sum(),):
            raise OpError(
                f"feature {k} is {describe(feature)}; it must have the {counts.sum()} rows of lengths"
            )
        shape = (int(padded.sum()), *feature.shape[1:])
        if feature.dtype.kind in STRINGS:
            filled.append(np.full(shape, b"", feature.dtype))
            filled[-1][places] = feature
        else:
            filled.append(jnp.zeros(shape, feature.dtype).at[places].set(feature))
    return padded.astype(np.int32), *filled
