"""Padding around the segments of a data blob: AddPadding, RemovePadding, GatherPadding and PadEmptySamples.

Shapes: `lengths` is int32 [S], and cuts the rows of `data` [L, ...]; without lengths, all of it is one segment.
"""

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.lengths import known_lengths
from jrnn.ops.values import describe
from jrnn.registry import gradient, op


def _widths(start, end):
    """Rows before and after each segment; the end's are as many as the start's unless they are given."""
    end = start if end < 0 else end
    if start < 0:
        raise OpError(f"argument 'padding_width' is {start}; it must be at least 0")
    return start, end


def _counts(data, lengths):
    if data.ndim == 0:
        raise OpError(f"data is {describe(data)}; it must have a dimension at least")
    return np.array([data.shape[0]]) if lengths is None else known_lengths(lengths, data.shape[0])


def _padding_rows(counts, start, end):
    """Of the rows of padded segments: the indices of start paddings, of data and of end paddings."""
    if (counts < start + end).any():
        raise OpError(
            f"a segment has {counts.min()} rows, fewer than its padding, {start} at the start and {end} at the end"
        )
    first = np.cumsum(counts) - counts
    return tuple(
        np.concatenate([f + np.arange(*span(n)) for f, n in zip(first, counts)] or [np.zeros(0)]).astype(np.int64)
        for span in (lambda n: (0, start), lambda n: (start, n - end), lambda n: (n - end, n))
    )


@op("AddPadding", outputs=(1, 2))
def add_padding(
    data, lengths=None, start_padding=None, end_padding=None, *, padding_width: int = 1, end_padding_width: int = -1
):  # fmt: skip
    """Rows of padding before and after each segment, and the new lengths.

    The padding is `start_padding` and `end_padding`, one row each; zeros without them, `start_padding` on both sides
    without the other.
    """
    start, end = _widths(padding_width, end_padding_width)
    counts = _counts(data, lengths)
    padded = counts + start + end
    at_start, at_data, at_end = _padding_rows(padded, start, end)
    made = jnp.zeros((int(padded.sum()), *data.shape[1:]), data.dtype).at[at_data].set(data)
    if start_padding is not None:
        end_padding = start_padding if end_padding is None else end_padding
        for name, places, row in (("start_padding", at_start, start_padding), ("end_padding", at_end, end_padding)):
            if row.size != np.prod(data.shape[1:], dtype=int):
                raise OpError(f"{name} is {describe(row)} and data is {describe(data)}; it must be as large as a row")
            made = made.at[places].set(row.reshape(1, *data.shape[1:]))
    return made, padded.astype(np.int32)


@op("RemovePadding", outputs=(1, 2))
def remove_padding(data, lengths=None, *, padding_width: int = 1, end_padding_width: int = -1):
    """The segments without the rows of padding at their starts and ends, and the new lengths."""
    start, end = _widths(padding_width, end_padding_width)
    counts = _counts(data, lengths)
    _, kept, _ = _padding_rows(counts, start, end)
    return jnp.asarray(data)[kept], (counts - start - end).astype(np.int32)


@op("GatherPadding", outputs=(1, 2))
def gather_padding(data, lengths=None, *, op, padding_width: int = 1, end_padding_width: int = -1):
    """The sum of all rows of start padding, and that of end padding; both together where there is one output."""
    start, end = _widths(padding_width, end_padding_width)
    at_start, _, at_end = _padding_rows(_counts(data, lengths), start, end)
    first, last = (jnp.asarray(data)[rows].sum(0, dtype=data.dtype) for rows in (at_start, at_end))
    return (first, last) if len(op.outputs) == 2 else first + last


@gradient("AddPadding")
def _(g):
    lengths = [g.output(1)] if len(g.op.outputs) > 1 else []
    g.emit("RemovePadding", [g.grad_output(0), *lengths], [g.grad_input(0)])
    if len(g.op.inputs) > 2:
        g.emit("GatherPadding", [g.grad_output(0), *lengths], [g.grad_input(k) for k in range(2, len(g.op.inputs))])


@gradient("RemovePadding")
def _(g):
    lengths = [g.output(1)] if len(g.op.outputs) > 1 else []
    g.emit("AddPadding", [g.grad_output(0), *lengths], [g.grad_input(0)])


@op("PadEmptySamples", outputs=(1, None))
def pad_empty_samples(lengths, *features):
    """Empty segments get one row of zeros, in each of the features; and the new lengths."""
    counts = known_lengths(lengths)
    padded = np.maximum(counts, 1)
    starts = np.cumsum(padded) - padded
    places = np.concatenate([s + np.arange(n) for s, n in zip(starts, counts)] or [np.zeros(0)]).astype(np.int64)
    made: list = []
    for k, feature in enumerate(features):
        if feature.shape[:1] != (counts.sum(),):
            raise OpError(
                f"feature {k} is {describe(feature)}; lengths add up to {counts.sum()}, which its rows must be"
            )
        shape = (int(padded.sum()), *feature.shape[1:])
        if feature.dtype.kind in "OS":
            made.append(np.full(shape, b"", feature.dtype))
            made[-1][places] = feature
        else:
            made.append(jnp.zeros(shape, feature.dtype).at[places].set(feature))
    return padded.astype(np.int32), *made
