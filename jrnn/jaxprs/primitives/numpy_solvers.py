"""Factors of matrices and solutions of systems by numpy's LAPACK, in float64. None: LAPACK has rules of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from jrnn.jaxprs.primitives.numpy_rules import Array


def cholesky(x: Array, **_: Any) -> Array | None:
    """A matrix that is not positive definite has factors of NaN; if it is complex, both parts are."""
    if x.dtype.itemsize < 8 or not np.isfinite(x).all():
        return None
    lower = np.full_like(x, complex(np.nan, np.nan) if x.dtype.kind == "c" else np.nan)
    for at in np.ndindex(x.shape[:-2]):
        with contextlib.suppress(np.linalg.LinAlgError):
            lower[at] = np.linalg.cholesky(x[at])
    return lower


def triangular_solve(
    a: Array,
    b: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Array | None:
    divisors = 1 if unit_diagonal else a.diagonal(axis1=-2, axis2=-1)
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.all(divisors)):
        return None
    if unit_diagonal:
        a = a - a * np.eye(a.shape[-1], dtype=a.dtype) + np.eye(a.shape[-1], dtype=a.dtype)
    a = np.tril(a) if lower else np.triu(a)
    if conjugate_a:
        a = a.conj()
    if transpose_a == left_side:  # a solution from the right is one of the transposed system
        a = a.swapaxes(-1, -2)
    if left_side:
        return np.linalg.solve(a, b)
    return np.linalg.solve(a, b.swapaxes(-1, -2)).swapaxes(-1, -2)
