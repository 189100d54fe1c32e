"""Lookups and updates at indices by numpy. None: an index is outside of the array, where XLA decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrnn.jaxprs.primitives.numpy_rules import Array, Axes, Evaluate
from jrnn.jaxprs.queries import other_axes


def _window(shape: Axes, sizes: Axes, starts: Sequence[Array]) -> tuple[slice, ...]:
    """Returns the slices of a window of an array, which is moved until it lies inside."""
    slices = []
    for start, total, size in zip(starts, shape, sizes):
        first = min(max(int(start), 0), total - size)
        slices.append(slice(first, first + size))
    return tuple(slices)


def dynamic_slice(x: Array, *starts: Array, slice_sizes: Axes) -> Array:
    return x[_window(x.shape, slice_sizes, starts)]


def dynamic_update_slice(x: Array, new: Array, *starts: Array, **_: Any) -> Array:
    out = np.array(x)
    out[_window(x.shape, new.shape, starts)] = new
    return out


def _places(
    shape: Axes,
    indices: Array,
    sizes: Axes,
    indexed: Axes,
    dropped: Axes,
    batching: Axes,
    batch_axes: Axes,
) -> tuple[Array, ...] | None:
    """Returns the indices of the elements of windows, over the axes of `indices` and then the axes of a window.

    Args:
        shape: of the array.
        indices: the first element of each window, along the axes that are indexed [..., indexed axes].
        sizes: of a window.
        indexed: the axes of the array that are indexed.
        dropped: the axes that windows do not have.
        batching: the batch axes of the array.
        batch_axes: the batch axes of the indices.

    Returns:
        An array for each axis of the array; None if a window is outside.
    """
    outer_ndim = indices.ndim - 1
    inner = other_axes(len(shape), (*dropped, *batching))
    all_indices = []
    for axis, (total, size) in enumerate(zip(shape, sizes)):
        start = np.zeros(indices.shape[:-1], int)
        if axis in indexed:
            start = indices[..., indexed.index(axis)].astype(int)
            if not np.all((start >= 0) & (start <= total - size)):
                return None
        elif axis in batching:
            start = _along(np.arange(total), batch_axes[batching.index(axis)], outer_ndim)
        within = np.zeros([1] * len(inner), int)
        if axis in inner:
            within = _along(np.arange(size), inner.index(axis), len(inner))
        start = start.reshape((*start.shape, *within.ndim * [1]))
        all_indices.append(start + within)
    return tuple(np.broadcast_arrays(*all_indices))


def _along(values: Array, axis: int, ndim: int) -> Array:
    """Returns a vector along one of several axes."""
    shape = [1] * ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def gather(
    x: Array, indices: Array, *, dimension_numbers: Any, slice_sizes: Axes, **_: Any
) -> Array | None:
    numbers = dimension_numbers
    places = _places(
        shape=x.shape,
        indices=indices,
        sizes=slice_sizes,
        indexed=numbers.start_index_map,
        dropped=numbers.collapsed_slice_dims,
        batching=numbers.operand_batching_dims,
        batch_axes=numbers.start_indices_batching_dims,
    )
    if places is None:
        return None
    axes = range(indices.ndim - 1, indices.ndim - 1 + len(numbers.offset_dims))
    return np.moveaxis(x[places], axes, numbers.offset_dims)


def scatter(combine: Callable[..., None]) -> Evaluate:
    """Returns the rule of updates: `combine(array, indices, new values)` writes to the array."""

    def rule(
        x: Array, indices: Array, new: Array, *, dimension_numbers: Any, **_: Any
    ) -> Array | None:
        numbers = dimension_numbers
        dropped = numbers.inserted_window_dims
        batching = numbers.operand_batching_dims
        sizes = [1] * x.ndim
        inner = other_axes(x.ndim, (*dropped, *batching))
        for axis, place in zip(inner, numbers.update_window_dims):
            sizes[axis] = new.shape[place]
        places = _places(
            shape=x.shape,
            indices=indices,
            sizes=sizes,
            indexed=numbers.scatter_dims_to_operand_dims,
            dropped=dropped,
            batching=batching,
            batch_axes=numbers.scatter_indices_batching_dims,
        )
        if places is None or x.dtype.kind == "V":
            return None
        out = np.array(x)
        axes = range(indices.ndim - 1, indices.ndim - 1 + len(numbers.update_window_dims))
        combine(out, places, np.moveaxis(new, numbers.update_window_dims, axes))
        return out

    return rule
