"""Normalization of each example on its own: InstanceNorm, GroupNorm and RMSNorm, with their gradients.

Shapes: N batch, C channels, G groups; x [N, C, *spatial] (order NCHW) or [N, *spatial, C] (NHWC).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.errors import GradientError, OpError
from jrnn.ops.checks import check_float, check_shape, describe, flat_at
from jrnn.ops.contrib.norm_spatial import all_but, along, channel_axis, check_channels
from jrnn.ops.values import canonical_axis
from jrnn.registry import gradient, op


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
