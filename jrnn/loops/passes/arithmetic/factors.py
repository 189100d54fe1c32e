"""Rules for factorizations: Cholesky, LU with partial pivoting, QR by reflections, and symmetric eigenvalues."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs import Eqn
from jrnn.loops.passes.arithmetic.products import Values, conj, cut, places, transposed


def cholesky(eqn: Eqn, a: Any) -> Values:
    """The Cholesky factor, column by column; NaN in all elements if a pivot is not positive.

    The loop over columns compiles sooner than its steps one after another, and nothing is computed again.
    """
    across = transposed(a)
    columns = places(cut(a, slice(0, 1), slice(None)), -1)

    def column(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        factor, failed = state  # the columns so far are rows here
        given = _row(across, j)
        left = given - jnp.sum(factor * conj(_column(factor, j)), -2, keepdims=True)
        pivot = _column(left, j).real
        new = jnp.where(columns >= j, left / lax.sqrt(pivot).astype(a.dtype), 0)
        return lax.dynamic_update_slice_in_dim(factor, new, j, a.ndim - 2), failed | (pivot <= 0)  # LAPACK allows NaN

    none = jnp.zeros((*a.shape[:-2], 1, 1), bool)
    factor, failed = lax.fori_loop(0, a.shape[-1], column, (jnp.zeros_like(a), none))
    nothing = complex(math.nan, math.nan) if jnp.iscomplexobj(a) else math.nan
    return [jnp.where(failed, jnp.asarray(nothing, a.dtype), transposed(factor))]


def lu(eqn: Eqn, a: Any) -> Values:
    """The LU factorization with the pivots that LAPACK chooses: the first of the largest elements of a column."""
    m, size = a.shape[-2], min(a.shape[-2:])
    rows, columns = places(a, -2)[..., :1], places(a, -1)

    def eliminate(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        a, order, pivots = state
        column = _column(a, k)
        length = abs(column.real) + abs(column.imag) if jnp.iscomplexobj(a) else abs(column)
        length = jnp.where(rows >= k, length, -1)
        largest = jnp.max(length, -2, keepdims=True)
        at = jnp.min(jnp.where(length == largest, rows, m), -2, keepdims=True)
        at = jnp.where(at == m, k, at)  # NaN
        a, order = (_swapped(v, k, at) for v in (a, order))
        row, column = _row(a, k), _column(a, k)
        pivot = _column(row, k)
        column = jnp.where(pivot == 0, column, column / pivot)
        reduced = jnp.where(columns > k, a - column * row, jnp.where(columns == k, column, a))
        return jnp.where(rows > k, reduced, a), order, lax.dynamic_update_slice_in_dim(pivots, at, k, a.ndim - 2)

    first = (a, rows, jnp.zeros_like(rows[..., :size, :]))
    a, order, pivots = lax.fori_loop(0, size, eliminate, first)
    return [a, pivots[..., 0], order[..., 0]]


def _row(a: Any, k: Any) -> Any:
    return lax.dynamic_slice_in_dim(a, k, 1, a.ndim - 2)


def _column(a: Any, k: Any) -> Any:
    return lax.dynamic_slice_in_dim(a, k, 1, a.ndim - 1)


def _swapped(a: Any, k: Any, at: Any) -> Any:
    """Returns matrices with their rows `k` and `at` exchanged."""
    rows = places(a, -2)
    chosen = jnp.sum(jnp.where(rows == at, a, 0), -2, dtype=a.dtype, keepdims=True)
    return jnp.where(rows == k, chosen, jnp.where(rows == at, _row(a, k), a))


def lu_pivots_to_permutation(eqn: Eqn, pivots: Any) -> Values:
    size = eqn.params["permutation_size"]
    order = lax.broadcasted_iota(jnp.int32, (*pivots.shape[:-1], size, 1), pivots.ndim - 1)
    for k in range(pivots.shape[-1]):
        order = _swapped(order, k, pivots[..., k, None, None])
    return [order[..., 0]]


def qr(eqn: Eqn, a: Any) -> Values:
    """The QR factorization by reflections, with LAPACK's signs."""
    if eqn.params["pivoting"] or 0 in a.shape:
        return None
    m, n = a.shape[-2:]
    rows, every = places(a, -2)[..., :1], slice(None)
    reflections = []
    for k in range(min(m, n)):
        x = cut(a, every, slice(k, k + 1))
        first = cut(x, slice(k, k + 1), every)
        below = jnp.sum(jnp.where(rows > k, (x * conj(x)).real, 0), -2, keepdims=True)
        trivial = below == 0
        if jnp.iscomplexobj(a):
            trivial &= first.imag == 0
        norm = lax.sqrt((first * conj(first)).real + below)
        beta = jnp.where(trivial, first.real, jnp.where(first.real >= 0, -norm, norm)).astype(a.dtype)
        tau = jnp.where(trivial, 0, (beta - first) / jnp.where(beta == 0, 1, beta))
        below_first = x / jnp.where(trivial, 1, first - beta)
        v = jnp.where(rows > k, jnp.where(trivial, 0, below_first), (rows == k).astype(a.dtype))
        reflections.append((v, tau))
        a = _reflected(a, v, conj(tau), k)
    size = m if eqn.params["full_matrices"] else min(m, n)
    q = jnp.broadcast_to(jnp.eye(m, size, dtype=a.dtype), (*a.shape[:-2], m, size))
    for k, (v, tau) in reversed([*enumerate(reflections)]):
        q = _reflected(q, v, tau, k)
    return [q, jnp.where(places(a, -2) <= places(a, -1), a, 0)[..., :size, :]]


def _reflected(a: Any, v: Any, tau: Any, k: int) -> Any:
    """Returns matrices with their rows and columns from `k` on reflected. The other columns are zero in these rows."""
    reflected = a - tau * v * jnp.sum(conj(v) * a, -2, keepdims=True)
    return jnp.where((places(a, -2) >= k) & (places(a, -1) >= k), reflected, a)


RULES = {
    "cholesky": cholesky,
    "lu": lu,
    "lu_pivots_to_permutation": lu_pivots_to_permutation,
    "qr": qr,
}
