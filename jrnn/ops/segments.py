"""Segments: consecutive rows of a data blob, cut by a blob of lengths."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import check_rank, describe
from jrnn.ops.values import is_concrete


def check_lengths(lengths: Any, rows: int | None = None, name: str = "lengths") -> None:
    """Raises OpError unless `lengths` is a vector of integers that are not negative and add up to `rows`.

    The values can be checked only where they are not traced.
    """
    check_rank(lengths, 1, name)
    if lengths.dtype.kind not in "iu":
        raise OpError(f"{name} is {describe(lengths)}; it must hold integers")
    if is_concrete(lengths):
        values = np.asarray(lengths)
        if (values < 0).any():
            raise OpError(f"{name} has a negative length: {values.tolist()[:8]}")
        if rows is not None and values.sum() != rows:
            raise OpError(f"{name} adds up to {values.sum()}, but the data has {rows} rows; they must be equal")


def known_lengths(lengths: Any, rows: int | None = None, name: str = "lengths") -> np.ndarray:
    """Lengths as numpy, for operators whose output's shape depends on them; refused where they are traced."""
    values = np.asarray(lengths)
    check_lengths(values, rows, name)
    return values.astype(np.int64)


def segment_ids(lengths: Any, rows: int) -> Any:
    """The segment that each of `rows` rows belongs to; rows past the last segment get the number of segments.

    >>> segment_ids(np.array([2, 0, 1]), 3).tolist()
    [0, 0, 2]
    """
    return jnp.searchsorted(jnp.cumsum(jnp.asarray(lengths)), jnp.arange(rows), side="right")


def per_row(mask: Any, rows: Any) -> Any:
    """A vector (or matrix) that says something of each row, with dimensions of size 1 added to go with `rows`."""
    return mask.reshape(mask.shape + (1,) * (rows.ndim - mask.ndim))
