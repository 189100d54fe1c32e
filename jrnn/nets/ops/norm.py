"""Normalization: Softmax, LayerNorm and Dropout, with their gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ops.values import canonical_axis, check_float, describe, flat_at, need_key, raise_if
from jrnn.nets.registry import gradient, op


@op("Softmax", gradient="SoftmaxGradient(y, dy)")
def softmax(x, *, axis: int = 1):
    """exp(x) / sum(exp(x)), summed over all dimensions from `axis` on."""
    check_float(x, "x")
    x2 = flat_at(x, canonical_axis(axis, x.ndim))
    return jax.nn.softmax(x2, axis=1).reshape(x.shape)


@op("SoftmaxGradient", inplace={0: 1})
def softmax_gradient(y, dy, *, axis: int = 1):
    axis = canonical_axis(axis, y.ndim)
    y2 = flat_at(y, axis)
    dy2 = flat_at(dy, axis)
    return (y2 * (dy2 - (y2 * dy2).sum(1, keepdims=True))).reshape(y.shape)


def columns_from(x: Any, axis: int, **weights: Any) -> Any:
    """x as a matrix whose columns begin at `axis`; OpError unless weights have one number per column."""
    check_float(x, "x")
    x2 = flat_at(x, canonical_axis(axis, x.ndim))
    for name, w in weights.items():
        if w.size != x2.shape[1]:
            raise OpError(
                f"{name} is {describe(w)} and x is {describe(x)}; {name} must have {x2.shape[1]} elements"
            )
    return x2


@op("LayerNorm", outputs=3)
def layer_norm(
    x, gamma=None, beta=None, *, axis: int = 1, epsilon: float = 1e-5, elementwise_affine: bool = False
):  # fmt: skip
    """y = (x - mean) / std over all dimensions from `axis` on, and mean and std = sqrt(var + epsilon).

    With `elementwise_affine`, y * gamma + beta; without, gamma and beta are not used.
    """
    if elementwise_affine and (gamma is None or beta is None):
        raise OpError("elementwise_affine=1 needs inputs 1 and 2, gamma and beta")
    axis = canonical_axis(axis, x.ndim)
    weights = {"gamma": gamma, "beta": beta} if elementwise_affine else {}
    x2 = columns_from(x, axis, **weights)
    mean = x2.mean(1, keepdims=True)
    std = jnp.sqrt(jnp.square(x2 - mean).mean(1, keepdims=True) + epsilon)
    y = (x2 - mean) / std
    if elementwise_affine:
        y = y * gamma.reshape(1, -1) + beta.reshape(1, -1)
    leading = (*x.shape[:axis], 1)
    return y.reshape(x.shape), mean.reshape(leading), std.reshape(leading)


@op("LayerNormGradient", outputs=(1, 3))
def layer_norm_gradient(
    dy, y, mean, std, x, gamma=None, *, axis: int = 1, elementwise_affine: bool = False
):
    axis = canonical_axis(axis, x.ndim)
    dy2 = flat_at(dy, axis)
    x2 = flat_at(x, axis)
    std = std.reshape(-1, 1)
    normal = (x2 - mean.reshape(-1, 1)) / std
    scaled = dy2 * gamma.reshape(1, -1) if elementwise_affine else dy2
    of_mean = scaled.mean(1, keepdims=True)
    of_std = (scaled * normal).mean(1, keepdims=True)
    dx = (scaled - of_mean - normal * of_std) / std
    dgamma = (dy2 * normal).sum(0)
    dbeta = dy2.sum(0)
    shape = gamma.shape if elementwise_affine else x.shape[axis:]
    return dx.reshape(x.shape), dgamma.reshape(shape), dbeta.reshape(shape)


@gradient("LayerNorm")
def _(g):
    affine = bool(g.arg("elementwise_affine", 0))
    inputs = [g.grad_output(0), *map(g.output, range(3)), g.input(0)]
    outputs = [g.grad_input(0)]
    if affine:
        inputs.append(g.input(1))
        outputs += map(g.grad_input, (1, 2))
    g.emit("LayerNormGradient", inputs, outputs)


def _check_ratio(ratio):
    if not 0 <= ratio < 1:
        raise OpError(f"argument 'ratio' is {ratio:g}; it must be in [0, 1)")


@op("Dropout", outputs=(1, 2), inplace={0: 0}, random=True)
def dropout(x, *, key, is_test: bool, ratio: float = 0.5):
    """x * mask / (1 - ratio), and the mask, in which each element is true with probability 1 - ratio.

    With `is_test`, x itself; the mask is then all true.
    """
    check_float(x, "x")
    _check_ratio(ratio)
    if is_test or ratio == 0:
        return x, jnp.ones(x.shape, bool)
    mask = jax.random.bernoulli(need_key(key), 1 - ratio, x.shape)
    return jnp.where(mask, x / (1 - ratio), 0), mask


@op("DropoutGrad", inplace={0: 0})
def dropout_grad(dy, mask=None, *, is_test: bool = False, ratio: float = 0.5):
    _check_ratio(ratio)
    if is_test:
        return dy
    raise_if(mask is None, "needs input 1, the mask that Dropout wrote, where is_test is 0")
    return jnp.where(mask, dy / (1 - ratio), 0)


@gradient("Dropout")
def _(g):
    inputs = [g.grad_output(0)]
    if not g.arg("is_test", 0):
        inputs.append(g.output(1))
    g.emit("DropoutGrad", inputs, [g.grad_input(0)])
