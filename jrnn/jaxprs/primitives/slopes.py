"""Bounds of the slopes of functions of one variable between two numbers, for enclosures (`loops/newton/enclosure.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# From the parameters of an equation and two numbers, the largest absolute slope between them.
SlopeBound = Callable[[Mapping[str, Any], Array, Array], Array | float]
Slope = Callable[[Array], Array]  # of a function, at a point


def nearest(lo: Array, hi: Array) -> Array:
    """The least absolute value between two bounds."""
    return jnp.where((lo <= 0) & (hi >= 0), 0, jnp.minimum(jnp.abs(lo), jnp.abs(hi)))


def farthest(lo: Array, hi: Array) -> Array:
    """The largest absolute value between two bounds."""
    return jnp.maximum(jnp.abs(lo), jnp.abs(hi))


def constant(slope: float) -> SlopeBound:
    """The slope of a function that is nowhere steeper."""

    def bound(params: Mapping[str, Any], lo: Array, hi: Array) -> float:
        return slope

    return bound


def _at(point: Callable[[Array, Array], Array]) -> Callable[[Slope], SlopeBound]:
    """The slope of a function that is steepest at a point between two bounds."""

    def decorate(slope: Slope) -> SlopeBound:
        def bound(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
            return slope(point(lo, hi))

        return bound

    return decorate


def upper(lo: Array, hi: Array) -> Array:
    return hi


at_nearest = _at(nearest)
at_farthest = _at(farthest)
at_upper = _at(upper)


def above(limit: float) -> Callable[[Slope], SlopeBound]:
    """The slope of a function of numbers above a limit, which is steepest at the lower bound."""

    def decorate(slope: Slope) -> SlopeBound:
        def bound(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
            is_defined = lo > limit
            return jnp.where(is_defined, slope(jnp.where(is_defined, lo, limit + 1)), jnp.inf)

        return bound

    return decorate


def inside(slope: Slope) -> SlopeBound:
    """The slope of a function of numbers between -1 and 1, which is steepest at the bound nearest to one of these."""

    def bound(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
        at = farthest(lo, hi)
        return jnp.where(at < 1, slope(jnp.where(at < 1, at, 0)), jnp.inf)

    return bound


def of_wave(slope: Slope) -> SlopeBound:
    """The slope of a sine or a cosine, which changes by at most the way from the middle."""

    def bound(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
        return jnp.minimum(1, jnp.abs(slope((lo + hi) / 2)) + (hi - lo) / 2)

    return bound


# Functions -----------------------------------------------------------------------------------------------------------


@at_nearest
def tanh(x: Array) -> Array:
    return 1 - jnp.tanh(x) ** 2


@at_nearest
def logistic(x: Array) -> Array:
    return jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)


@at_nearest
def erf(x: Array) -> Array:
    return 2 / math.sqrt(math.pi) * jnp.exp(-(x**2))


@at_nearest
def atan(x: Array) -> Array:
    return 1 / (1 + x**2)


@at_nearest
def asinh(x: Array) -> Array:
    return 1 / jnp.sqrt(1 + x**2)


@at_farthest
def square(x: Array) -> Array:
    return 2 * x


@above(0)
def log(x: Array) -> Array:
    return 1 / x


@above(-1)
def log1p(x: Array) -> Array:
    return 1 / (1 + x)


@above(0)
def sqrt(x: Array) -> Array:
    return 0.5 / jnp.sqrt(x)


@above(0)
def rsqrt(x: Array) -> Array:
    return 0.5 / (x * jnp.sqrt(x))


@above(1)
def acosh(x: Array) -> Array:
    return 1 / jnp.sqrt((x - 1) * (x + 1))


@inside
def asin(x: Array) -> Array:
    return 1 / jnp.sqrt((1 - x) * (1 + x))


@inside
def atanh(x: Array) -> Array:
    return 1 / ((1 - x) * (1 + x))


@inside
def erf_inv(x: Array) -> Array:
    return math.sqrt(math.pi) / 2 * jnp.exp(lax.erf_inv(x) ** 2)


def cbrt(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
    at = nearest(lo, hi)
    return jnp.where(at > 0, 1 / (3 * jnp.cbrt(jnp.where(at > 0, at, 1)) ** 2), jnp.inf)


def integer_pow(params: Mapping[str, Any], lo: Array, hi: Array) -> Array:
    y = params["y"]
    at = farthest(lo, hi) if y >= 1 else nearest(lo, hi)
    size = jnp.where(at > 0, at, 0 if y >= 1 else jnp.nan)
    return jnp.multiply(abs(y), size ** (y - 1))
