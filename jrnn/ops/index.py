"""Gathering along an axis by blobs of indices.

Shapes: with `match_outer` the dimensions before the axis are those of the indices too, and each outer element has indices
of its own; without, all share them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.autodiff import GradientSlice
from jrnn.errors import OpError
from jrnn.ops.values import STRINGS, canonical_axis, check_indices, check_integers, describe
from jrnn.registry import gradient, op


def _check(data: Any, indices: Any, axis: int, match_outer: bool) -> tuple[int, int]:
    """The axis counted from the front, and how many outer dimensions the indices have."""
    axis = canonical_axis(axis, data.ndim)
    check_integers(indices, "indices")
    outer = axis if match_outer else 0
    if indices.shape[:outer] != data.shape[:outer]:
        raise OpError(
            f"indices are {describe(indices)}; with match_outer=1 their first {outer} dimensions must be those of data, "
            f"{list(data.shape[:outer])}"
        )
    return axis, outer


def _wrapped(indices: Any, size: int) -> Any:
    """Indices of which negative ones count from the end, as ones in [0, size)."""
    where = np.where if isinstance(indices, np.ndarray) else jnp.where
    return where(indices < 0, indices + size, indices)


def _gathered(data: Any, indices: Any, axis: int, outer: int) -> Any:
    if data.shape[axis] == 0:
        return data  # compat: from nothing, nothing is gathered, whatever the indices
    if data.size:
        check_indices(indices, data.shape[axis])
    if data.dtype.kind in STRINGS:
        return np.take(data, np.asarray(indices), axis=axis)
    if outer == 0:
        return jnp.take(data, indices, axis=axis, mode="fill")
    shape = (*indices.shape, *data.shape[axis + 1 :])
    ones = (1,) * (data.ndim - axis - 1)
    flat = jnp.reshape(indices, (*indices.shape[:outer], int(np.prod(indices.shape[outer:])), *ones))
    return jnp.reshape(jnp.take_along_axis(data, flat, axis=axis, mode="fill"), shape)


@op("Gather")
def gather(data, indices, *, axis: int = 0, match_outer: bool = False, dense_gradient: bool = False):
    """Slices of `data` at `indices`, of which negative ones count from the end. The gradient is a sparse one, indices and
    slices, unless `dense_gradient` is set."""
    axis, outer = _check(data, indices, axis, match_outer)
    return _gathered(data, _wrapped(indices, data.shape[axis]), axis, outer)


@gradient("Gather")
def _(g):
    if g.arg("axis", 0):
        g.emit("BatchGatherGradient", [g.input(0), g.input(1), g.grad_output(0)], [g.grad_input(0)])
    elif g.arg("dense_gradient", 0):
        g.emit("SparseToDense", [g.input(1), g.grad_output(0), g.input(0)], [g.grad_input(0)])
    else:
        g.set_grad(0, GradientSlice(g.input(1), g.grad_output(0)))


@op("BatchGather", gradient="BatchGatherGradient(data, indices, dy)")
def batch_gather(data, indices, *, match_outer: bool = False):
    axis, outer = _check(data, indices, 1, match_outer)
    return _gathered(data, indices, axis, outer)


@op("BatchGatherGradient")
def batch_gather_gradient(data, indices, dy, *, axis: int = 1, match_outer: bool = False):
    """Adds up `dy` at the indices that it was gathered from, in the shape of `data`."""
    axis, outer = _check(data, indices, axis, match_outer)
    indices = _wrapped(indices, data.shape[axis])
    if data.size:
        check_indices(indices, data.shape[axis])
    # dy as [outer..., indices..., inner...]: the places of its elements in data
    inner = data.shape[axis + 1 :]
    expected = (*data.shape[:axis], *indices.shape[outer:], *inner)
    if dy.shape != expected:
        raise OpError(f"the gradient is {describe(dy)}; its shape must be {list(expected)}")
    rank = dy.ndim
    places = [jnp.arange(n).reshape([-1 if k == d else 1 for d in range(rank)]) for k, n in enumerate(dy.shape)]
    lead = (1,) * (axis - outer)
    along = jnp.reshape(indices, (*indices.shape[:outer], *lead, *indices.shape[outer:], *(1,) * len(inner)))
    places = [*places[:axis], along, *places[rank - len(inner) :]]
    return jnp.zeros(data.shape, dy.dtype).at[tuple(places)].add(dy)
