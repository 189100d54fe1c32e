"""Interval arithmetic: ranges that contain the values of a jaxpr.

Newton's enclosures (`loops/newton/enclosure.py`) have the same evaluator, `jaxprs.interpreted`, and read the same table.
Their domain is another one: a center and a radius of a few rounding errors, computed where the program runs. A range has two
ends, one of which may be infinite, and is known before: a decay `exp(-exp(a))` is at most 1 for any a.

A row of the table says what is known of a primitive: its image; that it picks elements of its operands; or that its extremes
are at the ends of the ranges of its operands (`monotone`), or there and at 0 (`even`), where numpy computes them.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.jax_internals import ClosedJaxpr, ShapedArray

Range = tuple[float, float]
_ANY = (-math.inf, math.inf)


def largest_size(closed: ClosedJaxpr) -> list[float]:
    """Returns a bound of the absolute value of each result of a jaxpr; infinity if none is known."""

    def apply(eqn: jaxprs.Eqn, operands: list[Range]) -> list[Range]:
        result = _range(eqn, operands)
        return [_of_type(v.aval) if result == _ANY else result for v in eqn.outvars]

    inputs = [_of_type(v.aval) for v in jaxprs.jaxpr_of(closed).invars]
    results = jaxprs.interpreted(closed, inputs, apply, _of_value)
    return [max(abs(lo), abs(hi)) for lo, hi in results]


def _range(eqn: jaxprs.Eqn, operands: list[Range]) -> Range:
    """Returns a range of all results of an equation."""
    row = primitives.row_of(eqn)
    if row.monotone or (
        row.even and eqn.params.get("y", 2) == 2
    ):  # of `integer_pow`, only the square
        return _at_extremes(eqn, operands, row.even)
    if row.picks:
        picked = [a for i, a in enumerate(operands) if i not in row.positions]
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            picked.append((0.0, 0.0))  # towards which a conversion rounds
        return min(lo for lo, _ in picked), max(hi for _, hi in picked)
    return row.image or _ANY


def _at_extremes(eqn: jaxprs.Eqn, operands: list[Range], also_at_zero: bool) -> Range:
    """Returns the range of a primitive from its values where operands are at the ends of their ranges, or at 0."""
    ends = []
    for lo, hi in operands:
        ends.append([lo, hi, 0.0] if also_at_zero and lo < 0 < hi else [lo, hi])
    points = map(np.asarray, zip(*itertools.product(*ends)))
    evaluate = primitives.numpy_rule(eqn)
    assert evaluate is not None
    with np.errstate(all="ignore"):
        values = evaluate(*points, **eqn.params)
    if np.any(np.isnan(values)):  # as of infinity times 0
        return _ANY
    return float(values.min()), float(values.max())


def _of_type(aval: ShapedArray) -> Range:
    return (0.0, 1.0) if jnp.issubdtype(aval.dtype, jnp.bool_) else _ANY


def _of_value(value: Array | np.ndarray | float) -> Range:
    dtype = jax.dtypes.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        return _ANY
    array = np.asarray(value, float)
    if not array.size or np.any(np.isnan(array)):
        return _ANY
    return float(array.min()), float(array.max())
