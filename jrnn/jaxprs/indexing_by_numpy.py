"""Lookups and updates at indices by numpy (`by_numpy.py`). None: an index is outside of the array, where XLA decides."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def places(shape, indices, sizes, map_, dropped, batching, of_batch):
    """Returns indices of windows in an array, over the axes of `indices` and those of a window; None if one is outside."""
    outer = indices.shape[:-1]
    inner = [d for d in range(len(shape)) if d not in (*dropped, *batching)]
    at = []
    for d, (n, size) in enumerate(zip(shape, sizes)):
        start = np.zeros(outer, int)
        if d in map_:
            start = indices[..., map_.index(d)].astype(int)
            if not np.all((start >= 0) & (start <= n - size)):
                return None
        elif d in batching:
            axis = of_batch[batching.index(d)]
            start = np.arange(n).reshape([-1 if i == axis else 1 for i in range(len(outer))])
        within = [size if d == e else 1 for e in inner]
        at.append(
            start.reshape((*start.shape, *[1] * len(inner)))
            + np.arange(size if d in inner else 1).reshape(within)
        )
    return tuple(np.broadcast_arrays(*at))


def gather(x, indices, *, dimension_numbers: Any, slice_sizes, **_):
    to = dimension_numbers
    dropped = to.collapsed_slice_dims
    batching = to.operand_batching_dims
    of_batch = to.start_indices_batching_dims
    at = places(x.shape, indices, slice_sizes, to.start_index_map, dropped, batching, of_batch)
    first = indices.ndim - 1
    return (
        None
        if at is None
        else np.moveaxis(x[at], range(first, first + len(to.offset_dims)), to.offset_dims)
    )


def scatter(combine):
    def of(x, indices, new, *, dimension_numbers: Any, **_):
        to = dimension_numbers
        first = indices.ndim - 1
        dropped = to.inserted_window_dims
        batching = to.operand_batching_dims
        of_batch = to.scatter_indices_batching_dims
        inner = iter(to.update_window_dims)
        sizes = [1 if d in (*dropped, *batching) else new.shape[next(inner)] for d in range(x.ndim)]
        at = places(
            x.shape, indices, sizes, to.scatter_dims_to_operand_dims, dropped, batching, of_batch
        )
        if at is None or x.dtype.kind == "V":
            return None
        out = np.array(x)
        combine(
            out,
            at,
            np.moveaxis(
                new, to.update_window_dims, range(first, first + len(to.update_window_dims))
            ),
        )
        return out

    return of


INDEXED: dict[str, Callable[..., Any]] = {
    "gather": gather,
    "scatter": scatter(operator.setitem),
    "scatter-add": scatter(np.add.at),
    "scatter-mul": scatter(np.multiply.at),
    "scatter-min": scatter(np.minimum.at),
    "scatter-max": scatter(np.maximum.at),
}
