"""Rules for factorizations: Cholesky, LU with partial pivoting, QR by reflections, and eigenvalues of Hermitian matrices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs import Eqn
from jrnn.loops.passes.arithmetic.products import Values, block, conj, indices, repeated, transposed, unstacked, where

_SELECTED = 3  # rows that LU exchanges by selects; with more, a loop is faster


def cholesky(eqn: Eqn, a: Any) -> Values:
    """The Cholesky factor, column by column; NaN in all elements if a pivot is not positive.

    The loop over columns compiles sooner than its steps one after another, and nothing is computed again.
    """
    across = transposed(a)
    columns = indices(block(a, slice(0, 1), slice(None)), -1)

    def column(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        factor, failed = state  # the columns so far are rows here
        row = _row(across, j)
        rest = row - jnp.sum(factor * conj(_column(factor, j)), -2, keepdims=True)
        pivot = _column(rest, j).real
        root = lax.sqrt(pivot).astype(a.dtype)  # on the diagonal LAPACK has no imaginary part, and infinity, not NaN
        new = where(columns > j, rest / root, where(columns == j, root, 0))
        return _placed(factor, new, j), failed | (pivot <= 0)  # LAPACK allows NaN

    none = jnp.zeros((*a.shape[:-2], 1, 1), bool)
    factor, failed = repeated(a.shape[-1], column, (jnp.zeros_like(a), none))
    nothing = complex(math.nan, math.nan) if jnp.iscomplexobj(a) else math.nan
    return [where(failed, jnp.asarray(nothing, a.dtype), transposed(factor))]


def lu(eqn: Eqn, a: Any) -> Values:
    """The LU factorization with the pivots that LAPACK chooses: the first of the largest elements of a column."""
    a, pivots = (_few_rows if a.shape[-2] <= _SELECTED else _eliminated)(a)
    return [a, pivots[..., 0], _order(pivots, a.shape[-2])]


def _few_rows(a: Any) -> tuple[Any, Any]:
    """Returns the factors and the pivots, by selects among rows."""
    every, m = slice(None), a.shape[-2]
    rows, columns, pivots = unstacked(a, -2), indices(block(a, slice(1), every), -1), []
    for k in range(min(a.shape[-2:])):
        here, below = slice(k, k + 1), range(k + 1, m)
        largest, at = _length(block(rows[k], every, here)), jnp.full((*a.shape[:-2], 1, 1), k, jnp.int32)
        for i in below:
            length = _length(block(rows[i], every, here))
            at, largest = where(length > largest, i, at), where(length > largest, length, largest)
        first = rows[k]
        for i in below:
            rows[k], rows[i] = where(at == i, rows[i], rows[k]), where(at == i, first, rows[i])
        pivot = block(rows[k], every, here)
        for i in below:
            factor = block(rows[i], every, here)
            factor = _divided(factor, pivot)
            reduced = where(columns == k, factor, rows[i])
            rows[i] = where(columns > k, rows[i] - factor * rows[k], reduced)
        pivots.append(at)
    return lax.concatenate(rows, a.ndim - 2), lax.concatenate(pivots, a.ndim - 2)


def _eliminated(a: Any) -> tuple[Any, Any]:
    """Returns the same by a loop."""
    m, size = a.shape[-2], min(a.shape[-2:])
    rows, columns = indices(a, -2)[..., :1], indices(a, -1)

    def eliminate(k: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        a, pivots = state
        length = where(rows >= k, _length(_column(a, k)), -1)
        largest = jnp.max(length, -2, keepdims=True)
        at = jnp.min(where(length == largest, rows, m), -2, keepdims=True)
        at = where(at == m, k, at)  # NaN
        row = jnp.sum(where(rows == at, a, 0), -2, dtype=a.dtype, keepdims=True)
        a = where(rows == at, _row(a, k), a)
        pivot, column = _column(row, k), _column(a, k)
        column = _divided(column, pivot)
        reduced = where(columns > k, a - column * row, where(columns == k, column, a))
        return where(rows > k, reduced, where(rows == k, row, a)), _placed(pivots, at, k)

    return repeated(size, eliminate, (a, jnp.zeros_like(rows[..., :size, :])))


def _divided(column: Any, pivot: Any) -> Any:
    """Returns a column of the lower factor. LAPACK divides by no pivot that is zero, subnormal or NaN."""
    return where(_length(pivot) >= float(jnp.finfo(pivot.dtype).tiny), column / pivot, column)


def _length(v: Any) -> Any:
    return abs(v.real) + abs(v.imag) if jnp.iscomplexobj(v) else abs(v)


def _row(a: Any, k: Any) -> Any:
    return lax.dynamic_slice_in_dim(a, k, 1, a.ndim - 2)


def _column(a: Any, k: Any) -> Any:
    return lax.dynamic_slice_in_dim(a, k, 1, a.ndim - 1)


def _placed(a: Any, row: Any, k: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(a, row, k, a.ndim - 2)


def lu_pivots_to_permutation(eqn: Eqn, pivots: Any) -> Values:
    return [_order(pivots[..., None], eqn.params["permutation_size"])]


def _order(pivots: Any, size: int) -> Any:
    """Returns the rows of a matrix in the order that pivots give them."""
    order = rows = lax.broadcasted_iota(jnp.int32, (*pivots.shape[:-2], size, 1), pivots.ndim - 2)
    for k in range(pivots.shape[-2]):
        at, mine = _row(pivots, k), _row(order, k)
        chosen = jnp.sum(where(rows == at, order, 0), -2, dtype=order.dtype, keepdims=True)
        order = where(rows == k, chosen, where(rows == at, mine, order))
    return order[..., 0]


def qr(eqn: Eqn, a: Any) -> Values:
    """The QR factorization by reflections, with LAPACK's signs."""
    if eqn.params["pivoting"] or 0 in a.shape:
        return None
    m, size = a.shape[-2], min(a.shape[-2:])
    rows, columns = indices(a, -2)[..., :1], indices(a, -1)

    def reduce(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        a, vectors, factors = state
        row, rest = _row(a, k), where(rows > k, a, 0)  # NaN above these rows is none of this reflection's
        x = _column(rest, k)
        first, products = _column(row, k), jnp.sum(conj(x) * rest, -2, keepdims=True)
        below = _column(products, k).real
        trivial = below == 0
        if jnp.iscomplexobj(a):
            trivial &= first.imag == 0
        norm = lax.sqrt((first * conj(first)).real + below)
        beta = where(trivial, first.real, where(first.real >= 0, -norm, norm)).astype(a.dtype)
        tau = where(trivial, 0, (beta - first) / where(beta == 0, 1, beta))
        scale = where(trivial, 0, 1 / (first - beta))
        v = where(rows == k, 1, x * scale)
        reflected = a - v * (conj(tau) * (row + conj(scale) * products))
        a = where((rows >= k) & (columns >= k) & ~trivial, reflected, a)
        return a, lax.dynamic_update_slice_in_dim(vectors, v, k, a.ndim - 1), _placed(factors, tau, k)

    def reflect(i: Any, q: Any) -> Any:
        k = size - 1 - i
        v = _column(vectors, k)
        reflected = q - v * (_row(factors, k) * jnp.sum(conj(v) * q, -2, keepdims=True))
        return where((rows >= k) & (indices(q, -1) >= k), reflected, q)  # the other columns are zero in these rows

    none = jnp.zeros_like(a[..., :size]), jnp.zeros_like(a[..., :size, :1])
    a, vectors, factors = repeated(size, reduce, (a, *none))
    across = m if eqn.params["full_matrices"] else size
    q = jnp.broadcast_to(jnp.eye(m, across, dtype=a.dtype), (*a.shape[:-2], m, across))
    q = repeated(size, reflect, q)
    return [q, where(indices(a, -2) <= indices(a, -1), a, 0)[..., :across, :]]


def eigh(eqn: Eqn, a: Any) -> Values:
    """Eigenvalues in ascending order, and eigenvectors with LAPACK's signs; None for those whose signs rounding decides."""
    n, params = a.shape[-1], eqn.params
    if params.get("algorithm") is not None or params["subset_by_index"] is not None or (n == 3 and jnp.iscomplexobj(a)):
        return None
    diagonal = [_element(a, i, i).real for i in range(n)]
    subdiagonal = [(1, 0), (2, 1), (2, 0)][: n * (n - 1) // 2]
    off = [_element(a, *(at if params["lower"] else at[::-1])) for at in subdiagonal]
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
    return block(a, slice(i, i + 1), slice(j, j + 1))


def _scale(norm: Any) -> Any:
    """Returns by what LAPACK multiplies a matrix, so that nothing overflows and what it neglects is small."""
    kind = jnp.finfo(norm.dtype)
    smallest, largest = float(kind.tiny) ** 0.5 * 4 / float(kind.eps) ** 2, float(kind.eps / kind.tiny) ** 0.5
    up = jnp.minimum(smallest / norm, 1 / float(kind.tiny))
    return where((norm > 0) & (norm < smallest), up, where(norm > largest, largest / norm, 1))


def _pair(a: Any, c: Any, b: Any) -> tuple[list[Any], Any]:
    """Returns the eigenvalues and vectors of [[a, b], [b, c]], by the steps of LAPACK's `steqr` and `laev2`."""
    kind = jnp.finfo(a.dtype)
    half = float(kind.eps) / 2
    is_diagonal = abs(b) <= lax.sqrt(abs(a)) * lax.sqrt(abs(c)) * half
    is_diagonal |= (b * b <= half**2 * abs(a) * abs(c) + float(kind.tiny)) | (b == 0)
    both, less, twice = a + c, a - c, b + b
    wide = abs(less) > abs(twice)
    long, short = where(wide, abs(less), abs(twice)), where(abs(less) < abs(twice), abs(less), abs(twice))
    root = long * lax.sqrt(1 + (short / long) ** 2)
    first = 0.5 * where(both < 0, both - root, where(both > 0, both + root, root))
    larger = abs(a) > abs(c)
    second = (where(larger, a, c) / first) * where(larger, c, a) - (b / first) * b
    second = where((both < 0) | (both > 0), second, -0.5 * root)
    leg = where(less >= 0, less + root, less - root)
    wide = abs(leg) > abs(twice)
    ratio = -where(wide, twice, leg) / where(wide, leg, twice)
    unit = 1 / lax.sqrt(1 + ratio * ratio)
    cosine, sine = where(wide, ratio * unit, unit), where(wide, unit, ratio * unit)
    is_rotated = (both < 0) != (less >= 0)
    cosine, sine = where(is_rotated, -sine, cosine), where(is_rotated, cosine, sine)
    first, second = where(is_diagonal, a, first), where(is_diagonal, c, second)
    cosine, sine = where(is_diagonal, 1, cosine), where(is_diagonal, 0, sine)
    swapped, n = second < first, a.ndim
    rows = [(where(swapped, y, x), where(swapped, x, y)) for x, y in ((cosine, -sine), (sine, cosine))]
    values = [where(swapped, second, first), where(swapped, first, second)]
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
        tangent = where(less >= 0, ab, -ab) * 2 / (abs(less) + lax.sqrt(less * less + 4 * square))
        tangent = where(square == 0, 0, tangent)
        cosine = 1 / lax.sqrt(tangent * tangent + 1)
        sine = tangent * cosine
        bc, ca = cosine * bc + sine * ca, cosine * ca - sine * bc
        return b + tangent * ab, c, a - tangent * ab, bc, ca, jnp.zeros_like(ab)

    rotations = 12 if diagonal[0].dtype.itemsize == 8 else 9  # 9 leave at most 1e-9 of the norm, 12 only rounding
    values = [*repeated(rotations, rotated, (*diagonal, *off))[:3]]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        first, second = values[i], values[j]
        values[i], values[j] = where(second < first, second, first), where(second < first, first, second)
    return values


RULES = {"cholesky": cholesky, "eigh": eigh, "lu": lu, "lu_pivots_to_permutation": lu_pivots_to_permutation, "qr": qr}
