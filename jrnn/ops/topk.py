"""The k largest elements along an axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.values import as_float, canonical_axis, int64
from jrnn.registry import op


def _count(k: int | None, k_blob: Any) -> int:
    if k_blob is not None:
        if k_blob.size != 1 or k_blob.dtype.kind not in "iu":
            raise OpError(f"k is {describe(k_blob)}; it must hold 1 integer")
        k = int(np.asarray(k_blob).reshape(()))
    if k is None or k < 1:
        raise OpError(f"k is {k}; it must be at least 1, as argument 'k' or as the second input")
    return k


@op("TopK", outputs=(2, 3), gradient="TopKGradient(dy, y1, x)")
def top_k(x, k_blob=None, *, k: int | None = None, axis: int = -1):
    """The k largest elements along an axis, largest first, their indices along it, and their indices in the flat input.

    Of equal elements the one of lower index comes first. Where the axis has fewer than k elements, zeros of index -1 follow.
    """
    count, over = _count(k, k_blob), canonical_axis(axis, as_float(x).ndim)
    size = x.shape[over]
    values, index = jax.lax.top_k(jnp.moveaxis(x, over, -1), min(count, size))
    flat = jnp.moveaxis(jnp.arange(x.size, dtype=int64()).reshape(x.shape), over, -1)
    place = jnp.take_along_axis(flat, index, axis=-1)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, max(count - size, 0))]
    values = jnp.pad(values, padding)
    index, place = (jnp.pad(v.astype(int64()), padding, constant_values=-1) for v in (index, place))
    return (
        jnp.moveaxis(values, -1, over),
        jnp.moveaxis(index, -1, over),
        jnp.reshape(jnp.moveaxis(place, -1, over), (-1,)),
    )


@op("TopKGradient")
def top_k_gradient(dy, index, x, *, axis: int = -1):
    over = canonical_axis(axis, x.ndim)
    dy, index = jnp.moveaxis(dy, over, -1), jnp.moveaxis(index, over, -1)
    rows = jnp.zeros((dy.size // max(dy.shape[-1], 1), x.shape[over]), dy.dtype)
    index = jnp.reshape(index, (rows.shape[0], -1))
    index = jnp.where(index < 0, rows.shape[1], index)  # the padding falls outside and is dropped
    row = jnp.arange(rows.shape[0])[:, None]
    dx = rows.at[row, index].set(jnp.reshape(dy, index.shape), mode="drop")
    return jnp.moveaxis(jnp.reshape(dx, (*dy.shape[:-1], rows.shape[1])), -1, over)
