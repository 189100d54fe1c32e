"""Rules for factorizations: Cholesky, LU with partial pivoting, QR by reflections, and symmetric eigenvalues."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs import Eqn
from jrnn.loops.arithmetic.products import Values, conj, cut, places


def cholesky(eqn: Eqn, a: Any) -> Values:
    """The Cholesky factor, column by column; NaN in all elements if a pivot is not positive."""
    n = a.shape[-1]
    columns: list[Any] = []
    failed: Any = False
    for j in range(n):
        column = cut(a, slice(j, n), slice(j, j + 1))
        for k, before in enumerate(columns):
            left = cut(before, slice(j - k, None), slice(0, 1))
            column = column - left * conj(cut(left, slice(0, 1), slice(0, 1)))
        pivot = cut(column, slice(0, 1), slice(0, 1)).real
        failed = failed | (pivot <= 0)  # LAPACK goes on with NaN
        root = lax.sqrt(pivot)
        columns.append(
            lax.concatenate(
                [root.astype(a.dtype), cut(column, slice(1, None), slice(0, 1)) / root.astype(a.dtype)], a.ndim - 2
            )
        )
    none = [(0, 0, 0)]
    factor = lax.concatenate(
        [
            lax.pad(column, jnp.zeros((), a.dtype), [*none * (a.ndim - 2), (j, 0, 0), *none])
            for j, column in enumerate(columns)
        ],
        a.ndim - 1,
    )
    nothing = complex(math.nan, math.nan) if jnp.iscomplexobj(a) else math.nan
    return [jnp.where(failed, jnp.asarray(nothing, a.dtype), factor)]


def lu(eqn: Eqn, a: Any) -> Values:
    """The LU factorization with the pivots that LAPACK chooses: the first of the largest elements of a column."""
    m, n = a.shape[-2:]
    every = slice(None)
    rows, columns = places(a, -2), places(a, -1)
    order = lax.broadcasted_iota(jnp.int32, (*a.shape[:-1], 1), a.ndim - 2)
    pivots = []
    for k in range(min(m, n)):
        here = slice(k, k + 1)
        size = cut(a, slice(k, m), here)
        size = abs(size.real) + abs(size.imag) if jnp.iscomplexobj(size) else abs(size)
        at = lax.argmax(size, a.ndim - 2, jnp.int32)[..., None, :] + k
        pivots.append(at)
        a, order = (_swapped(v, k, at) for v in (a, order))
        pivot = cut(a, here, here)
        column = cut(a, every, here)
        column = jnp.where(pivot == 0, column, column / pivot)
        reduced = a - column * cut(a, here, every)
        a = jnp.where(rows > k, jnp.where(columns > k, reduced, jnp.where(columns == k, column, a)), a)
    return [a, lax.concatenate(pivots, a.ndim - 2)[..., 0], order[..., 0]]


def _swapped(a: Any, k: int, at: Any) -> Any:
    """Returns matrices with their rows `k` and `at` exchanged."""
    rows = places(a, -2)
    chosen = jnp.sum(jnp.where(rows == at, a, 0), -2, dtype=a.dtype, keepdims=True)
    first = cut(a, slice(k, k + 1), slice(None))
    return jnp.where(rows == k, chosen, jnp.where(rows == at, first, a))


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
