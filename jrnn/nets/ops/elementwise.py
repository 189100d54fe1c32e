"""Activations, with their gradients. Each works element by element on any shape (PRelu has a dimension of channels).

Files of operators look like this one: a forward function, which declares its gradient maker, and the gradient operator.
"TanhGradient(y, dy)" means: append a TanhGradient to the backward net. It reads the output y and the gradient dy that
arrives at y, and writes the gradient of the first input. `registry.op` documents the notation. A maker that needs more is a
function under `@gradient`, such as Sqr's in `ops/math.py`, where an operator of one expression is one line. The decorator
`takes` of `ops/values.py` declares Arguments that several operators share, as in `ops/broadcast_arithmetic.py`.
`op_with_vjp` of `ops/vjp.py` derives the gradient operator from the forward function. `inplace={0: 1}`: output 0 may
overwrite input 1.

The derivative at a kink is a convention. The forward functions are written so that JAX's derivative follows it: 0 at the
ends of Clip, HardSigmoid and ReluN, 1 at the zero of LeakyRelu and Elu, the left derivative for PRelu and Selu.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ops.math import register
from jrnn.nets.ops.values import as_float, describe, raise_if
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import op


@op("Tanh", inplace={0: 0}, gradient="TanhGradient(y, dy)")
def tanh(x):
    return jnp.tanh(x)


@op("TanhGradient", inplace={0: 1})
def tanh_gradient(y, dy):
    return dy * (1 - y * y)


@op("Sigmoid", inplace={0: 0}, gradient="SigmoidGradient(y, dy)")
def sigmoid(x):
    return jax.nn.sigmoid(x)


@op("SigmoidGradient", inplace={0: 1})
def sigmoid_gradient(y, dy):
    return dy * y * (1 - y)


@op("Relu", inplace={0: 0}, gradient="ReluGradient(y, dy)")
def relu(x):
    # Its derivative at 0 is 0, like ReluGradient's; the derivative of jnp.maximum is 1/2.
    return jax.nn.relu(x)


@op("ReluGradient", inplace={0: 1})
def relu_gradient(y, dy):
    return jnp.where(y > 0, dy, 0)


_LARGEST = 3.4028234663852886e38  # of float32; as a limit it means none


def _strictly_inside(x: Any, low: float, high: float) -> Any:
    """`x` clipped to [low, high], with derivative 0 at the ends and outside."""
    clipped = jnp.minimum(jnp.maximum(x, low), high)
    return jnp.where((x > low) & (x < high), x, jax.lax.stop_gradient(clipped))


@op("Clip", inplace={0: 0}, gradient="ClipGradient(y, dy)")
def clip(x, *, min: float = -_LARGEST, max: float = _LARGEST):
    return _strictly_inside(as_float(x), min, max)


@op("ClipGradient", inplace={0: 1})
def clip_gradient(y, dy, *, min: float = -_LARGEST, max: float = _LARGEST):
    return jnp.where((y > min) & (y < max), dy, 0)


@op("HardSigmoid", inplace={0: 0}, gradient="HardSigmoidGradient(y, dy)")
def hard_sigmoid(x, *, alpha: float = 0.2, beta: float = 0.5):
    return _strictly_inside(as_float(x) * alpha + beta, 0.0, 1.0)


op("HardSigmoidGradient", inplace={0: 1})(
    lambda y, dy, *, alpha=0.2: jnp.where((y > 0) & (y < 1), dy * alpha, 0)
)


@op("LeakyRelu", inplace={0: 0}, gradient="LeakyReluGradient(y, dy)")
def leaky_relu(x, *, alpha: float = 0.01):
    return jnp.where(as_float(x) >= 0, x, alpha * x)


op("LeakyReluGradient", inplace={0: 1})(
    lambda y, dy, *, alpha=0.01: jnp.where(y >= 0, dy, alpha * dy)
)


def _slopes(w: Any, x: Any, order: str) -> Any:
    """The slopes of PRelu, one or one per channel, in a shape that broadcasts with x."""
    channel = 1 if order == "NCHW" else x.ndim - 1
    if w.size != 1 and (x.ndim <= channel or w.size != x.shape[channel]):
        raise OpError(
            f"w is {describe(w)}, x is {describe(x)}; w must have 1 element or 1 per channel of axis {channel}"
        )
    return jnp.reshape(
        w,
        tuple(w.size if k == channel else 1 for k in range(x.ndim))
        if w.size != 1
        else (1,) * x.ndim,
    )


@op_with_vjp("PRelu", inplace={0: 0}, gradient="PReluGradient(y, dy, x, w) -> x, w")
def prelu(x, w, *, order: str = "NCHW"):
    return jnp.where(as_float(x) > 0, x, x * _slopes(w, x, order))


@op("Elu", inplace={0: 0}, gradient="EluGradient(y, dy)")
def elu(x, *, alpha: float = 1.0):
    return jnp.where(as_float(x) >= 0, x, alpha * jnp.expm1(jnp.minimum(x, 0)))


op("EluGradient", inplace={0: 1})(
    lambda y, dy, *, alpha=1.0: jnp.where(y >= 0, dy, dy * (y + alpha))
)


_SELU_ALPHA = 1.6732632423543772
_SELU_SCALE = 1.0507009873554805


@op("Selu", inplace={0: 0}, gradient="SeluGradient(y, dy)")
def selu(x, *, alpha: float = _SELU_ALPHA, scale: float = _SELU_SCALE):
    return scale * jnp.where(as_float(x) > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))


@op("SeluGradient", inplace={0: 1})
def selu_gradient(y, dy, *, alpha: float = _SELU_ALPHA, scale: float = _SELU_SCALE):
    return jnp.where(y > 0, dy * scale, dy * (y + alpha * scale))


def _mish_slope(x, y, dy):
    t = jnp.tanh(jax.nn.softplus(x))
    return dy * (t + x * (1 - t * t) * jax.nn.sigmoid(x))


register("Softplus", jax.nn.softplus, lambda y, dy: dy * -jnp.expm1(-y), inplace=True)
register(
    "Softsign",
    lambda x: x / (1 + jnp.abs(x)),
    lambda x, dy: dy / jnp.square(1 + jnp.abs(x)),
    inplace=True,
)
register(
    "Swish",
    lambda x: x * jax.nn.sigmoid(x),
    lambda x, y, dy: dy * (y + jax.nn.sigmoid(x) * (1 - y)),
)
register("Mish", lambda x: x * jnp.tanh(jax.nn.softplus(x)), _mish_slope)


@op_with_vjp("Gelu", gradient="GeluGradient(dy, x)")
def gelu(x, *, fast_gelu: bool = False):
    return jax.nn.gelu(as_float(x), approximate=fast_gelu)


@op("Glu")
def glu(x, *, dim: int = -1):
    """Half of `x` times the sigmoid of the other half: [..., 2D, ...] -> [..., D, ...]."""
    return jax.nn.glu(as_float(x), dim)


def _positive(n: float) -> float:
    raise_if(n <= 0, f"n must be positive, is {n}")
    return n


@op("ReluN", inplace={0: 0}, gradient="ReluNGradient(y, dy)")
def relu_n(x, *, n: float = 6.0):
    """x, but at least 0 and at most n."""
    # where: at 0 and at n the derivative is 0, as in ReluNGradient; the derivative of clip would be 1/2
    return jnp.where(as_float(x) > 0, jnp.where(x < _positive(n), x, n), 0)


op("ReluNGradient", inplace={0: 1})(
    lambda y, dy, *, n=6.0: jnp.where((y > 0) & (y < _positive(n)), dy, 0)
)


@op("ThresholdedRelu", inplace={0: 0}, gradient="ThresholdedReluGradient(y, dy)")
def thresholded_relu(x, *, alpha: float = 1.0):
    """x where it is above alpha, else 0."""
    return jnp.where(as_float(x) > alpha, x, 0)


@op("ThresholdedReluGradient", inplace={0: 1})
def thresholded_relu_gradient(y, dy, *, alpha: float = 1.0):
    # compat: Caffe2 multiplies by the sign of y, which is wrong where a negative alpha lets negative x through
    return jnp.where((y > alpha) & (y != 0), dy, 0)
