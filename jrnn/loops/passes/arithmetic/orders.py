"""Rules for sorts and scatters of few elements.

A sort counts for each element how many precede it. That takes no branch and no exchange, and keeps the order of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.loops.passes.arithmetic.products import Values, where


def sort(eqn: Eqn, *operands: Any) -> Values:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    last = [jnp.moveaxis(v, axis, -1) for v in operands]
    order = _order([p for v in last[:keys] for p in ((v.real, v.imag) if jnp.iscomplexobj(v) else (v,))], False)
    return [jnp.moveaxis(jnp.take_along_axis(v, order, -1, mode="promise_in_bounds"), -1, axis) for v in last]


def top_k(eqn: Eqn, operand: Any) -> Values:
    axis, k = eqn.params.get("axis", operand.ndim - 1), eqn.params["k"]
    last = jnp.moveaxis(operand, axis, -1)
    order = _order([_ordinal(last)], True)[..., :k]
    values = jnp.take_along_axis(last, order, -1, mode="promise_in_bounds")
    return [jnp.moveaxis(v, -1, axis) for v in (values, order)]


def _ordinal(v: Any) -> Any:
    """Returns integers in the order of values, as XLA's top_k compares them: -NaN < -inf < -0.0 < 0.0 < inf < NaN."""
    if not jnp.issubdtype(v.dtype, jnp.floating):
        return v
    bits = lax.bitcast_convert_type(v, f"int{8 * v.dtype.itemsize}")
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 8 * v.dtype.itemsize - 1)) & jnp.iinfo(bits).max)


def _order(keys: Sequence[Any], descending: bool) -> Any:
    """Returns the indices that sort the last axis by keys, the first of which matters most. NaN is the largest value."""
    shape = (*keys[0].shape, keys[0].shape[-1])
    mine, other = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (len(shape) - 2, len(shape) - 1))
    first = other < mine
    for key in reversed(keys):
        a, b = key[..., :, None], key[..., None, :]
        less, same = (a < b, a == b) if descending else (b < a, a == b)
        if jnp.issubdtype(key.dtype, jnp.inexact):
            nan_a, nan_b = a != a, b != b
            same |= nan_a & nan_b
            less |= (nan_b & ~nan_a) if descending else (nan_a & ~nan_b)
        first = less | (same & first)
    rank = jnp.sum(first, -1, dtype=jnp.int32)
    return jnp.sum(where(rank[..., None, :] == mine, other, 0), -1, dtype=jnp.int32)


def scatter(eqn: Eqn, operand: Any, indices: Any, updates: Any) -> Values:
    """A scatter as one scatter for each place, in their order. XLA makes an update of a slice of each."""
    numbers = eqn.params["dimension_numbers"]
    batch, batches = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    single = lax.ScatterDimensionNumbers(
        numbers.update_window_dims,
        tuple(sorted((*numbers.inserted_window_dims, *batch))),
        (*numbers.scatter_dims_to_operand_dims, *batch),
    )
    apart = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    for at in np.ndindex(*indices.shape[:-1]):
        index, update = indices, updates
        for d, i in enumerate(at):
            index = lax.slice_in_dim(index, i, i + 1, axis=d)
            update = lax.slice_in_dim(update, i, i + 1, axis=apart[d])
        known = [lax.full((*index.shape[:-1], 1), at[d], index.dtype) for d in batches]
        index = lax.concatenate([index, *known], index.ndim - 1)
        (operand,) = jaxprs.bind(eqn, operand, index, update, dimension_numbers=single)
    return [operand]


RULES = {
    "sort": sort,
    "top_k": top_k,
    **dict.fromkeys(primitives.with_kind("update") - {"dynamic_update_slice"}, scatter),
}
