"""Selecting rows by a boolean mask, scattering them back, and Unique.

The number of selected rows is part of the result's shape, so the mask must be known when a net is traced.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import check_rank, describe
from jrnn.ops.segments import per_row
from jrnn.ops.values import is_concrete
from jrnn.registry import op


def _check_mask(mask: Any) -> None:
    check_rank(mask, 1, "mask")
    if mask.dtype != bool:
        raise OpError(f"mask is {describe(mask)}; it must hold booleans")


@op("BooleanMask", outputs=(1, 2), dynamic=True, gradient="BooleanMaskGradient(mask, dy)")
def boolean_mask(data, mask):
    """The rows of `data` whose mask is true, and their indices."""
    _check_mask(mask)
    if mask.shape != data.shape[:1]:
        raise OpError(
            f"data is {describe(data)} and mask is {describe(mask)}; mask must have one element a row of data"
        )
    chosen = np.flatnonzero(np.asarray(mask))
    return data[chosen], chosen.astype(np.int64)


@op("BooleanMaskGradient")
def boolean_mask_gradient(mask, dy):
    """Rows put back where the mask is true, and zeros elsewhere."""
    _check_mask(mask)
    if is_concrete(mask) and int(np.sum(np.asarray(mask))) != dy.shape[0]:
        raise OpError(f"mask chooses {int(np.sum(np.asarray(mask)))} rows, and the gradient is {describe(dy)}")
    if dy.shape[0] == 0:
        return jnp.zeros(mask.shape + dy.shape[1:], dy.dtype)
    rows = jnp.take(dy, jnp.cumsum(mask) - 1, axis=0, mode="clip")
    return jnp.where(per_row(mask, rows), rows, 0)


@op("BooleanUnmask", gradient="stops")
def boolean_unmask(*pairs):
    """Merges vectors, given as mask_1, values_1, mask_2, values_2, ...: each element is the next one of the first vector
    whose mask is true there."""
    masks, values = pairs[::2], pairs[1::2]
    if not pairs or len(masks) != len(values):
        raise OpError(f"takes masks and values in pairs, was given {len(pairs)} inputs")
    free = np.ones(masks[0].shape, bool)
    merged = jnp.zeros(masks[0].shape, values[0].dtype)
    for k, (mask, vector) in enumerate(zip(masks, values)):
        _check_mask(mask)
        check_rank(vector, 1, f"values #{k}")
        if mask.shape != masks[0].shape or vector.dtype != values[0].dtype:
            raise OpError(
                f"mask #{k} is {describe(mask)}, its values {describe(vector)}; all must have one length and type"
            )
        own = mask & free
        free = free & ~mask
        if is_concrete(own) and int(np.sum(np.asarray(own))) != vector.size:
            raise OpError(f"mask #{k} takes {int(np.sum(np.asarray(own)))} values and has {vector.size}")
        if vector.size:
            merged = jnp.where(own, jnp.take(vector, jnp.cumsum(own) - 1, mode="clip"), merged)
    if is_concrete(free) and np.any(np.asarray(free)):
        raise OpError(f"no mask is true at position {int(np.argmax(np.asarray(free)))}")
    return jax.lax.stop_gradient(merged)


@op("Unique", outputs=(1, 2), gradient="forbidden", dynamic=True)
def unique(x):
    """The different values of a vector of integers, sorted, and for each element the index of its value among them."""
    check_rank(x, 1, "x")
    if x.dtype.kind not in "iu":
        raise OpError(f"x is {describe(x)}; it must hold integers")
    values, index = np.unique(np.asarray(x), return_inverse=True)
    return values, index.astype(np.int32)
