"""Gathering and scattering along an axis, by blobs of indices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..autodiff import GradientSlice
from ..errors import OpError
from ..registry import gradient, op
from .checks import describe
from .values import canonical_axis, check_indices


def _gather(data: Any, indices: Any, axis: int, match_outer: bool) -> Any:
    """`data` at `indices` along `axis`; with match_outer, each outer element has indices of its own."""
    outer = axis if match_outer else 0
    if indices.shape[:outer] != data.shape[:outer]:
        raise OpError(
            f"indices are {describe(indices)}; with match_outer=1 their first {outer} dimensions must be those of data, "
            f"{list(data.shape[:outer])}"
        )
    if data.dtype == object:
        return np.take(data, np.asarray(indices), axis=axis)
    if not match_outer:
        return jnp.take(data, indices, axis=axis, mode="fill")
    shape = (*indices.shape, *data.shape[axis + 1 :])
    inner = int(np.prod(indices.shape[outer:]))
    flat = jnp.reshape(indices, (*indices.shape[:outer], inner, *(1,) * (data.ndim - axis - 1)))
    return jnp.reshape(jnp.take_along_axis(data, flat, axis=axis, mode="fill"), shape)


def wrapped(indices: Any, size: int) -> Any:
    """Indices of which negative ones count from the end, as ones in [0, size); OpError where one is outside."""
    positive = np.where(indices < 0, indices + size, indices) if isinstance(indices, np.ndarray) else indices
    if positive is indices:
        positive = jnp.where(indices < 0, indices + size, indices)
    check_indices(positive, size, "indices")
    return positive


@op("Gather")
def gather(data, indices, *, axis: int = 0, match_outer: bool = False):
    if data.ndim == 0:
        raise OpError("data is a scalar; it must have an axis to gather from")
    axis = canonical_axis(axis, data.ndim)
    return _gather(data, wrapped(indices, data.shape[axis]), axis, match_outer)


@gradient("Gather")
def _(g):
    if g.arg("dense_gradient", 0):
        inputs = [g.input(1), g.grad_output(0), g.input(0)]
        g.emit("SparseToDense", inputs, [g.grad_input(0)])
    else:
        g.set_grad(0, GradientSlice(g.input(1), g.grad_output(0)))
