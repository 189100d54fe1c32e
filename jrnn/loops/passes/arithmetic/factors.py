"""Rules for factorizations: Cholesky, LU with partial pivoting, and QR by reflections."""

from __future__ import annotations

import math

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
    on_operands,
    repeated,
    row,
    transposed,
    unstacked,
    where,
    with_part,
)

Pair = tuple[Operand, Operand]
Triple = tuple[Operand, Operand, Operand]

_MAX_SELECTED_ROWS = 3  # LU exchanges these rows by selects; with more, a loop is faster


def cholesky(eqn: Eqn, a: Operand) -> Values:
    """The Cholesky factor, column by column; NaN in all elements if a pivot is not positive.

    The loop over columns compiles sooner than its steps one after another, and nothing is computed again.
    """
    across = transposed(a)
    columns = indices((*a.shape[:-2], 1, a.shape[-1]), -1)

    def add_column(j: Operand, state: Pair) -> Pair:
        factor, failed = state  # the columns so far are rows here
        known = factor * column(factor, j).conj()
        rest = row(across, j) - known.reduced(-2)
        pivot = column(rest, j).real
        # On the diagonal LAPACK has no imaginary part, and infinity, not NaN.
        root = pivot.sqrt().astype(a.dtype)
        is_below = columns > j
        below = rest / root
        on_diagonal = where(columns == j, root, 0)
        factor = with_part(factor, where(is_below, below, on_diagonal), j)
        return factor, failed | (pivot <= 0)  # LAPACK allows NaN

    none = Operand(lax.full((*a.shape[:-2], 1, 1), False))
    factor, failed = repeated(a.shape[-1], add_column, (a.full(0), none))
    nothing = complex(math.nan, math.nan) if a.is_complex else math.nan
    return [where(failed, nothing, transposed(factor))]


def lu(eqn: Eqn, a: Operand) -> Values:
    """The LU factorization with the pivots that LAPACK chooses: the first of the largest elements of a column."""
    factorize = _few_rows if a.shape[-2] <= _MAX_SELECTED_ROWS else _eliminated
    a, pivots = factorize(a)
    order = _order(pivots, a.shape[-2])
    return [a, pivots.reshape(*pivots.shape[:-1]), order]


def _few_rows(a: Operand) -> Pair:
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
            other = rows[i]
            rows[k] = where(at == i, other, rows[k])
            rows[i] = where(at == i, first, other)
        pivot = block(rows[k], every, here)
        for i in below:
            own = block(rows[i], every, here)
            factor = _divided(own, pivot)
            with_factor = where(columns == k, factor, rows[i])
            is_after = columns > k
            reduced = rows[i] - factor * rows[k]
            rows[i] = where(is_after, reduced, with_factor)
        pivots.append(at)
    return concatenate(rows, -2), concatenate(pivots, -2)


def _eliminated(a: Operand) -> Pair:
    """Returns the same by a loop."""
    m = a.shape[-2]
    size = min(a.shape[-2:])
    rows = indices((*a.shape[:-1], 1), -2)
    columns = indices(a.shape, -1)

    def eliminate(k: Operand, state: Pair) -> Pair:
        a, pivots = state
        # The first of the largest elements that remain in the column.
        length = where(rows >= k, _length(column(a, k)), -1)
        largest = length.reduced(-2, lax.reduce_max)
        places = where(length == largest, rows, m)
        at = places.reduced(-2, lax.reduce_min)
        at = where(at == m, k, at)  # NaN

        # Its row is exchanged with row k.
        is_pivot = rows == at
        chosen = where(is_pivot, a, 0).reduced(-2)
        a = where(is_pivot, row(a, k), a)

        # The rows below are reduced.
        factors = _divided(column(a, k), column(chosen, k))
        is_after = columns > k
        eliminated = a - factors * chosen
        with_factors = where(columns == k, factors, a)
        reduced = where(is_after, eliminated, with_factors)
        is_below = rows > k
        above = where(rows == k, chosen, a)
        a = where(is_below, reduced, above)
        return a, with_part(pivots, at, k)

    none = Operand(lax.full((*a.shape[:-2], size, 1), 0, np.int32))
    return repeated(size, eliminate, (a, none))


def _divided(factors: Operand, pivot: Operand) -> Operand:
    """Returns a column of the lower factor. LAPACK divides by no pivot that is zero, subnormal or NaN."""
    return where(_length(pivot) >= float(jnp.finfo(pivot.dtype).tiny), factors / pivot, factors)


def _length(v: Operand) -> Operand:
    """The size by which LAPACK compares pivots."""
    return abs(v.real) + abs(v.imag) if v.is_complex else abs(v)


def lu_pivots_to_permutation(eqn: Eqn, pivots: Operand) -> Values:
    """The order of rows after the exchanges of an LU factorization."""
    return [_order(pivots.reshape(*pivots.shape, 1), eqn.params["permutation_size"])]


def _order(pivots: Operand, size: int) -> Operand:
    """Returns the rows of a matrix in the order that pivots give them."""
    order = rows = indices((*pivots.shape[:-2], size, 1), -2)
    for k, at in enumerate(unstacked(pivots, -2)):
        mine = block(order, slice(k, k + 1), slice(None))
        is_pivot = rows == at
        chosen = where(is_pivot, order, 0).reduced(-2)
        is_row = rows == k
        exchanged = where(is_pivot, mine, order)
        order = where(is_row, chosen, exchanged)
    return order.reshape(*order.shape[:-1])


def qr(eqn: Eqn, a: Operand) -> Values:
    """The QR factorization by reflections, with LAPACK's signs."""
    if eqn.params["pivoting"] or 0 in a.shape:
        return None
    m = a.shape[-2]
    size = min(a.shape[-2:])
    rows = indices((*a.shape[:-1], 1), -2)
    columns = indices(a.shape, -1)

    def reduce(k: Operand, state: Triple) -> Triple:
        a, vectors, factors = state
        # NaN above these rows does not belong to this reflection.
        top = row(a, k)
        rest = where(rows > k, a, 0)
        x = column(rest, k)
        first = column(top, k)
        products = (x.conj() * rest).reduced(-2)
        below = column(products, k).real
        trivial = below == 0
        if a.is_complex:
            trivial &= first.imag == 0

        # The vector v and the factor tau of the reflection 1 - tau v v^H, which makes the column beta in row k alone.
        norm = ((first * first.conj()).real + below).sqrt()
        with_sign = where(first.real >= 0, -norm, norm)
        beta = where(trivial, first.real, with_sign).astype(a.dtype)
        numerator = beta - first
        divisor = where(beta == 0, 1, beta)
        tau = where(trivial, 0, numerator / divisor)
        scale = where(trivial, 0, 1 / (first - beta))
        v = where(rows == k, 1, x * scale)

        # The rows and columns that remain are reflected.
        of_v = tau.conj()
        along_v = top + scale.conj() * products
        reflected = a - v * (of_v * along_v)
        remains = (rows >= k) & (columns >= k) & ~trivial
        a = where(remains, reflected, a)
        return a, with_part(vectors, v, k, -1), with_part(factors, tau, k)

    def reflect(i: Operand, q: Operand) -> Operand:
        k = size - 1 - i
        v = column(vectors, k)
        factor = row(factors, k)
        along_v = (v.conj() * q).reduced(-2)
        reflected = q - v * (factor * along_v)
        # The other columns are zero in these rows.
        remains = (rows >= k) & (indices(q.shape, -1) >= k)
        return where(remains, reflected, q)

    across = m if eqn.params["full_matrices"] else size
    no_factors = Operand(lax.full((*a.shape[:-2], size, 1), 0, a.dtype))
    q = Operand(lax.full((*a.shape[:-2], m, across), 0, a.dtype))
    no_vectors = block(a, slice(None), slice(size)).full(0)
    a, vectors, factors = repeated(size, reduce, (a, no_vectors, no_factors))
    is_diagonal = indices(q.shape, -2) == indices(q.shape, -1)
    q = repeated(size, reflect, where(is_diagonal, 1, q))
    upper = where(rows <= columns, a, 0)
    return [q, block(upper, slice(across), slice(None))]


RULES = {
    "cholesky": on_operands(cholesky),
    "lu": on_operands(lu),
    "lu_pivots_to_permutation": on_operands(lu_pivots_to_permutation),
    "qr": on_operands(qr),
}
