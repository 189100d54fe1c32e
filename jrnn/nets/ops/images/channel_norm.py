"""Normalization of images: SpatialBN (batch normalization), LRN, AffineChannel, InstanceNorm, GroupNorm; and RMSNorm.

Shapes: N batch, C channels, G groups; x [N, C, *spatial] (order NCHW) or [N, *spatial, C] (NHWC); scale and bias [C].
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import GradientError, OpError
from jrnn.nets.ir import Ints
from jrnn.nets.ops.images.windows import is_channels_last
from jrnn.nets.ops.norm import columns_from
from jrnn.nets.ops.values import canonical_axis, check_float, check_shape, describe, raise_if
from jrnn.nets.ops.vjp import op_with_vjp, vjp_op
from jrnn.nets.registry import gradient, op


def _channels(x: Any, order: str, **vectors: Any) -> int:
    """The axis of channels in x; OpError where x has none, or a vector does not have one number per channel."""
    check_float(x, "x")
    raise_if(x.ndim < 2, "it must have a batch and a channel dimension", x=x)
    axis = x.ndim - 1 if is_channels_last(order) else 1
    for name, v in vectors.items():
        check_shape(v, (x.shape[axis],), name)
    return axis


def _along(values: Any, x: Any, *axes: int) -> Any:
    """Values for some axes of x in a shape that broadcasts with x."""
    return values.reshape([x.shape[k] if k in axes else 1 for k in range(x.ndim)])


def _all_but(x: Any, *axes: int) -> Ints:
    return tuple(k for k in range(x.ndim) if k not in axes)


@op("SpatialBN", outputs=(1, 5), inplace={0: 0, 1: 3, 2: 4})
def spatial_bn(
    x,
    scale,
    bias,
    mean,
    var,
    sums=None,
    square_sums=None,
    *,
    op,
    is_test: bool = False,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    order: str = "NCHW",
    num_batches: int = 1,
):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias, channel by channel.

    With `is_test`, mean and var are the running statistics, and y is the only output. Without, y is computed from the
    statistics of the batch, or of `num_batches` batches whose sums and sums of squares are given. The outputs are then y,
    the running mean and var moved by 1 - momentum towards the batch's (var is the unbiased estimate), the batch's mean, and
    1 / sqrt(batch's var + epsilon).
    """
    raise_if(epsilon <= 0, f"epsilon must be positive, is {epsilon}")
    axis = _channels(x, order, scale=scale, bias=bias, mean=mean, var=var)
    if len(op.outputs) != (1 if is_test else 5):
        raise OpError(
            f"has {len(op.outputs)} outputs; it must have 1 with is_test=1, and 5 without"
        )
    if is_test:
        return _normalized(x, axis, mean, lax.rsqrt(var + epsilon), scale, bias)
    if x.size == 0:
        return x, mean, var, jnp.zeros_like(mean), jnp.zeros_like(var)
    over = _all_but(x, axis)
    count = math.prod(x.shape[k] for k in over) * num_batches
    if num_batches > 1:
        if sums is None or square_sums is None:
            raise OpError(
                f"num_batches={num_batches} needs inputs 5 and 6: each channel's sum and sum of squares"
            )
        _channels(x, order, sums=sums, square_sums=square_sums)
        mu = sums / count
        sigma2 = square_sums / count - mu * mu
    else:
        mu = x.mean(over)
        sigma2 = jnp.square(x - _along(mu, x, axis)).mean(over)
    rstd = lax.rsqrt(sigma2 + epsilon)
    y = _normalized(x, axis, mu, rstd, scale, bias)
    unbiased = sigma2 * (count / (count - 1) if count > 1 else math.nan)
    keep = momentum
    move = 1 - momentum
    return y, keep * mean + move * mu, keep * var + move * unbiased, mu, rstd


def _normalized(x, axis, mean, rstd, scale, bias):
    return (x - _along(mean, x, axis)) * _along(rstd * scale, x, axis) + _along(bias, x, axis)


@op("SpatialBNGradient", outputs=3, inplace={0: 2, 1: 5, 2: 6})
def spatial_bn_gradient(
    x,
    scale,
    dy,
    mean,
    rstd,
    dscale_sum=None,
    dbias_sum=None,
    *,
    is_test: bool = False,
    epsilon: float = 1e-5,
    order: str = "NCHW",
    num_batches: int = 1,
):
    """The gradients of x, scale and bias. With `is_test`, `rstd` is the running var, and the statistics are constants."""
    axis = _channels(x, order, scale=scale, mean=mean, rstd=rstd)
    check_shape(dy, x.shape, "dy")
    if x.size == 0:
        return dy, jnp.zeros_like(scale), jnp.zeros_like(scale)
    over = _all_but(x, axis)
    if is_test:
        # compat: Caffe2 takes var for rstd here, and its gradients are wrong
        rstd = lax.rsqrt(rstd + epsilon)
    normal = (x - _along(mean, x, axis)) * _along(rstd, x, axis)
    if num_batches > 1:
        if dscale_sum is None or dbias_sum is None:
            raise OpError(
                f"num_batches={num_batches} needs inputs 5 and 6: sums of the gradients of scale and bias"
            )
        dscale = dscale_sum / num_batches
        dbias = dbias_sum / num_batches
    else:
        dscale = (dy * normal).sum(over)
        dbias = dy.sum(over)
    gain = _along(scale * rstd, x, axis)
    if is_test:
        return dy * gain, dscale, dbias
    count = math.prod(x.shape[k] for k in over)
    of_statistics = (_along(dbias, x, axis) + normal * _along(dscale, x, axis)) / count
    return gain * (dy - of_statistics), dscale, dbias


@gradient("SpatialBN")
def _(g):
    blob = g.input if g.arg("is_test", 0) else g.output
    inputs = [g.input(0), g.input(1), g.grad_output(0), blob(3), blob(4)]
    outputs = list(map(g.grad_input, range(3)))
    if g.arg("num_batches", 1) > 1:
        # Sums over the batches, which another operator writes under these names.
        inputs += outputs[1:]
    g.emit("SpatialBNGradient", inputs, outputs)


def _neighbors(x: Any, axis: int, before: int, after: int) -> Any:
    """Sums over windows along an axis that reach `before` elements back and `after` ahead."""
    # XLA takes the time of the whole window, so it does not reach beyond the array.
    before = min(before, x.shape[axis])
    after = min(after, x.shape[axis])
    size = [1] * x.ndim
    size[axis] = before + 1 + after
    padding = [(0, 0)] * x.ndim
    padding[axis] = (before, after)
    zero = np.zeros((), x.dtype)
    return lax.reduce_window(x, zero, lax.add, tuple(size), (1,) * x.ndim, padding)


@op_with_vjp("LRN", outputs=(1, 2), gradient="LRNGradient(x, y, dy)")
def lrn(
    x, *, size: int, alpha: float = 0.0, beta: float = 0.0, bias: float = 1.0, order: str = "NCHW"
):
    """y = x / scale^beta, scale = bias + alpha / size * (sum of x^2 over `size` neighboring channels); y and scale."""
    raise_if(size < 1, f"size must be at least 1, is {size}")
    axis = _channels(x, order)
    before = (size - 1) // 2
    scale = bias + alpha / size * _neighbors(x * x, axis, before, size - 1 - before)
    return x * scale**-beta, scale


@op("AffineChannel", inplace={0: 0})
def affine_channel(x, scale, bias, *, order: str = "NCHW", is_learnable: bool = False):
    """y = x * scale + bias, channel by channel. `is_learnable` gives scale and bias gradients."""
    axis = _channels(x, order, scale=scale, bias=bias)
    return x * _along(scale, x, axis) + _along(bias, x, axis)


@op("AffineChannelGradient", outputs=(1, 3), inplace={0: 0})
def affine_channel_gradient(
    dy, x_or_scale, scale=None, *, order: str = "NCHW", is_learnable: bool = False
):
    """The gradient of x from dy and scale; if learnable, the gradients of x, scale and bias from dy, x and scale."""
    if not is_learnable:
        axis = _channels(dy, order, scale=x_or_scale)
        return dy * _along(x_or_scale, dy, axis)
    raise_if(scale is None, "is_learnable=1 needs three inputs: dy, x and scale")
    axis = _channels(dy, order, scale=scale)
    check_shape(dy, x_or_scale.shape, "dy")
    over = _all_but(dy, axis)
    return dy * _along(scale, dy, axis), (dy * x_or_scale).sum(over), dy.sum(over)


@gradient("AffineChannel")
def _(g):
    if g.arg("is_learnable", 0):
        inputs = [g.grad_output(0), g.input(0), g.input(1)]
        g.emit("AffineChannelGradient", inputs, list(map(g.grad_input, range(3))))
    else:
        g.emit("AffineChannelGradient", [g.grad_output(0), g.input(1)], [g.grad_input(0)])


def _statistics(x: Any, over: Ints, epsilon: float) -> tuple[Any, Any]:
    """The mean and 1 / sqrt(var + epsilon), with the reduced dimensions kept."""
    mean = x.mean(over, keepdims=True)
    return mean, lax.rsqrt(jnp.square(x - mean).mean(over, keepdims=True) + epsilon)


@op_with_vjp(
    "InstanceNorm",
    outputs=(1, 3),
    inplace={0: 0},
    gradient="InstanceNormGradient(x, scale, bias, dy, y1, y2) -> x, scale, bias",
)
def instance_norm(x, scale, bias, *, epsilon: float = 1e-5, order: str = "NCHW"):
    """(x - mean) / sqrt(var + epsilon) * scale + bias over each image's channels; and mean and 1 / sqrt(...), [N, C]."""
    axis = _channels(x, order, scale=scale, bias=bias)
    over = _all_but(x, 0, axis)
    mean, rstd = _statistics(x, over, epsilon)
    y = (x - mean) * rstd * _along(scale, x, axis) + _along(bias, x, axis)
    return y, jnp.squeeze(mean, over), jnp.squeeze(rstd, over)


def _grouped(x: Any, axis: int, group: int) -> Any:
    """x with its channel axis split in two: groups, and channels of a group."""
    if group < 1 or x.shape[axis] % group:
        raise OpError(
            f"group {group} must be at least 1 and divide the {x.shape[axis]} channels of x {describe(x)}"
        )
    return x.reshape(*x.shape[:axis], group, x.shape[axis] // group, *x.shape[axis + 1 :])


@op("GroupNorm", outputs=(1, 3))
@vjp_op("GroupNormGradient(dy, x, gamma, beta, y1, y2) -> x, gamma, beta", least=3)
def group_norm(
    x,
    gamma,
    beta,
    *,
    group: int = 32,
    epsilon: float = 1e-5,
    order: str = "NCHW",
    is_test: bool = False,
):
    """(x - mean) / sqrt(var + epsilon) * gamma + beta over groups of channels; and mean and 1 / sqrt(...), [N, G]."""
    axis = _channels(x, order, gamma=gamma, beta=beta)
    xg = _grouped(x, axis, group)
    over = _all_but(xg, 0, axis)
    mean, rstd = _statistics(xg, over, epsilon)
    y = ((xg - mean) * rstd).reshape(x.shape) * _along(gamma, x, axis) + _along(beta, x, axis)
    return y, jnp.squeeze(mean, over), jnp.squeeze(rstd, over)


@gradient("GroupNorm")
def _(g):
    if len(g.op.outputs) < 3:
        raise GradientError(
            "GroupNorm's gradient needs its mean and rstd; give the operator three outputs"
        )
    inputs = [g.grad_output(0), *map(g.input, range(3)), *map(g.output, (1, 2))]
    g.emit("GroupNormGradient", inputs, list(map(g.grad_input, range(3))))


@op("RMSNorm", outputs=2, gradient="RMSNormGradient(dy, x, gamma, y1) -> x, gamma, beta")
def rms_norm(x, gamma, beta, *, axis: int = 1, eps: float = 0.0):
    """y = x / sqrt(mean(x^2) + eps) * gamma + beta over all dimensions from `axis` on; and 1 / sqrt(...)."""
    x2 = columns_from(x, axis, gamma=gamma, beta=beta)
    rrms = lax.rsqrt(jnp.square(x2).mean(1, keepdims=True) + eps)
    y = x2 * rrms * gamma.reshape(1, -1) + beta.reshape(1, -1)
    return y.reshape(x.shape), rrms.reshape(x.shape[: canonical_axis(axis, x.ndim)])


@op("RMSNormGradient", outputs=3)
def rms_norm_gradient(dy, x, gamma, rrms, *, axis: int = 1, eps: float = 0.0):
    check_shape(dy, x.shape, "dy")

    def normalized(x, gamma, beta):
        return rms_norm(x, gamma, beta, axis=axis, eps=eps)[0]

    _, pullback = jax.vjp(normalized, x, gamma, jnp.zeros_like(gamma))
    return pullback(dy)
