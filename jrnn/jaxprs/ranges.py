"""Interval arithmetic: ranges that contain the values of a jaxpr."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import primitives

Range = tuple[float, float]
_ANY = (-math.inf, math.inf)


def largest_size(closed: Any) -> list[float]:
    """Returns a bound of the absolute value of each result of a jaxpr; infinity if none is known."""

    def apply(eqn: jaxprs.Eqn, operands: list[Range]) -> list[Range]:
        result = _range(eqn, operands)
        return [_of_type(v.aval) if result == _ANY else result for v in eqn.outvars]

    inputs = [_of_type(v.aval) for v in closed.jaxpr.invars]
    return [_size(a) for a in jaxprs.interpreted(closed, inputs, apply, _of_value)]


def _range(eqn: jaxprs.Eqn, operands: list[Range]) -> Range:
    """Returns a range of all results of an equation."""
    row = primitives.row_of(eqn)
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None and eqn.params.get("y", 2) == 2:  # of `integer_pow`, only the square
        return rule(*operands)
    if row.picks:
        rounded = (
            [] if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact) else [(0.0, 0.0)]
        )  # towards zero
        return _hull(*(a for i, a in enumerate(operands) if i not in row.positions), *rounded)
    return row.image or _ANY


def _of_type(aval: Any) -> Range:
    return (0.0, 1.0) if jnp.issubdtype(aval.dtype, jnp.bool_) else _ANY


def _of_value(value: Any) -> Range:
    if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float)):
        return _ANY
    array = np.asarray(value)
    if (
        not np.issubdtype(array.dtype, np.number)
        or not array.size
        or not np.all(np.isfinite(array))
    ):
        return _ANY
    return float(array.min()), float(array.max())


def _size(a: Range) -> float:
    return max(map(abs, a))


def _hull(*cases: Range) -> Range:
    return min(lo for lo, _ in cases), max(hi for _, hi in cases)


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _product(a: Range, b: Range) -> Range:
    if not all(map(math.isfinite, (*a, *b))):
        return _ANY
    corners = [x * y for x, y in itertools.product(a, b)]
    return min(corners), max(corners)


def _square(a: Range) -> Range:
    return 0.0, _size(a) ** 2


_RULES: dict[str, Callable[..., Range]] = {
    "exp": lambda a: (0.0, math.exp(a[1]) if a[1] < 700 else math.inf),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp": lambda low, a, high: (
        min(max(a[0], low[0]), high[1]),
        max(min(a[1], high[1]), low[0]),
    ),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0.0, _size(a)),
    **dict.fromkeys(("add", "add_any"), _sum),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "square": _square,
    "integer_pow": _square,
    "one_minus_square": lambda a: (1 - _size(a) ** 2, 1.0),
}
