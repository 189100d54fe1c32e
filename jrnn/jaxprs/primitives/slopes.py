"""Bounds of the slopes of functions of one variable between two numbers, for enclosures (`loops/newton/enclosure.py`).

A row says where a function is steepest. JAX computes the slope there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.jaxprs.jax_internals import JaxprEqn
from jrnn.jaxprs.programs import bind

# From an equation and two numbers, the largest absolute slope between them.
SlopeBound = Callable[[JaxprEqn, Array, Array], Array | float]


def slope_at(eqn: JaxprEqn, x: Array) -> Array:
    """Returns the absolute slope of the function of an equation."""

    def function(x: Array) -> Array:
        (result,) = bind(eqn, x)
        return result  # type: ignore[no-any-return]

    _, slope = jax.jvp(function, (x,), (jnp.ones_like(x),))
    return jnp.abs(slope)


def nearest(lo: Array, hi: Array) -> Array:
    """The least absolute value between two bounds."""
    return jnp.where((lo <= 0) & (hi >= 0), 0, jnp.minimum(jnp.abs(lo), jnp.abs(hi)))


def farthest(lo: Array, hi: Array) -> Array:
    """The largest absolute value between two bounds."""
    return jnp.maximum(jnp.abs(lo), jnp.abs(hi))


def near_zero(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    return slope_at(eqn, nearest(lo, hi))


def far_from_zero(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    return slope_at(eqn, farthest(lo, hi))


def at_upper_end(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    return slope_at(eqn, hi)


def above(limit: float) -> SlopeBound:
    """The bound of a function of numbers above a limit, which is steepest at the lower end."""

    def bound(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
        is_defined = lo > limit
        return jnp.where(is_defined, slope_at(eqn, jnp.where(is_defined, lo, limit + 1)), jnp.inf)

    return bound


def inside(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    """The bound of a function of numbers between -1 and 1, which is steepest near these."""
    at = farthest(lo, hi)
    return jnp.where(at < 1, slope_at(eqn, jnp.where(at < 1, at, 0)), jnp.inf)


def arc(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    """The bound of an inverse sine or cosine. The slope of JAX's own rule has a difference that is not precise near 1."""
    at = farthest(lo, hi)
    return jnp.where(at < 1, 1 / jnp.sqrt((1 - at) * (1 + at)), jnp.inf)


def wave(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    """The bound of a sine or a cosine, whose slope changes by at most the way from the middle."""
    return jnp.minimum(1, slope_at(eqn, (lo + hi) / 2) + (hi - lo) / 2)


def power(eqn: JaxprEqn, lo: Array, hi: Array) -> Array:
    return slope_at(eqn, farthest(lo, hi) if eqn.params["y"] >= 1 else nearest(lo, hi))


def constant(slope: float) -> SlopeBound:
    """The bound of a function that is nowhere steeper."""

    def bound(eqn: JaxprEqn, lo: Array, hi: Array) -> float:
        return slope

    return bound
