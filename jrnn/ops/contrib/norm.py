"""Normalization of images: SpatialBN (batch normalization), LRN, AffineChannel, InstanceNorm, GroupNorm; and RMSNorm.

Shapes: N batch, C channels, G groups; x [N, C, *spatial] (order NCHW) or [N, *spatial, C] (NHWC); scale and bias [C].
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import GradientError, OpError
from jrnn.ops.contrib.window import is_channels_last
from jrnn.ops.values import canonical_axis, check_float, check_shape, describe, flat_at
from jrnn.registry import gradient, op


def channel_axis(x: Any, order: str) -> int:
    """The axis of the channels in `order`; OpError where x has none."""
    check_float(x, "x")
    if x.ndim < 2:
        raise OpError(f"x is {describe(x)}; it must have a batch and a channel dimension")
    return x.ndim - 1 if is_channels_last(order) else 1


def along(values: Any, x: Any, axis: int) -> Any:
    """A vector laid along one axis of x, ready to be broadcast against x."""
    return values.reshape([-1 if k == axis else 1 for k in range(x.ndim)])


def all_but(x: Any, *axes: int) -> tuple[int, ...]:
    """The other axes of x."""
    return tuple(k for k in range(x.ndim) if k not in axes)


def check_channels(x: Any, axis: int, **vectors: Any) -> None:
    """Raises OpError where a vector has not one number for each channel."""
    for name, v in vectors.items():
        check_shape(v, (x.shape[axis],), name)


def _check_epsilon(epsilon: float) -> None:
    if epsilon <= 0:
        raise OpError(f"epsilon must be positive, is {epsilon}")


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

    With `is_test`, mean and var are the running ones, and y is the only output. Without, they are those of the batch (of
    `num_batches` batches whose sums and sums of squares are given), and the outputs are y, the running mean and var moved
    by 1 - momentum towards them (var as the unbiased estimate), the batch's mean, and 1 / sqrt(its var + epsilon).
    """
    _check_epsilon(epsilon)
    axis = channel_axis(x, order)
    check_channels(x, axis, scale=scale, bias=bias, mean=mean, var=var)
    if len(op.outputs) != (1 if is_test else 5):
        raise OpError(f"has {len(op.outputs)} outputs; it must have 1 with is_test=1, and 5 without")
    if is_test:
        return _normalized(x, axis, mean, lax.rsqrt(var + epsilon), scale, bias)
    if x.size == 0:
        return x, mean, var, jnp.zeros_like(mean), jnp.zeros_like(var)
    over = all_but(x, axis)
    count = math.prod(x.shape[k] for k in over) * num_batches
    if num_batches > 1:
        if sums is None or square_sums is None:
            raise OpError(f"num_batches={num_batches} needs inputs 5 and 6: each channel's sum and sum of squares")
        check_channels(x, axis, sums=sums, square_sums=square_sums)
        mu = sums / count
        sigma2 = square_sums / count - mu * mu
    else:
        mu = x.mean(over)
        sigma2 = jnp.square(x - along(mu, x, axis)).mean(over)
    rstd = lax.rsqrt(sigma2 + epsilon)
    y = _normalized(x, axis, mu, rstd, scale, bias)
    unbiased = sigma2 * (count / (count - 1) if count > 1 else math.nan)
    keep, move = momentum, 1 - momentum
    return y, keep * mean + move * mu, keep * var + move * unbiased, mu, rstd


def _normalized(x, axis, mean, rstd, scale, bias):
    return (x - along(mean, x, axis)) * along(rstd * scale, x, axis) + along(bias, x, axis)


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
    axis = channel_axis(x, order)
    check_channels(x, axis, scale=scale, mean=mean, rstd=rstd)
    check_shape(dy, x.shape, "dy")
    if x.size == 0:
        return dy, jnp.zeros_like(scale), jnp.zeros_like(scale)
    over = all_but(x, axis)
    if is_test:
        rstd = lax.rsqrt(rstd + epsilon)  # compat: Caffe2 takes var for rstd here, and its gradients are wrong
    normal = (x - along(mean, x, axis)) * along(rstd, x, axis)
    if num_batches > 1:
        if dscale_sum is None or dbias_sum is None:
            raise OpError(f"num_batches={num_batches} needs inputs 5 and 6: sums of the gradients of scale and bias")
        dscale, dbias = dscale_sum / num_batches, dbias_sum / num_batches
    else:
        dscale, dbias = (dy * normal).sum(over), dy.sum(over)
    gain = along(scale * rstd, x, axis)
    if is_test:
        return dy * gain, dscale, dbias
    count = math.prod(x.shape[k] for k in over)
    return gain * (dy - (along(dbias, x, axis) + normal * along(dscale, x, axis)) / count), dscale, dbias


@gradient("SpatialBN")
def _(g):
    if g.arg("is_test", 0):
        statistics = [g.input(3), g.input(4)]
    else:
        statistics = [g.output(3), g.output(4)]
    inputs = [g.input(0), g.input(1), g.grad_output(0), *statistics]
    outputs = [g.grad_input(k) for k in range(3)]
    if g.arg("num_batches", 1) > 1:
        inputs += outputs[1:]  # sums over the batches, which another operator writes under these names
    g.emit("SpatialBNGradient", inputs, outputs)


def _neighbors(x: Any, axis: int, before: int, after: int) -> Any:
    """Sums over windows along an axis that reach `before` elements back and `after` ahead."""
    size, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    size[axis], padding[axis] = before + 1 + after, (before, after)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, tuple(size), (1,) * x.ndim, padding)


def _lrn_scale(x, axis, size, alpha, bias):
    if size < 1:
        raise OpError(f"size must be at least 1, is {size}")
    before = (size - 1) // 2
    return bias + alpha / size * _neighbors(x * x, axis, before, size - 1 - before)


@op("LRN", outputs=(1, 2), gradient="LRNGradient(x, y, dy)")
def lrn(x, *, size: int, alpha: float = 0.0, beta: float = 0.0, bias: float = 1.0, order: str = "NCHW"):
    """y = x / scale^beta, scale = bias + alpha / size * (sum of x^2 over `size` neighboring channels); y and scale."""
    axis = channel_axis(x, order)
    scale = _lrn_scale(x, axis, size, alpha, bias)
    return x * scale**-beta, scale


@op("LRNGradient")
def lrn_gradient(
    x, y, dy, *, size: int, alpha: float = 0.0, beta: float = 0.0, bias: float = 1.0, order: str = "NCHW"
):  # fmt: skip
    axis = channel_axis(x, order)
    check_shape(dy, x.shape, "dy")
    scale = _lrn_scale(x, axis, size, alpha, bias)
    before = (size - 1) // 2
    through = _neighbors(dy * y / scale, axis, size - 1 - before, before)  # of the windows that see x
    return dy * scale**-beta - 2 * alpha * beta / size * x * through


@op("AffineChannel", inplace={0: 0})
def affine_channel(x, scale, bias, *, order: str = "NCHW", is_learnable: bool = False):
    """y = x * scale + bias, channel by channel. `is_learnable` gives scale and bias gradients."""
    axis = channel_axis(x, order)
    check_channels(x, axis, scale=scale, bias=bias)
    return x * along(scale, x, axis) + along(bias, x, axis)


@op("AffineChannelGradient", outputs=(1, 3), inplace={0: 0})
def affine_channel_gradient(dy, x_or_scale, scale=None, *, order: str = "NCHW", is_learnable: bool = False):
    """The gradient of x from dy and scale; if learnable, those of x, scale and bias from dy, x and scale."""
    axis = channel_axis(dy, order)
    if not is_learnable:
        check_channels(dy, axis, scale=x_or_scale)
        return dy * along(x_or_scale, dy, axis)
    if scale is None:
        raise OpError("is_learnable=1 needs three inputs: dy, x and scale")
    check_channels(dy, axis, scale=scale)
    check_shape(dy, x_or_scale.shape, "dy")
    over = all_but(dy, axis)
    return dy * along(scale, dy, axis), (dy * x_or_scale).sum(over), dy.sum(over)


@gradient("AffineChannel")
def _(g):
    if g.arg("is_learnable", 0):
        inputs = [g.grad_output(0), g.input(0), g.input(1)]
        g.emit("AffineChannelGradient", inputs, [g.grad_input(k) for k in range(3)])
    else:
        g.emit("AffineChannelGradient", [g.grad_output(0), g.input(1)], [g.grad_input(0)])


def _instance(values: Any, x: Any, axis: int) -> Any:
    """[N, C] statistics laid out to be broadcast against x."""
    return values.reshape([x.shape[k] if k in (0, axis) else 1 for k in range(x.ndim)])


def _instance_statistics(x, axis, epsilon):
    over = all_but(x, 0, axis)
    mean = x.mean(over)
    var = jnp.square(x - _instance(mean, x, axis)).mean(over)
    return mean, lax.rsqrt(var + epsilon)


@op(
    "InstanceNorm",
    outputs=(1, 3),
    inplace={0: 0},
    gradient="InstanceNormGradient(x, scale, bias, dy, y1, y2) -> x, scale, bias",
)
def instance_norm(x, scale, bias, *, epsilon: float = 1e-5, order: str = "NCHW"):
    """(x - mean) / sqrt(var + epsilon) * scale + bias over each image's channels; and mean and 1 / sqrt(...), [N, C]."""
    axis = channel_axis(x, order)
    check_channels(x, axis, scale=scale, bias=bias)
    mean, rstd = _instance_statistics(x, axis, epsilon)
    y = (x - _instance(mean, x, axis)) * _instance(rstd, x, axis) * along(scale, x, axis) + along(bias, x, axis)
    return y, mean, rstd


@op("InstanceNormGradient", outputs=3)
def instance_norm_gradient(x, scale, bias, dy, mean=None, rstd=None, *, epsilon: float = 1e-5, order: str = "NCHW"):
    axis = channel_axis(x, order)
    check_channels(x, axis, scale=scale, bias=bias)
    check_shape(dy, x.shape, "dy")
    if mean is None or rstd is None:
        own_mean, own_rstd = _instance_statistics(x, axis, epsilon)
        mean, rstd = own_mean if mean is None else mean, own_rstd if rstd is None else rstd
    normal = (x - _instance(mean, x, axis)) * _instance(rstd, x, axis)
    over = all_but(x, 0, axis)
    center = dy.mean(over, keepdims=True) + normal * (dy * normal).mean(over, keepdims=True)
    dx = _instance(rstd, x, axis) * along(scale, x, axis) * (dy - center)
    over = all_but(x, axis)
    return dx, (dy * normal).sum(over), dy.sum(over)


def _grouped(x: Any, axis: int, group: int) -> Any:
    """x with its channel axis split in two: groups, and channels of a group."""
    if group < 1 or x.shape[axis] % group:
        raise OpError(f"group {group} must be at least 1 and divide the {x.shape[axis]} channels of x {describe(x)}")
    return x.reshape(*x.shape[:axis], group, x.shape[axis] // group, *x.shape[axis + 1 :])


def _per_group(values: Any, grouped: Any, axis: int) -> Any:
    return values.reshape([grouped.shape[k] if k in (0, axis) else 1 for k in range(grouped.ndim)])


@op("GroupNorm", outputs=(1, 3))
def group_norm(x, gamma, beta, *, group: int = 32, epsilon: float = 1e-5, order: str = "NCHW", is_test: bool = False):
    """(x - mean) / sqrt(var + epsilon) * gamma + beta over groups of channels; and mean and 1 / sqrt(...), [N, G]."""
    axis = channel_axis(x, order)
    check_channels(x, axis, gamma=gamma, beta=beta)
    xg = _grouped(x, axis, group)
    over = all_but(xg, 0, axis)
    mean = xg.mean(over)
    centered = xg - _per_group(mean, xg, axis)
    rstd = lax.rsqrt(jnp.square(centered).mean(over) + epsilon)
    y = (centered * _per_group(rstd, xg, axis)).reshape(x.shape)
    return y * along(gamma, x, axis) + along(beta, x, axis), mean, rstd


@op("GroupNormGradient", outputs=3)
def group_norm_gradient(dy, x, gamma, beta, mean, rstd, *, group: int = 32, order: str = "NCHW"):
    axis = channel_axis(x, order)
    check_channels(x, axis, gamma=gamma, beta=beta)
    check_shape(dy, x.shape, "dy")
    xg = _grouped(x, axis, group)
    check_shape(mean, (x.shape[0], group), "mean")
    check_shape(rstd, (x.shape[0], group), "rstd")
    scale = _per_group(rstd, xg, axis)
    normal = (xg - _per_group(mean, xg, axis)) * scale
    dyg = _grouped(dy * along(gamma, x, axis), axis, group)
    over = all_but(xg, 0, axis)
    center = dyg.mean(over, keepdims=True) + normal * (dyg * normal).mean(over, keepdims=True)
    over = all_but(x, axis)
    dgamma = (dy * normal.reshape(x.shape)).sum(over)
    return (scale * (dyg - center)).reshape(x.shape), dgamma, dy.sum(over)


@gradient("GroupNorm")
def _(g):
    if len(g.op.outputs) < 3:
        raise GradientError("GroupNorm's gradient needs its mean and rstd; give the operator three outputs")
    inputs = [g.grad_output(0), *(g.input(k) for k in range(3)), g.output(1), g.output(2)]
    g.emit("GroupNormGradient", inputs, [g.grad_input(k) for k in range(3)])


def _rows(x: Any, axis: int, **weights: Any) -> Any:
    """x as a matrix whose columns begin at `axis`; OpError where weights have not one number for each."""
    check_float(x, "x")
    x2 = flat_at(x, canonical_axis(axis, x.ndim))
    for name, w in weights.items():
        if w.size != x2.shape[1]:
            raise OpError(f"{name} is {describe(w)} and x is {describe(x)}; {name} must have {x2.shape[1]} elements")
    return x2


@op("RMSNorm", outputs=2, gradient="RMSNormGradient(dy, x, gamma, y1) -> x, gamma, beta")
def rms_norm(x, gamma, beta, *, axis: int = 1, eps: float = 0.0):
    """y = x / sqrt(mean(x^2) + eps) * gamma + beta over all dimensions from `axis` on; and 1 / sqrt(...)."""
    x2 = _rows(x, axis, gamma=gamma, beta=beta)
    rrms = lax.rsqrt(jnp.square(x2).mean(1, keepdims=True) + eps)
    y = x2 * rrms * gamma.reshape(1, -1) + beta.reshape(1, -1)
    return y.reshape(x.shape), rrms.reshape(x.shape[: canonical_axis(axis, x.ndim)])


@op("RMSNormGradient", outputs=3)
def rms_norm_gradient(dy, x, gamma, rrms, *, axis: int = 1, eps: float = 0.0):
    x2 = _rows(x, axis, gamma=gamma)
    check_shape(dy, x.shape, "dy")
    dy2, r = dy.reshape(x2.shape), rrms.reshape(-1, 1)
    scaled, normal = dy2 * gamma.reshape(1, -1), x2 * r
    dx = r * (scaled - normal * (scaled * normal).mean(1, keepdims=True))
    return dx.reshape(x.shape), (dy2 * normal).sum(0).reshape(gamma.shape), dy2.sum(0).reshape(gamma.shape)
