"""The ranges that values of a jaxpr provably lie in, by interval arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.executor import jaxprs, primitives

Range = tuple[float, float]
_ANY = (-math.inf, math.inf)
_FIXED = {"logistic": (0.0, 1.0), "tanh": (-1.0, 1.0), "sin": (-1.0, 1.0), "cos": (-1.0, 1.0), "erf": (-1.0, 1.0)}
_SAME = primitives.VIEWS | {"copy", "copy_p", "name", "reduce_max", "reduce_min", "reduce_precision", "rev"}


def largest_size(closed: Any) -> list[float]:
    """For each result of a jaxpr, a bound of its absolute value; infinite where none is known."""
    jaxpr = closed.jaxpr
    known: dict[Any, Range] = dict(zip(jaxpr.constvars, map(_of_value, closed.consts)))
    for eqn in jaxpr.eqns:
        given = [_read(known, a) for a in eqn.invars]
        found = _after(eqn, given)
        known.update((v, found) for v in eqn.outvars)
    return [max(map(abs, _read(known, a))) for a in jaxpr.outvars]


def _read(known: dict[Any, Range], atom: Any) -> Range:
    if jaxprs.is_literal(atom):
        return _of_value(atom.val)
    boolean = jnp.issubdtype(atom.aval.dtype, jnp.bool_)
    return (0.0, 1.0) if boolean else known.get(atom, _ANY)


def _of_value(value: Any) -> Range:
    if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float)):
        return _ANY
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.number) or not array.size or not np.all(np.isfinite(array)):
        return _ANY
    return float(array.min()), float(array.max())


def _after(eqn: Any, given: Sequence[Range]) -> Range:
    name = eqn.primitive.name
    if name in _FIXED:
        return _FIXED[name]
    if name == "exp":
        return 0.0, math.exp(given[0][1]) if given[0][1] < 700 else math.inf
    if name in _SAME or name in ("select_n", "concatenate", "convert_element_type", "pad", "stack"):
        cases = given[1:] if name == "select_n" else given
        return min(lo for lo, _ in cases), max(hi for _, hi in cases)
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return pick(lo for lo, _ in given), pick(hi for _, hi in given)
    if name == "clamp":
        (low, _), (lo, hi), (_, high) = given
        return min(max(lo, low), high), max(min(hi, high), low)
    if name == "neg":
        return -given[0][1], -given[0][0]
    if name == "abs":
        return 0.0, max(map(abs, given[0]))
    if name == "sub":
        return _sum(given[0], (-given[1][1], -given[1][0]))
    if name in primitives.ADDITIONS:
        return _sum(*given)
    if name == "mul":
        return _product(*given)
    if name in ("square", "integer_pow") and eqn.params.get("y", 2) == 2:
        return 0.0, max(map(abs, given[0])) ** 2
    if name == "one_minus_square":
        size = max(map(abs, given[0]))
        return 1 - size**2, 1.0
    return _ANY


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _product(a: Range, b: Range) -> Range:
    if not all(map(math.isfinite, (*a, *b))):
        return _ANY
    corners = [x * y for x, y in itertools.product(a, b)]
    return min(corners), max(corners)
