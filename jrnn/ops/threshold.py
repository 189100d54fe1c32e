"""Activations with a threshold: ReluN and ThresholdedRelu, with their gradients."""

from __future__ import annotations

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import check_float
from jrnn.registry import gradient, op


def _check_limit(n: float) -> None:
    if n <= 0:
        raise OpError(f"n must be positive, is {n}")


@op("ReluN", inplace={0: 0})
def relu_n(x, *, n: float = 6.0):
    """x, but at least 0 and at most n."""
    check_float(x, "x")
    _check_limit(n)
    # where-forms: at 0 and at n the derivative is 0, as ReluNGradient has it; that of clip would be 1/2
    return jnp.where(x > 0, jnp.where(x < n, x, n), 0)


@op("ReluNGradient", inplace={0: 1})
def relu_n_gradient(y, dy, *, n: float = 6.0):
    _check_limit(n)
    return jnp.where((y > 0) & (y < n), dy, 0)


@op("ThresholdedRelu", inplace={0: 0})
def thresholded_relu(x, *, alpha: float = 1.0):
    """x where it is above alpha, else 0."""
    check_float(x, "x")
    return jnp.where(x > alpha, x, 0)


@op("ThresholdedReluGradient", inplace={0: 1})
def thresholded_relu_gradient(y, dy, *, alpha: float = 1.0):
    # compat: Caffe2 multiplies by the sign of y, which is wrong where a negative alpha lets negative x through
    return jnp.where((y > alpha) & (y != 0), dy, 0)


@gradient("ReluN", "ThresholdedRelu")
def _(g):
    g.emit(g.op.type + "Gradient", [g.output(0), g.grad_output(0)], [g.grad_input(0)])
