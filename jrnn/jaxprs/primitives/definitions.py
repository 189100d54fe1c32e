"""Primitives of JAX in terms of more common ones: `Row.definition`, for rooms without a rule of their own for them.

Definitions keep the accuracy of JAX's own. `erf_inv` does so for float32 only, as the constants of its series are.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# The polynomials of M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), for float32: of w - 2.5
# where w < 5, and of sqrt(w) - 3 elsewhere. w = -log(1 - x^2). The last coefficient belongs to the highest power.
_CENTER = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
    3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_TAILS = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
    0.000100950558, -0.000200214257,
)  # fmt: skip


def one_minus_square(x: Array) -> Array:
    """1 - x^2 as a product, which is precise where x is near 1: the gradient of tanh is this of its result."""
    return (1 + x) * (1 - x)


def polynomial(x: Array, *coefficients: Any) -> Array:
    """The polynomial of x by Horner's rule; the last coefficient belongs to the highest power."""
    total: Array = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def log2(x: Array) -> Array:
    return lax.log(x) / math.log(2.0)


def erf_inv(x: Array) -> Array:
    """The inverse of erf, of float32."""
    w = -jnp.log((1 - x) * (1 + x))
    tails = polynomial(jnp.sqrt(w) - 3, *_TAILS)
    ratio = jnp.where(w < 5, polynomial(w - 2.5, *_CENTER), tails)
    return x * jnp.where(jnp.abs(x) == 1, np.inf, ratio)


def exp2(x: Array) -> Array:
    return lax.exp(x * math.log(2.0))


def tan(x: Array) -> Array:
    return lax.sin(x) / lax.cos(x)
