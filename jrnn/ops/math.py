"""Elementary functions with their gradients, element by element on any shape."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jrnn.ops.makers import differentiate
from jrnn.ops.values import as_float, magnitude
from jrnn.registry import gradient, op


@op("Exp", inplace={0: 0})
def exp(x):
    return jnp.exp(as_float(x))


@gradient("Exp")
def _(g):
    g.emit("Mul", [g.output(0), g.grad_output(0)], [g.grad_input(0)])


@op("Log", inplace={0: 0})
def log(x):
    return jnp.log(as_float(x))


@gradient("Log")
def _(g):
    g.emit("Div", [g.grad_output(0), g.input(0)], [g.grad_input(0)])


@op("Log1p", gradient="forbidden")
def log1p(x):
    """ln(1 + x). Caffe2 itself has no such operator; nets of its later users do."""
    return jnp.log1p(as_float(x))


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


@op("Rsqrt", inplace={0: 0})
def rsqrt(x):
    return 1 / jnp.sqrt(as_float(x))


@op("RsqrtGradient", inplace={0: 0})
def rsqrt_gradient(dy, y):
    return -0.5 * dy * y**3


differentiate("Rsqrt", "dy y")


@op("Abs", inplace={0: 0})
def abs_(x):
    return magnitude(x)


@op("AbsGradient", inplace={0: 1})
def abs_gradient(x, dy):
    return dy * jnp.sign(x)


differentiate("Abs", "x dy")


@op("Negative", inplace={0: 0})
def negative(x):
    return -x


@gradient("Negative")
def _(g):
    g.emit("Negative", [g.grad_output(0)], [g.grad_input(0)])


@op("Sign", gradient="forbidden")
def sign(x):
    return jnp.sign(x)


@op("Ceil", gradient="forbidden", inplace={0: 0})
def ceil(x):
    return jnp.ceil(as_float(x))


@op("Floor", gradient="forbidden", inplace={0: 0})
def floor(x):
    return jnp.floor(as_float(x))


@op("Sin")
def sin(x):
    return jnp.sin(as_float(x))


@op("SinGradient", inplace={0: 1})
def sin_gradient(x, dy):
    return dy * jnp.cos(x)


differentiate("Sin", "x dy")


@op("Cos")
def cos(x):
    return jnp.cos(as_float(x))


@op("CosGradient", inplace={0: 1})
def cos_gradient(x, dy):
    return -dy * jnp.sin(x)


differentiate("Cos", "x dy")


@op("Tan")
def tan(x):
    return jnp.tan(as_float(x))


@op("TanGradient", inplace={0: 1})
def tan_gradient(x, dy):
    return dy / jnp.square(jnp.cos(x))


differentiate("Tan", "x dy")


@op("Sinh")
def sinh(x):
    return jnp.sinh(as_float(x))


@op("SinhGradient")
def sinh_gradient(dy, x):
    return dy * jnp.cosh(x)


differentiate("Sinh", "dy x")


@op("Cosh")
def cosh(x):
    return jnp.cosh(as_float(x))


@op("CoshGradient")
def cosh_gradient(dy, x):
    return dy * jnp.sinh(x)


differentiate("Cosh", "dy x")


@op("Asin")
def asin(x):
    return jnp.arcsin(as_float(x))


@op("AsinGradient", inplace={0: 1})
def asin_gradient(x, dy):
    return dy / jnp.sqrt(1 - x * x)


differentiate("Asin", "x dy")


@op("Acos")
def acos(x):
    return jnp.arccos(as_float(x))


@op("AcosGradient", inplace={0: 1})
def acos_gradient(x, dy):
    return -dy / jnp.sqrt(1 - x * x)


differentiate("Acos", "x dy")


@op("Atan")
def atan(x):
    return jnp.arctan(as_float(x))


@op("AtanGradient", inplace={0: 1})
def atan_gradient(x, dy):
    return dy / (1 + x * x)


differentiate("Atan", "x dy")


@op("Cube")
def cube(x):
    return x**3


@op("CubeGradient", inplace={0: 0})
def cube_gradient(dy, x):
    return dy * 3 * x * x


differentiate("Cube", "dy x")


@jax.custom_jvp
def _cube_root(x):
    return jnp.cbrt(x)


@_cube_root.defjvp
def _(primals, tangents):
    y = _cube_root(primals[0])
    return y, tangents[0] / (3 * y * y)  # jnp's has a quotient of y and x, which is NaN at 0


@op("Cbrt", inplace={0: 0})
def cbrt(x):
    return _cube_root(as_float(x))


@op("CbrtGradient", inplace={0: 0})
def cbrt_gradient(dy, y):
    return dy / (3 * y * y)


differentiate("Cbrt", "dy y")


@op("Reciprocal", inplace={0: 0})
def reciprocal(x):
    return 1 / as_float(x)


@op("ReciprocalGradient", inplace={0: 1})
def reciprocal_gradient(y, dy):
    return -dy * y * y


differentiate("Reciprocal", "y dy")


@op("Erf")
def erf(x):
    return jax.scipy.special.erf(as_float(x))


@op("ErfGradient", inplace={0: 1})
def erf_gradient(x, dy):
    return dy * (2 / math.sqrt(math.pi)) * jnp.exp(-x * x)


differentiate("Erf", "x dy")


def _inside(x, low: float, high: float):
    """`x` clipped to [low, high], of derivative 0 where it is clipped."""
    return jnp.where((x >= low) & (x <= high), x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


@op("Logit", inplace={0: 0})
def logit(x, *, eps: float = 1e-6):
    x = _inside(as_float(x), eps, 1 - eps)
    return jnp.log(x / (1 - x))


@op("LogitGradient")
def logit_gradient(x, dy, *, eps: float = 1e-6):
    inside = (x >= eps) & (x <= 1 - eps)
    x = jnp.where(inside, x, 0.5)
    return jnp.where(inside, dy / (x * (1 - x)), 0)


differentiate("Logit", "x dy")
