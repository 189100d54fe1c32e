"""Rules for factorizations: Cholesky, LU with partial pivoting, QR by reflections, and eigenvalues of Hermitian matrices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.jaxprs import Eqn
from jrnn.loops.passes.arithmetic.operands import (
    Operand,
    Values,
    block,
    column,
    concatenate,
    indices,
    maximum,
    minimum,
    on_operands,
    repeated,
    row,
    transposed,
    unstacked,
    where,
    with_part,
)

_SELECTED = 3  # rows that LU exchanges by selects; with more, a loop is faster


def cholesky(eqn: Eqn, a: Operand) -> Values:
    """The Cholesky factor, column by column; NaN in all elements if a pivot is not positive.

    The loop over columns compiles sooner than its steps one after another, and nothing is computed again.
    """
    across = transposed(a)
    columns = indices((*a.shape[:-2], 1, a.shape[-1]), -1)

    def add_column(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        factor, failed = state  # the columns so far are rows here
        rest = row(across, j) - (factor * column(factor, j).conj()).reduced(-2)
        pivot = column(rest, j).real
        root = pivot.sqrt().astype(
            a.dtype
        )  # on the diagonal LAPACK has no imaginary part, and infinity, not NaN
        new = where(columns > j, rest / root, where(columns == j, root, 0))
        return with_part(factor, new, j), failed | (pivot <= 0)  # LAPACK allows NaN

    none = Operand(lax.full((*a.shape[:-2], 1, 1), False))
    factor, failed = repeated(a.shape[-1], add_column, (a.full(0), none))
    nothing = complex(math.nan, math.nan) if a.is_complex else math.nan
    return [where(failed, nothing, transposed(factor))]


def lu(eqn: Eqn, a: Operand) -> Values:
    """The LU factorization with the pivots that LAPACK chooses: the first of the largest elements of a column."""
    a, pivots = (_few_rows if a.shape[-2] <= _SELECTED else _eliminated)(a)
    return [a, pivots.reshape(*pivots.shape[:-1]), _order(pivots, a.shape[-2])]


def _few_rows(a: Operand) -> tuple[Operand, Operand]:
    """Returns the factors and the pivots, by selects among rows."""
    every = slice(None)
    m = a.shape[-2]
    rows = unstacked(a, -2)
    columns = indices((*a.shape[:-2], 1, a.shape[-1]), -1)
    pivots = []
    for k in range(min(a.shape[-2:])):
        here = slice(k, k + 1)
        below = range(k + 1, m)
        largest = _length(block(rows[k], every, here))
        at = Operand(lax.full((*a.shape[:-2], 1, 1), k, np.int32))
        for i in below:
            length = _length(block(rows[i], every, here))
            at = where(length > largest, i, at)
            largest = where(length > largest, length, largest)
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
    return concatenate(rows, -2), concatenate(pivots, -2)


def _eliminated(a: Operand) -> tuple[Operand, Operand]:
    """Returns the same by a loop."""
    m = a.shape[-2]
    size = min(a.shape[-2:])
    rows = indices((*a.shape[:-1], 1), -2)
    columns = indices(a.shape, -1)

    def eliminate(k: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        a, pivots = state
        length = where(rows >= k, _length(column(a, k)), -1)
        largest = length.reduced(-2, lax.reduce_max)
        at = where(length == largest, rows, m).reduced(-2, lax.reduce_min)
        at = where(at == m, k, at)  # NaN
        is_pivot = rows == at
        chosen = where(is_pivot, a, 0).reduced(-2)
        a = where(is_pivot, row(a, k), a)
        factors = _divided(column(a, k), column(chosen, k))
        reduced = where(columns > k, a - factors * chosen, where(columns == k, factors, a))
        return where(rows > k, reduced, where(rows == k, chosen, a)), with_part(pivots, at, k)

    none = Operand(lax.full((*a.shape[:-2], size, 1), 0, np.int32))
    return repeated(size, eliminate, (a, none))


def _divided(factors: Operand, pivot: Operand) -> Operand:
    """Returns a column of the lower factor. LAPACK divides by no pivot that is zero, subnormal or NaN."""
    return where(_length(pivot) >= float(jnp.finfo(pivot.dtype).tiny), factors / pivot, factors)


def _length(v: Operand) -> Operand:
    return abs(v.real) + abs(v.imag) if v.is_complex else abs(v)


def lu_pivots_to_permutation(eqn: Eqn, pivots: Operand) -> Values:
    return [_order(pivots.reshape(*pivots.shape, 1), eqn.params["permutation_size"])]


def _order(pivots: Operand, size: int) -> Operand:
    """Returns the rows of a matrix in the order that pivots give them."""
    order = rows = indices((*pivots.shape[:-2], size, 1), -2)
    for k, at in enumerate(unstacked(pivots, -2)):
        mine = block(order, slice(k, k + 1), slice(None))
        is_pivot = rows == at
        order = where(
            rows == k, where(is_pivot, order, 0).reduced(-2), where(is_pivot, mine, order)
        )
    return order.reshape(*order.shape[:-1])


def qr(eqn: Eqn, a: Operand) -> Values:
    """The QR factorization by reflections, with LAPACK's signs."""
    if eqn.params["pivoting"] or 0 in a.shape:
        return None
    m = a.shape[-2]
    size = min(a.shape[-2:])
    rows = indices((*a.shape[:-1], 1), -2)
    columns = indices(a.shape, -1)

    def reduce(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        a, vectors, factors = state
        # NaN above these rows is none of this reflection's
        top = row(a, k)
        rest = where(rows > k, a, 0)
        x = column(rest, k)
        first = column(top, k)
        products = (x.conj() * rest).reduced(-2)
        below = column(products, k).real
        trivial = below == 0
        if a.is_complex:
            trivial &= first.imag == 0
        norm = ((first * first.conj()).real + below).sqrt()
        beta = where(trivial, first.real, where(first.real >= 0, -norm, norm)).astype(a.dtype)
        tau = where(trivial, 0, (beta - first) / where(beta == 0, 1, beta))
        scale = where(trivial, 0, 1 / (first - beta))
        v = where(rows == k, 1, x * scale)
        reflected = a - v * (tau.conj() * (top + scale.conj() * products))
        a = where((rows >= k) & (columns >= k) & ~trivial, reflected, a)
        return a, with_part(vectors, v, k, -1), with_part(factors, tau, k)

    def reflect(i: Any, q: Any) -> Any:
        k = size - 1 - i
        v = column(vectors, k)
        reflected = q - v * (row(factors, k) * (v.conj() * q).reduced(-2))
        return where(
            (rows >= k) & (indices(q.shape, -1) >= k), reflected, q
        )  # the other columns are zero in these rows

    across = m if eqn.params["full_matrices"] else size
    none, q = (
        Operand(lax.full((*a.shape[:-2], *shape), 0, a.dtype)) for shape in ((size, 1), (m, across))
    )
    a, vectors, factors = repeated(
        size, reduce, (a, block(a, slice(None), slice(size)).full(0), none)
    )
    q = repeated(size, reflect, where(indices(q.shape, -2) == indices(q.shape, -1), 1, q))
    return [q, block(where(rows <= columns, a, 0), slice(across), slice(None))]


def eigh(eqn: Eqn, a: Operand) -> Values:
    """Eigenvalues in ascending order, and eigenvectors with LAPACK's signs; None for those whose signs rounding decides."""
    n = a.shape[-1]
    params = eqn.params
    if (
        params.get("algorithm") is not None
        or params["subset_by_index"] is not None
        or (n == 3 and a.is_complex)
    ):
        return None
    diagonal = [_element(a, i, i).real for i in range(n)]
    subdiagonal = [(1, 0), (2, 1), (2, 0)][: n * (n - 1) // 2]
    off = [_element(a, *(at if params["lower"] else at[::-1])) for at in subdiagonal]
    scale = _scale(functools.reduce(maximum, map(abs, (*diagonal, *off))))
    diagonal, off = ([v * scale.astype(v.dtype) for v in values] for values in (diagonal, off))
    vectors = None
    if n == 1:
        values = diagonal
        vectors = a.full(1)
    elif n == 2:
        values, vectors = _pair(*diagonal, abs(off[0]) if a.is_complex else off[0])
    else:
        values = _three(diagonal, off)
    if n > 1 and (n == 3 or a.is_complex or not _has_usual_signs()):
        vectors = None
    return [
        vectors,
        concatenate(values, -1).reshape(*a.shape[:-1]) / scale.reshape(*a.shape[:-2], 1),
    ]


def _element(a: Operand, i: int, j: int) -> Operand:
    return block(a, slice(i, i + 1), slice(j, j + 1))


def _scale(norm: Operand) -> Operand:
    """Returns by what LAPACK multiplies a matrix, so that nothing overflows and what it neglects is small."""
    kind = jnp.finfo(norm.dtype)
    smallest = float(kind.tiny) ** 0.5 * 4 / float(kind.eps) ** 2
    largest = float(kind.eps / kind.tiny) ** 0.5
    up = minimum(smallest / norm, 1 / float(kind.tiny))
    return where((norm > 0) & (norm < smallest), up, where(norm > largest, largest / norm, 1))


def _pair(a: Operand, c: Operand, b: Operand) -> tuple[list[Operand], Operand]:
    """Returns the eigenvalues and vectors of [[a, b], [b, c]], by the steps of LAPACK's `steqr` and `laev2`."""
    kind = jnp.finfo(a.dtype)
    half = float(kind.eps) / 2
    is_diagonal = abs(b) <= abs(a).sqrt() * abs(c).sqrt() * half
    is_diagonal |= (b * b <= half**2 * abs(a) * abs(c) + float(kind.tiny)) | (b == 0)
    both = a + c
    less = a - c
    twice = b + b
    wide = abs(less) > abs(twice)
    long = where(wide, abs(less), abs(twice))
    short = where(abs(less) < abs(twice), abs(less), abs(twice))
    slope = short / long
    root = long * (1 + slope * slope).sqrt()
    first = 0.5 * where(both < 0, both - root, where(both > 0, both + root, root))
    larger = abs(a) > abs(c)
    second = (where(larger, a, c) / first) * where(larger, c, a) - (b / first) * b
    second = where((both < 0) | (both > 0), second, -0.5 * root)
    leg = where(less >= 0, less + root, less - root)
    wide = abs(leg) > abs(twice)
    ratio = -where(wide, twice, leg) / where(wide, leg, twice)
    unit = 1 / (1 + ratio * ratio).sqrt()
    cosine = where(wide, ratio * unit, unit)
    sine = where(wide, unit, ratio * unit)
    is_rotated = (both < 0) != (less >= 0)
    cosine, sine = where(is_rotated, -sine, cosine), where(is_rotated, cosine, sine)
    first = where(is_diagonal, a, first)
    second = where(is_diagonal, c, second)
    cosine = where(is_diagonal, 1, cosine)
    sine = where(is_diagonal, 0, sine)
    swapped = second < first
    rows = [
        (where(swapped, y, x), where(swapped, x, y)) for x, y in ((cosine, -sine), (sine, cosine))
    ]
    values = [where(swapped, second, first), where(swapped, first, second)]
    return values, concatenate([concatenate(pair, -1) for pair in rows], -2)


@functools.cache
def _has_usual_signs() -> bool:
    """Returns True if LAPACK gives eigenvectors the signs of its reference, as SciPy's wheels do and others may not."""
    from scipy.linalg import eigh as by_lapack  # it takes a while to load

    cases = [
        [[a, b], [b, c]]
        for a, c in ((3, 1), (1, 3), (-3, -1), (-1, -3), (2, -2), (2, 2))
        for b in (0.5, -0.5)
    ]
    signs = [
        "".join("-+"[int(v > 0)] for v in by_lapack(m, driver="evd")[1].ravel()) for m in cases
    ]
    return " ".join(signs) == "+--- ---+ -+++ ---+ --+- -+-- --+- +-++ +--- ---+ -+++ ---+"


def _three(diagonal: list[Operand], off: list[Operand]) -> list[Operand]:
    """Returns the eigenvalues of matrices of 3 rows by rotations, as Jacobi. NaN spreads to all that it is coupled with."""

    def rotated(_: Any, state: Any) -> Any:
        a, b, c, ab, bc, ca = state
        less = b - a
        square = ab * ab
        tangent = where(less >= 0, ab, -ab) * 2 / (abs(less) + (less * less + 4 * square).sqrt())
        tangent = where(square == 0, 0, tangent)
        cosine = 1 / (tangent * tangent + 1).sqrt()
        sine = tangent * cosine
        bc, ca = cosine * bc + sine * ca, cosine * ca - sine * bc
        return b + tangent * ab, c, a - tangent * ab, bc, ca, ab.full(0)

    rotations = (
        12 if diagonal[0].dtype.itemsize == 8 else 9
    )  # 9 leave at most 1e-9 of the norm, 12 only rounding
    values = [*repeated(rotations, rotated, (*diagonal, *off))[:3]]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        first = values[i]
        second = values[j]
        values[i], values[j] = (
            where(second < first, second, first),
            where(second < first, first, second),
        )
    return values


RULES = {
    name: on_operands(rule)
    for name, rule in {
        "cholesky": cholesky,
        "eigh": eigh,
        "lu": lu,
        "lu_pivots_to_permutation": lu_pivots_to_permutation,
        "qr": qr,
    }.items()
}
