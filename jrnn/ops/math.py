"""Elementary functions with their gradients, element by element on any shape."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.ops.values import as_float, magnitude
from jrnn.registry import gradient, op


def _function(
    type: str, fn: Callable, slope: Callable | None = None, *, inplace: bool = False, own: bool = False
) -> None:
    """Registers `type`, y = fn(x), and `typeGradient`, the product of dy and the derivative.

    slope: the gradient operator, whose parameters are named as what it reads: x, y, dy. inplace: whether y may overwrite x.
    own: whether dx needs a blob of its own; else it may overwrite dy.
    """
    reads = list(inspect.signature(slope).parameters) if slope is not None else []
    declared = f"{type}Gradient({', '.join(reads)})" if reads else "forbidden"

    @op(type, inplace={0: 0} if inplace else None, gradient=declared)
    def forward(x):
        return fn(as_float(x))

    if slope is not None:
        op(type + "Gradient", inplace=None if own else {0: reads.index("dy")})(slope)


@jax.custom_jvp
def _cube_root(x):
    return jnp.cbrt(x)


@_cube_root.defjvp
def _(primals, tangents):
    y = _cube_root(primals[0])
    return y, tangents[0] / (3 * y * y)  # jnp's has a quotient of y and x, which is NaN at 0


_ERF = 2 / math.sqrt(math.pi)
_function("Log1p", jnp.log1p)  # Caffe2 itself has no such operator; nets of its later users do
_function("Ceil", jnp.ceil, inplace=True)
_function("Floor", jnp.floor, inplace=True)
_function("Sin", jnp.sin, lambda x, dy: dy * jnp.cos(x))
_function("Cos", jnp.cos, lambda x, dy: -dy * jnp.sin(x))
_function("Tan", jnp.tan, lambda x, dy: dy / jnp.square(jnp.cos(x)))
_function("Sinh", jnp.sinh, lambda dy, x: dy * jnp.cosh(x), own=True)
_function("Cosh", jnp.cosh, lambda dy, x: dy * jnp.sinh(x), own=True)
_function("Asin", jnp.arcsin, lambda x, dy: dy / jnp.sqrt(1 - x * x))
_function("Acos", jnp.arccos, lambda x, dy: -dy / jnp.sqrt(1 - x * x))
_function("Atan", jnp.arctan, lambda x, dy: dy / (1 + x * x))
_function("Erf", jax.scipy.special.erf, lambda x, dy: dy * _ERF * jnp.exp(-x * x))
_function("Rsqrt", lambda x: 1 / jnp.sqrt(x), lambda dy, y: -0.5 * dy * y**3, inplace=True)
_function("Cbrt", _cube_root, lambda dy, y: dy / (3 * y * y), inplace=True)
_function("Reciprocal", lambda x: 1 / x, lambda y, dy: -dy * y * y, inplace=True)


@op("Abs", inplace={0: 0}, gradient="AbsGradient(x, dy)")
def abs_(x):
    return magnitude(x)


@op("AbsGradient", inplace={0: 1})
def abs_gradient(x, dy):
    return dy * jnp.sign(x)


@op("Cube", gradient="CubeGradient(dy, x)")
def cube(x):
    return x**3


@op("CubeGradient", inplace={0: 0})
def cube_gradient(dy, x):
    return dy * 3 * x * x


@op("Negative", inplace={0: 0}, gradient="Negative(dy)")
def negative(x):
    return -x


@op("Sign", gradient="forbidden")
def sign(x):
    return jnp.sign(x)


@op("Exp", inplace={0: 0}, gradient="Mul(y, dy)")
def exp(x):
    return jnp.exp(as_float(x))


@op("Log", inplace={0: 0}, gradient="Div(dy, x)")
def log(x):
    return jnp.log(as_float(x))


@op("Sqr", inplace={0: 0})
def sqr(x):
    return jnp.square(as_float(x))


@gradient("Sqr")
def _(g):
    doubled = g.temporary(g.grad_output(0) + "_doubled")  # not in place: others may read the gradient that arrives
    g.emit("Scale", [g.grad_output(0)], [doubled], scale=2.0)
    g.emit("Mul", [doubled, g.input(0)], [g.grad_input(0)])


@op("Sqrt", inplace={0: 0})
def sqrt(x):
    return jnp.sqrt(as_float(x))


@gradient("Sqrt")
def _(g):
    halved = g.temporary(g.grad_output(0) + "_halved")  # a gradient must be written once to be told apart in a sum
    g.emit("Scale", [g.grad_output(0)], [halved], scale=0.5)
    g.emit("Div", [halved, g.output(0)], [g.grad_input(0)])


def _inside(x: Any, low: float, high: float) -> Any:
    """`x` clipped to [low, high], of derivative 0 where it is clipped."""
    return jnp.where((x >= low) & (x <= high), x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


@op("Logit", inplace={0: 0}, gradient="LogitGradient(x, dy)")
def logit(x, *, eps: float = 1e-6):
    x = _inside(as_float(x), eps, 1 - eps)
    return jnp.log(x / (1 - x))


@op("LogitGradient")
def logit_gradient(x, dy, *, eps: float = 1e-6):
    inside = (x >= eps) & (x <= 1 - eps)
    x = jnp.where(inside, x, 0.5)
    return jnp.where(inside, dy / (x * (1 - x)), 0)
