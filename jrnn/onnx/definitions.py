"""Rules for primitives that ONNX has no operator for: each is defined by other primitives, which are traced and written."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation, flatten
from jrnn.onnx.emit import GraphEmitter, Value, rule


def _is_negative(x: Any) -> Any:
    """True for -0.0, too."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _atan2(y: Any, x: Any) -> Any:
    """Divides by the larger of the two, so that the quotient is at most 1. Zeros have signs; infinities are equal."""
    rise, run = jnp.abs(y), jnp.abs(x)
    is_steep = rise > run
    small, large = jnp.where(is_steep, run, rise), jnp.where(is_steep, rise, run)
    both = (small == large) & (large > 0)
    angle = jnp.arctan(jnp.where(both, 1, small / jnp.where(large == 0, 1, large)))
    angle = jnp.where(is_steep, np.pi / 2 - angle, angle)
    angle = jnp.where(_is_negative(x), np.pi - angle, angle)
    return jnp.where(_is_negative(y), -angle, angle)


# The polynomials of M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), for float32: of w - 2.5
# where w < 5, and of sqrt(w) - 3 elsewhere. w = -log(1 - x^2). The last coefficient is that of the highest power.
_CENTER = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
    3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_TAILS = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
    0.000100950558, -0.000200214257,
)  # fmt: skip


def _polynomial(x: Any, *coefficients: Any) -> Any:
    """The last coefficient is that of the highest power."""
    return reduce(lambda total, coefficient: total * x + coefficient, reversed(coefficients))


def _erf_inv(x: Any) -> Any:
    if x.dtype == np.float64:
        raise ConversionError("the inverse of erf is supported in float32, float16 and bfloat16")
    w = -jnp.log((1 - x) * (1 + x))
    ratio = jnp.where(w < 5, _polynomial(w - 2.5, *_CENTER), _polynomial(w**0.5 - 3, *_TAILS))
    return x * jnp.where(jnp.abs(x) == 1, np.inf, ratio)


_DEFINITIONS: dict[str, Callable] = {
    "atan2": _atan2,
    "cbrt": lambda x: jnp.sign(x) * jnp.abs(x) ** (1 / 3),
    "erf_inv": _erf_inv,
    "erfc": lambda x: 1 - jax.lax.erf(x),
    "polynomial": _polynomial,
}


@rule(*_DEFINITIONS)
def _(e: GraphEmitter, node: FlatEquation, *xs: Value):
    """16-bit types are computed in float32."""
    dtype = np.dtype(node.outputs[0].dtype)
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    shapes = [jax.ShapeDtypeStruct(x.shape, wide) for x in xs]
    with jax.enable_x64(wide == np.float64):
        graph = flatten(jax.make_jaxpr(_DEFINITIONS[node.name])(*shapes))
    (result,) = e.run(graph, [e.cast(x, wide) for x in xs])
    return e.cast(result, dtype)
