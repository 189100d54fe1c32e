"""Rules for products and solves with triangular matrices.

A rule takes an equation and its operands, and returns the results, or None if it does not apply. A result is None if only a
call gives it; the rule applies where nothing reads it.
"""

from __future__ import annotations

import functools
import math
import operator

from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn
from jrnn.loops.passes.arithmetic.operands import (
    Operand,
    Values,
    concatenate,
    on_operands,
    split,
    transposed,
    unstacked,
    where,
)
from jrnn.loops.passes.sums import accumulator_dtype

_MAX_FUSED_MULTIPLICATIONS = 64  # of a product that is a sum of fused terms


# Products ---------------------------------------------------------------------------------------------------------------


def dot_general(eqn: Eqn, a: Operand, b: Operand) -> Values:
    """A product: a sum of products of elements, in the order of the contracted axes."""
    out = eqn.outvars[0].aval
    precision = eqn.params["precision"]
    if a.dtype == bool or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return None
    (over_a, over_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    dtype = accumulator_dtype(jaxprs.promoted_type(out.dtype, a.dtype, b.dtype))
    free_a = [d for d in range(a.ndim) if d not in over_a and d not in batch_a]
    free_b = [d for d in range(b.ndim) if d not in over_b and d not in batch_b]
    batch = [a.shape[d] for d in batch_a]
    depth = math.prod(a.shape[d] for d in over_a)
    rows = math.prod(a.shape[d] for d in free_a)
    columns = math.prod(b.shape[d] for d in free_b)
    a = Operand(lax.transpose(a.array, (*batch_a, *free_a, *over_a))).astype(dtype)
    b = Operand(lax.transpose(b.array, (*batch_b, *over_b, *free_b))).astype(dtype)
    result = product(a.reshape(*batch, rows, depth), b.reshape(*batch, depth, columns))
    return [result.reshape(*out.shape).astype(out.dtype)]


def product(a: Operand, b: Operand) -> Operand:
    """Returns the products of matrices.

    A sum of terms is fused into what reads it, and computed again for each reader, so it is for tiny products alone. XLA:CPU
    vectorizes a reduction over the rows of a matrix, and not one over its columns.
    """
    depth = a.shape[-1]
    shape = (*a.shape[:-1], b.shape[-1])
    if depth == 0:
        return Operand(lax.full(shape, 0, a.dtype))
    if depth * math.prod(shape) <= _MAX_FUSED_MULTIPLICATIONS:
        terms = map(operator.mul, unstacked(a, -1), unstacked(b, -2))
        return functools.reduce(operator.add, terms)
    whole = (*a.shape, b.shape[-1])
    n = b.ndim
    left = lax.broadcast_in_dim(a.array, whole, tuple(range(n)))
    right = lax.broadcast_in_dim(b.array, whole, (*range(n - 2), n - 1, n))
    return Operand(lax.reduce_sum(lax.mul(left, right), (n - 1,)))


# Triangular solves ------------------------------------------------------------------------------------------------------


def triangular_solve(eqn: Eqn, a: Operand, b: Operand) -> Values:
    """A solve by substitution: a row of the solution at a time, which is subtracted from all rows that remain."""
    params = eqn.params
    lower = params["lower"]
    if params["transpose_a"] == params["left_side"]:  # x a = b is a^T x^T = b^T
        a = transposed(a)
        lower = not lower
    if params["conjugate_a"]:
        a = a.conj()
    b = b if params["left_side"] else transposed(b)
    x = substitute(a, b, lower, params["unit_diagonal"])
    return [x if params["left_side"] else transposed(x)]


def substitute(
    a: Operand,
    b: Operand,
    lower: bool,
    unit: bool,
) -> Operand:
    """Solves `a x = b` with a triangular matrix; `unit` if its diagonal counts as ones."""
    n = a.shape[-1]
    columns = unstacked(a, -1)
    rows = []
    rest = b
    for k in range(n) if lower else reversed(range(n)):
        above, pivot, below = split(columns[k], (k, 1, n - k - 1), -2)
        remaining = rest.shape[-2] - 1
        if lower:
            row, rest = split(rest, (1, remaining), -2)
        else:
            rest, row = split(rest, (remaining, 1), -2)
        row = row if unit else _divided(row, pivot)
        rows.append(row)
        rest = rest - (below if lower else above) * row
    return concatenate(rows if lower else rows[::-1], -2)


def _divided(a: Operand, b: Operand) -> Operand:
    """Returns a / b, but NaN where LAPACK divides a complex number by zero: XLA has infinity there."""
    quotient = a / b
    if b.is_complex:
        return where(b == 0, complex(math.nan, math.nan), quotient)
    return quotient


RULES = {"dot_general": on_operands(dot_general), "triangular_solve": on_operands(triangular_solve)}
