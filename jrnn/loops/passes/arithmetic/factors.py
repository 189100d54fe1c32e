"""Rules for factorizations: Cholesky, LU with partial pivoting, QR by reflections, and eigenvalues of Hermitian matrices."""

from __future__ import annotations

import functools
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


def eigh(eqn: Eqn, a: Any) -> Values:
    """Eigenvalues in ascending order, and eigenvectors with LAPACK's signs; None for those whose signs rounding decides."""
    n, given = a.shape[-1], eqn.params
    if given.get("algorithm") is not None or given["subset_by_index"] is not None or (n == 3 and jnp.iscomplexobj(a)):
        return None
    diagonal = [_element(a, i, i).real for i in range(n)]
    places = [(1, 0), (2, 1), (2, 0)][: n * (n - 1) // 2]
    off = [_element(a, *(at if given["lower"] else at[::-1])) for at in places]
    scale = _scale(functools.reduce(jnp.maximum, map(abs, (*diagonal, *off))))
    diagonal, off = ([v * scale for v in values] for values in (diagonal, off))
    vectors = None
    if n == 1:
        values, vectors = diagonal, jnp.ones_like(a)
    elif n == 2:
        values, vectors = _pair(*diagonal, abs(off[0]) if jnp.iscomplexobj(a) else off[0])
    else:
        values = _three(diagonal, off)
    if n > 1 and (n == 3 or jnp.iscomplexobj(a) or not _has_usual_signs()):
        vectors = None
    return [vectors, lax.concatenate(values, a.ndim - 1)[..., 0, :] / scale[..., 0]]


def _element(a: Any, i: int, j: int) -> Any:
    return cut(a, slice(i, i + 1), slice(j, j + 1))


def _scale(norm: Any) -> Any:
    """Returns by what LAPACK multiplies a matrix, so that nothing overflows and what it neglects is small."""
    kind = jnp.finfo(norm.dtype)
    smallest, largest = float(kind.tiny) ** 0.5 * 4 / float(kind.eps) ** 2, float(kind.eps / kind.tiny) ** 0.5
    up = jnp.minimum(smallest / norm, 1 / float(kind.tiny))
    return jnp.where((norm > 0) & (norm < smallest), up, jnp.where(norm > largest, largest / norm, 1))


def _pair(a: Any, c: Any, b: Any) -> tuple[list[Any], Any]:
    """Returns the eigenvalues and vectors of [[a, b], [b, c]], by the steps of LAPACK's `steqr` and `laev2`."""
    kind = jnp.finfo(a.dtype)
    half = float(kind.eps) / 2
    apart = abs(b) <= lax.sqrt(abs(a)) * lax.sqrt(abs(c)) * half
    apart |= (b * b <= half**2 * abs(a) * abs(c) + float(kind.tiny)) | (b == 0)
    both, less, twice = a + c, a - c, b + b
    wide = abs(less) > abs(twice)
    long, short = jnp.where(wide, abs(less), abs(twice)), jnp.where(abs(less) < abs(twice), abs(less), abs(twice))
    root = long * lax.sqrt(1 + (short / long) ** 2)
    first = 0.5 * jnp.where(both < 0, both - root, jnp.where(both > 0, both + root, root))
    larger = abs(a) > abs(c)
    second = (jnp.where(larger, a, c) / first) * jnp.where(larger, c, a) - (b / first) * b
    second = jnp.where((both < 0) | (both > 0), second, -0.5 * root)
    leg = jnp.where(less >= 0, less + root, less - root)
    wide = abs(leg) > abs(twice)
    ratio = -jnp.where(wide, twice, leg) / jnp.where(wide, leg, twice)
    unit = 1 / lax.sqrt(1 + ratio * ratio)
    cosine, sine = jnp.where(wide, ratio * unit, unit), jnp.where(wide, unit, ratio * unit)
    turned = (both < 0) != (less >= 0)
    cosine, sine = jnp.where(turned, -sine, cosine), jnp.where(turned, cosine, sine)
    first, second = jnp.where(apart, a, first), jnp.where(apart, c, second)
    cosine, sine = jnp.where(apart, 1, cosine), jnp.where(apart, 0, sine)
    swapped, n = second < first, a.ndim
    rows = [(jnp.where(swapped, y, x), jnp.where(swapped, x, y)) for x, y in ((cosine, -sine), (sine, cosine))]
    values = [jnp.where(swapped, second, first), jnp.where(swapped, first, second)]
    return values, lax.concatenate([lax.concatenate(row, n - 1) for row in rows], n - 2)


@functools.cache
def _has_usual_signs() -> bool:
    """Returns True if LAPACK gives eigenvectors the signs of its reference, as SciPy's wheels do and others may not."""
    from scipy.linalg import eigh as by_lapack  # it takes a while to load

    cases = [[[a, b], [b, c]] for a, c in ((3, 1), (1, 3), (-3, -1), (-1, -3), (2, -2), (2, 2)) for b in (0.5, -0.5)]
    signs = ["".join("-+"[int(v > 0)] for v in by_lapack(m, driver="evd")[1].ravel()) for m in cases]
    return " ".join(signs) == "+--- ---+ -+++ ---+ --+- -+-- --+- +-++ +--- ---+ -+++ ---+"


def _three(diagonal: list[Any], off: list[Any]) -> list[Any]:
    """Returns the eigenvalues of matrices of 3 rows by rotations, as Jacobi. NaN spreads to all that it is coupled with."""

    def rotated(_: Any, state: Any) -> Any:
        a, b, c, ab, bc, ca = state
        less, square = b - a, ab * ab
        tangent = jnp.where(less >= 0, ab, -ab) * 2 / (abs(less) + lax.sqrt(less * less + 4 * square))
        tangent = jnp.where(square == 0, 0, tangent)
        cosine = 1 / lax.sqrt(tangent * tangent + 1)
        sine = tangent * cosine
        bc, ca = cosine * bc + sine * ca, cosine * ca - sine * bc
        return b + tangent * ab, c, a - tangent * ab, bc, ca, jnp.zeros_like(ab)

    rotations = 12 if diagonal[0].dtype.itemsize == 8 else 9  # 9 leave at most 1e-9 of the norm, 12 only rounding
    values = [*lax.fori_loop(0, rotations, rotated, (*diagonal, *off))[:3]]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        first, second = values[i], values[j]
        values[i], values[j] = jnp.where(second < first, second, first), jnp.where(second < first, first, second)
    return values


RULES = {
    "cholesky": cholesky,
    "eigh": eigh,
    "lu": lu,
    "lu_pivots_to_permutation": lu_pivots_to_permutation,
    "qr": qr,
}
