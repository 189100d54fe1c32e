"""Rules for products and solves with triangular matrices, and the helpers that all rules share.

A rule takes an equation and its operands, and returns the results, or None if it does not apply. A result is None if only a
call gives it; the rule applies where nothing reads it. Matrices are the last two axes, and all other axes are batches.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs import Eqn

Values = Sequence[Any] | None

_MOST_FUSED = 64  # multiplications of a product that is a sum of fused terms


def block(a: Any, rows: slice, columns: slice) -> Any:
    """Returns a part of each matrix, without removing an axis."""
    (top, bottom, _), (left, right, _) = rows.indices(a.shape[-2]), columns.indices(a.shape[-1])
    return lax.slice(a, (*[0] * (a.ndim - 2), top, left), (*a.shape[:-2], bottom, right))


def unstacked(a: Any, axis: int) -> list[Any]:
    """Returns the rows (axis -2) or columns (axis -1) of each matrix. One equation lowers sooner than a slice for each."""
    return lax.split(a, (1,) * a.shape[axis], axis=a.ndim + axis)


def transposed(a: Any) -> Any:
    return lax.transpose(a, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2))


def conj(a: Any) -> Any:
    return lax.conj(a) if jnp.iscomplexobj(a) else a


def indices(a: Any, axis: int) -> Any:
    """Returns the index of the row (axis -2) or column (axis -1) of each element."""
    return lax.broadcasted_iota(jnp.int32, a.shape, a.ndim + axis)


def where(which: Any, a: Any, b: Any) -> Any:
    """Returns `jnp.where(which, a, b)` without a call, which takes longer to lower."""
    shape, kinds = jnp.broadcast_shapes(*map(jnp.shape, (which, a, b))), (bool, *[jnp.result_type(a, b)] * 2)
    return lax.select(*(jnp.broadcast_to(jnp.asarray(v, kind), shape) for v, kind in zip((which, a, b), kinds)))


def repeated(times: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """Returns what a loop makes of `start`: `body` gets the number of a trip and the state.

    Rules are traced with `jax.disable_jit`, so that functions of jax.numpy are no calls. The loop stays one.
    """

    def trip(k: Any, state: Any) -> Any:
        with jax.disable_jit():
            return body(k, state)

    with jax.disable_jit(False):
        return lax.fori_loop(0, times, trip, start)


# Products ---------------------------------------------------------------------------------------------------------------


def dot_general(eqn: Eqn, a: Any, b: Any) -> Values:
    """A product: a sum of products of elements, in the order of the contracted axes."""
    (out,), precision = eqn.outvars, eqn.params["precision"]
    if a.dtype == bool or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return None
    (over_a, over_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    dtype = _accumulator_dtype(jnp.promote_types(out.aval.dtype, jnp.result_type(a, b)))
    axes = (a, (*over_a, *batch_a)), (b, (*over_b, *batch_b))
    free_a, free_b = ([d for d in range(v.ndim) if d not in used] for v, used in axes)
    depth = math.prod(a.shape[d] for d in over_a)
    batch, rows, columns = ([v.shape[d] for d in axes] for v, axes in ((a, batch_a), (a, free_a), (b, free_b)))
    a = lax.transpose(a, (*batch_a, *free_a, *over_a)).astype(dtype)
    b = lax.transpose(b, (*batch_b, *over_b, *free_b)).astype(dtype)
    a = lax.reshape(a, (*batch, math.prod(rows), depth))
    b = lax.reshape(b, (*batch, depth, math.prod(columns)))
    return [lax.reshape(product(a, b), out.aval.shape).astype(out.aval.dtype)]


def product(a: Any, b: Any) -> Any:
    """Returns the products of matrices.

    A sum of terms is fused into what reads it, and computed again for each reader, so it is for tiny products alone. XLA:CPU
    vectorizes a reduction over the rows of a matrix, and not one over its columns.
    """
    depth, shape = a.shape[-1], (*a.shape[:-1], b.shape[-1])
    if depth == 0:
        return lax.full(shape, 0, a.dtype)
    if depth * math.prod(shape) <= _MOST_FUSED:
        return functools.reduce(operator.add, map(operator.mul, unstacked(a, -1), unstacked(b, -2)))
    whole, n = (*a.shape, b.shape[-1]), b.ndim
    left = lax.broadcast_in_dim(a, whole, tuple(range(n)))
    right = lax.broadcast_in_dim(b, whole, (*range(n - 2), n - 1, n))
    return jnp.sum(left * right, -2, dtype=a.dtype)


def _accumulator_dtype(dtype: Any) -> Any:
    """Returns the type in which XLA adds products of this type."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


# Triangular solves ------------------------------------------------------------------------------------------------------


def triangular_solve(eqn: Eqn, a: Any, b: Any) -> Values:
    """A solve by substitution: a row of the solution at a time, which is subtracted from all rows that remain."""
    params, lower = eqn.params, eqn.params["lower"]
    if params["transpose_a"] == params["left_side"]:  # x a = b is a^T x^T = b^T
        a, lower = transposed(a), not lower
    if params["conjugate_a"]:
        a = conj(a)
    b = b if params["left_side"] else transposed(b)
    x = substitute(a, b, lower, params["unit_diagonal"])
    return [x if params["left_side"] else transposed(x)]


def substitute(a: Any, b: Any, lower: bool, unit: bool) -> Any:
    n, axis = a.shape[-1], a.ndim - 2
    columns, rows, rest = unstacked(a, -1), [], b
    for k in range(n) if lower else reversed(range(n)):
        above, pivot, below = lax.split(columns[k], (k, 1, n - k - 1), axis=axis)
        remaining = rest.shape[-2] - 1
        row, rest = lax.split(rest, (1, remaining), axis=axis) if lower else lax.split(rest, (remaining, 1), axis=axis)[::-1]
        row = row if unit else _divided(row, pivot)
        rows.append(row)
        rest = rest - (below if lower else above) * row
    return lax.concatenate(rows if lower else rows[::-1], b.ndim - 2)


def _divided(a: Any, b: Any) -> Any:
    """Returns a / b, but NaN where LAPACK divides a complex number by zero: XLA has infinity there."""
    quotient = a / b
    return where(b == 0, jnp.asarray(complex(math.nan, math.nan), b.dtype), quotient) if jnp.iscomplexobj(b) else quotient


RULES = {"dot_general": dot_general, "triangular_solve": triangular_solve}
