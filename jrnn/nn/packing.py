"""Packed sequences: sequences of different lengths in one array without padding, in PyTorch's order.

Shapes: T time, N batch, C capacity.

The rows of a packed array are ordered by time and, within a step, from the longest sequence to the shortest. Their number
depends on the lengths, but the array's shape must not: else jit would compile again for every new set of lengths. So the
array has a fixed capacity, and the rows after the last one are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.queries import along_first
from jrnn.nn.checks import check_integer, check_lengths, concrete
from jrnn.nn.sequences import before_end, where_live


class PackedSequence(NamedTuple):
    """Sequences of different lengths without padding; make one with `pack_padded_sequence` or `pack_sequence`.

    Attributes:
        data: [C, ...]; the first `sum(batch_sizes)` rows are the packed steps, the others are zeros.
        batch_sizes: [T] int32, how many sequences have a step t.
        sorted_indices: [N] int32, the indices of the sequences from the longest to the shortest.
        unsorted_indices: [N] int32, the inverse of `sorted_indices`.
    """

    data: Array
    batch_sizes: Array
    sorted_indices: Array
    unsorted_indices: Array

    @property
    def lengths(self) -> Array:
        """[N] int32, the length of each sequence, in the order of the batch before packing."""
        ranks = self.unsorted_indices[:, None]
        return jnp.sum(self.batch_sizes[None, :] > ranks, axis=1, dtype=jnp.int32)


def bucket(length: int, *, least: int = 8, per_octave: int = 4) -> int:
    """Returns the smallest bucket that holds `length`. Padding to buckets limits how many shapes are compiled.

    Args:
        length: a length, or a number of rows, of at least 0.
        least: the smallest bucket.
        per_octave: the number of buckets between consecutive powers of two. Padding adds at most about 1 / per_octave.

    >>> [bucket(n) for n in (0, 3, 8, 9, 11, 100, 1000)]
    [8, 8, 8, 10, 12, 112, 1024]
    """
    length = check_integer("bucket: length", length, 0)
    least = check_integer("bucket: least", least, 1)
    per_octave = check_integer("bucket: per_octave", per_octave, 1)
    if length <= least:
        return least
    step = max(1, (1 << (length - 1).bit_length() - 1) // per_octave)
    return -(-length // step) * step


def pack_padded_sequence(
    x: Any,
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,
    *,
    capacity: int | None = None,
) -> PackedSequence:
    """Packs padded sequences. The values in the padding do not matter.

    Args:
        x: [T, N, ...], or [N, T, ...] with batch_first.
        lengths: [N] integers from 0 to T.
        enforce_sorted: the lengths must be in descending order, which is checked outside jit; False allows any order.
        capacity: the number of rows of `data`; by default N T, which is enough for any lengths. `bucket(sum(lengths))` is
            smaller, and jit compiles once per bucket.

    Raises:
        LayerError: if lengths are not integers from 0 to T, not in descending order with enforce_sorted, or need more rows
            than `capacity`. If the capacity is too small inside jit, all of `data` is NaN instead.

    >>> packed = pack_padded_sequence(jnp.array([[1.0, 4.0], [2.0, 9.0], [3.0, 9.0]]), [3, 1])
    >>> print(packed.data, packed.batch_sizes)
    [1. 4. 2. 3. 0. 0.] [2 1 1]
    """
    x = jnp.asarray(x)
    if x.ndim < 2:
        raise LayerError(
            f"pack_padded_sequence: x is {list(x.shape)}; it must be [T, N, ...], or [N, T, ...]"
        )
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    steps, batch = x.shape[:2]
    lengths = check_lengths("pack_padded_sequence", lengths, steps, batch)
    known = concrete(lengths)
    if known is not None and enforce_sorted and (np.diff(known) > 0).any():
        raise LayerError(
            f"pack_padded_sequence: lengths are {known.tolist()}; sort them in descending order, or give "
            "enforce_sorted=False"
        )
    if capacity is None:
        capacity = steps * batch
    else:
        capacity = check_integer("pack_padded_sequence: capacity", capacity, 0)
    if known is not None and known.sum() > capacity:
        raise LayerError(
            f"pack_padded_sequence: the lengths add up to {known.sum()} rows, but capacity is {capacity}; "
            f"bucket(sum(lengths)) is {bucket(int(known.sum()))}"
        )
    order = jnp.argsort(-lengths, stable=True).astype(jnp.int32)
    batch_sizes = jnp.sum(before_end(steps, lengths), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(batch_sizes)
    rows = jnp.arange(capacity)
    if not steps or not batch:
        data = jnp.zeros((capacity, *x.shape[2:]), x.dtype)
    else:
        t = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), steps - 1)
        column = jnp.clip(rows - (ends - batch_sizes)[t], 0, batch - 1)
        data = where_live(rows < ends[-1], x[t, order[column]])
        if known is None and jnp.issubdtype(x.dtype, jnp.inexact):
            data = jnp.where(ends[-1] > capacity, jnp.full((), jnp.nan, x.dtype), data)
    return PackedSequence(data, batch_sizes, order, jnp.argsort(order).astype(jnp.int32))


def pad_packed_sequence(
    packed: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Array, Array]:
    """Returns padded sequences from packed ones, in the order of the batch before packing, and their lengths.

    Args:
        packed: the packed sequences.
        batch_first: return [N, T, ...] instead of [T, N, ...].
        padding_value: the value after the end of a sequence.
        total_length: pad to this many steps; by default the T of `packed.batch_sizes`.

    Returns:
        `(x, lengths)`: [T, N, ...] and [N].

    >>> x, lengths = pad_packed_sequence(pack_padded_sequence(jnp.arange(6.0).reshape(3, 2), [3, 1]))
    >>> print(x.T, lengths)
    [[0. 2. 4.]
     [1. 0. 0.]] [3 1]
    """
    (steps,) = packed.batch_sizes.shape
    (batch,) = packed.sorted_indices.shape
    total = steps if total_length is None else total_length
    lengths = packed.lengths
    known = concrete(lengths)
    longest = steps if known is None else int(known.max(initial=0))
    if total < longest:
        raise LayerError(
            f"pad_packed_sequence: total_length is {total}, but the packed sequences may have {longest} steps"
        )
    data = packed.data
    padding = jnp.asarray(padding_value, packed.data.dtype)
    if not data.size or not total:
        x = jnp.full((total, batch, *data.shape[1:]), padding)
    else:
        sizes = jnp.zeros(total, jnp.int32).at[:steps].set(packed.batch_sizes[:total])
        starts = jnp.cumsum(sizes) - sizes
        ranks = packed.unsorted_indices[None, :]
        rows = jnp.clip(starts[:, None] + ranks, 0, data.shape[0] - 1)
        of_rows = data[rows]
        x = jnp.where(along_first(ranks < sizes[:, None], of_rows), of_rows, padding)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), lengths


def pad_sequence(
    sequences: Sequence[Any],
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> Array:
    """Stacks sequences [T_n, ...] to one padded array [T, N, ...], where T is the longest T_n or `total_length`."""
    # numpy does not compile for every new set of lengths; only tracers need jax.numpy.
    xp = jnp if any(map(is_traced, sequences)) else np
    arrays = list(map(xp.asarray, sequences))
    if not arrays:
        raise LayerError("pad_sequence: there are no sequences; give at least one")
    longest = max(map(len, arrays))
    total = longest if total_length is None else total_length
    if total < longest:
        raise LayerError(
            f"pad_sequence: total_length is {total}, but a sequence has {longest} steps"
        )
    features = arrays[0].shape[1:]
    for n, array in enumerate(arrays):
        if array.shape[1:] != features:
            raise LayerError(
                f"pad_sequence: sequence {n} is {list(array.shape)}, but the first is {list(arrays[0].shape)}; "
                "all axes but the first must agree"
            )
    dtype = xp.result_type(*arrays)
    padded = []
    for a in arrays:
        padded.append(
            xp.concatenate([a, xp.full((total - len(a), *features), padding_value, dtype)])
        )
    return jnp.asarray(xp.stack(padded, axis=0 if batch_first else 1))


def pack_sequence(
    sequences: Sequence[Any],
    enforce_sorted: bool = True,
    *,
    total_length: int | None = None,
    capacity: int | None = None,
) -> PackedSequence:
    """Packs a list of sequences [T_n, ...]. Empty sequences are allowed.

    Args:
        enforce_sorted: as in `pack_padded_sequence`.
        total_length: T, at least the longest. With `bucket(longest)`, jit compiles once per bucket.
        capacity: as in `pack_padded_sequence`.

    >>> pack_sequence([jnp.array([1.0, 2.0]), jnp.array([3.0])]).data.tolist()
    [1.0, 3.0, 2.0, 0.0]
    """
    padded = pad_sequence(sequences, total_length=total_length)
    lengths = list(map(len, sequences))
    return pack_padded_sequence(padded, lengths, enforce_sorted=enforce_sorted, capacity=capacity)


def bucketed(
    sequences: Sequence[Any], batch_size: int, *, least: int = 8, per_octave: int = 4
) -> list[tuple[int, list[int]]]:
    """Groups sequences of similar length into batches whose padded lengths are buckets.

    Args:
        sequences: objects with a length.
        batch_size: the largest number of sequences in a batch.
        least, per_octave: as in `bucket`.

    Returns:
        `(padded length, indices of the sequences)` for each batch, in the order of the padded lengths.

    >>> bucketed(["a" * n for n in (3, 30, 5, 31, 32)], batch_size=2)
    [(8, [0, 2]), (32, [1, 3]), (32, [4])]
    """
    batch_size = check_integer("bucketed: batch_size", batch_size, 1)
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        length = bucket(len(sequence), least=least, per_octave=per_octave)
        groups.setdefault(length, []).append(index)
    batches = []
    for length, members in sorted(groups.items()):
        for k in range(0, len(members), batch_size):
            batches.append((length, members[k : k + batch_size]))
    return batches
