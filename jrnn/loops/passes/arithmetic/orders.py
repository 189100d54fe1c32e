"""Rules for sorts and scatters of few elements.

A sort counts for each element how many precede it. That takes no branch and no exchange, and keeps the order of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.loops.passes.arithmetic.operands import Operand, Values, indices, where


def sort(eqn: Eqn, *operands: Array) -> Values:
    """A sort of several arrays by the first ones."""
    axis = eqn.params["dimension"]
    keys = eqn.params["num_keys"]
    last = [_with_axis(v, axis, -1) for v in operands]
    parts: list[Operand] = []
    for v in map(Operand, last[:keys]):
        parts += [v.real, v.imag] if v.is_complex else [v]
    order = _order(parts, descending=False)
    results = []
    for v in last:
        taken = jnp.take_along_axis(v, order, -1, mode="promise_in_bounds")
        results.append(_with_axis(taken, -1, axis))
    return results


def top_k(eqn: Eqn, operand: Array) -> Values:
    """The first values of a descending sort, and where they are."""
    axis = eqn.params.get("axis", operand.ndim - 1)
    k = eqn.params["k"]
    last = _with_axis(operand, axis, -1)
    order = _order([Operand(_ordinal(last))], descending=True)
    order = lax.slice_in_dim(order, 0, k, axis=-1)
    values = jnp.take_along_axis(last, order, -1, mode="promise_in_bounds")
    return [_with_axis(v, -1, axis) for v in (values, order)]


def _with_axis(v: Array, axis: int, at: int) -> Array:
    """Returns an array with an axis in another place."""
    order = [*range(v.ndim)]
    order.insert(at % v.ndim, order.pop(axis))
    return lax.transpose(v, order)


def _ordinal(v: Array) -> Array:
    """Returns integers in the order of values, as XLA's top_k compares them: -NaN < -inf < -0.0 < 0.0 < inf < NaN."""
    if not jnp.issubdtype(v.dtype, jnp.floating):
        return v
    size = 8 * v.dtype.itemsize
    bits = lax.bitcast_convert_type(v, f"int{size}")
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, size - 1))
    largest = np.asarray(jnp.iinfo(bits.dtype).max, bits.dtype)
    flipped = lax.bitwise_and(sign, largest)
    return lax.bitwise_xor(bits, flipped)


def _order(keys: Sequence[Operand], descending: bool) -> Array:
    """Returns the indices that sort the last axis by keys; the first key matters most. NaN is the largest value."""
    shape = (*keys[0].shape, keys[0].shape[-1])
    mine = indices(shape, -2)
    other = indices(shape, -1)
    first = other < mine
    for key in reversed(keys):
        a = key.reshape(*key.shape, 1)
        b = key.reshape(*key.shape[:-1], 1, key.shape[-1])
        less = a < b if descending else b < a
        same = a == b
        if jnp.issubdtype(key.dtype, jnp.inexact):
            nan_a = a != a
            nan_b = b != b
            same |= nan_a & nan_b
            only_one = (nan_b & ~nan_a) if descending else (nan_a & ~nan_b)
            less |= only_one
        first = less | (same & first)
    axis = len(shape) - 1
    preceding = lax.reduce_sum(first.astype(np.int32).array, (axis,))
    rank = Operand(lax.expand_dims(preceding, (axis - 1,)))
    return lax.reduce_sum(where(rank == mine, other, 0).array, (axis,))


def scatter(
    eqn: Eqn,
    operand: Array,
    indices: Array,
    updates: Array,
) -> Values:
    """A scatter as one scatter for each place, in their order. XLA makes an update of a slice of each."""
    numbers = eqn.params["dimension_numbers"]
    batch = numbers.operand_batching_dims
    batches = numbers.scatter_indices_batching_dims
    single = lax.ScatterDimensionNumbers(
        numbers.update_window_dims,
        tuple(sorted((*numbers.inserted_window_dims, *batch))),
        (*numbers.scatter_dims_to_operand_dims, *batch),
    )
    apart = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    for at in np.ndindex(*indices.shape[:-1]):
        index = indices
        update = updates
        for d, i in enumerate(at):
            index = lax.slice_in_dim(index, i, i + 1, axis=d)
            update = lax.slice_in_dim(update, i, i + 1, axis=apart[d])
        known = [lax.full((*index.shape[:-1], 1), at[d], index.dtype) for d in batches]
        index = lax.concatenate([index, *known], index.ndim - 1)
        (operand,) = jaxprs.bind(
            eqn,
            operand,
            index,
            update,
            dimension_numbers=single,
        )
    return [operand]


RULES = {
    "sort": sort,
    "top_k": top_k,
    **dict.fromkeys(primitives.with_kind("update") - {"dynamic_update_slice"}, scatter),
}
