"""Operators that sum over axes: products, reductions and normalizations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import ConversionError
from jrnn.jaxprs.queries import is_floating
from jrnn.onnx.graph import cast, op, spread, xp


def precision() -> lax.Precision | None:
    """A float32 product is a float32 product on every device, unless the user's configuration says otherwise."""
    return lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None else None  # type: ignore[attr-defined]


@op("Einsum")
def _(node, *values):
    return jnp.einsum(node.get("equation"), *values, precision=precision())


@op("MatMul")
def _(node, a, b):
    return jnp.matmul(a, b, precision=precision())


@op("Gemm")
def _(node, a, b, c=None):
    a = a.T if node.get("transA") else a
    b = b.T if node.get("transB") else b
    product = jnp.matmul(a, b, precision=precision())
    if node.get("alpha", 1.0) != 1.0:
        product = product * jnp.asarray(node.get("alpha"), product.dtype)
    if c is None:
        return product
    product, c = spread(product, c)
    return product + (
        c if node.get("beta", 1.0) == 1.0 else c * jnp.asarray(node.get("beta"), c.dtype)
    )


_REDUCE = {
    "ReduceSum": lambda n, x, **k: n.sum(x, **k),
    "ReduceMean": lambda n, x, **k: n.mean(x, **k),
    "ReduceMax": lambda n, x, **k: n.max(x, **k),
    "ReduceMin": lambda n, x, **k: n.min(x, **k),
    "ReduceProd": lambda n, x, **k: n.prod(x, **k),
    "ReduceL1": lambda n, x, **k: n.sum(n.abs(x), **k),
    "ReduceL2": lambda n, x, **k: n.sqrt(n.sum(n.square(x), **k)),
    "ReduceSumSquare": lambda n, x, **k: n.sum(n.square(x), **k),
    "ReduceLogSum": lambda n, x, **k: n.log(n.sum(x, **k)),
    "ReduceLogSumExp": lambda n, x, **k: jax.nn.logsumexp(x, **k),
}


# What a reduction over no elements gives.
_EMPTY = {"ReduceMax": (-np.inf, "min", False), "ReduceMin": (np.inf, "max", True)}


@op(*_REDUCE)
def _(node, x, axes=None):
    axes = node.ints("axes", axes)
    options = {"axis": tuple(axes) if axes else None, "keepdims": bool(node.get("keepdims", 1))}
    if not axes and node.get("noop_with_empty_axes", 0):
        options = {"axis": ()}  # the function of each element, without a sum
    if node.type in _EMPTY and math.prod(x.shape) == 0:
        infinite, bound, boolean = _EMPTY[node.type]
        if x.dtype == bool:
            options["initial"] = boolean
        else:
            floating = is_floating(x)
            options["initial"] = np.asarray(
                infinite if floating else getattr(jnp.iinfo(x.dtype), bound), x.dtype
            )
    return cast(_REDUCE[node.type](xp(x), x, **options), x.dtype)


@op("ArgMax", "ArgMin")
def _(node, x):
    axis = node.get("axis", 0)
    keep = bool(node.get("keepdims", 1))
    find = jnp.argmax if node.type == "ArgMax" else jnp.argmin
    if not node.get("select_last_index", 0):
        return find(x, axis=axis, keepdims=keep)
    return x.shape[axis] - 1 - find(jnp.flip(x, axis), axis=axis, keepdims=keep)


@op("Softmax", "LogSoftmax", "Hardmax")
def _(node, x):
    axis = node.get("axis", -1 if node.opset >= 13 else 1)
    # once over all axes from `axis`
    if node.opset < 13:
        flat = x.reshape((math.prod(x.shape[:axis]), -1))
    else:
        flat = x
    axis = 1 if node.opset < 13 else axis
    if node.type == "Hardmax":
        out = jax.nn.one_hot(jnp.argmax(flat, axis), flat.shape[axis], dtype=x.dtype, axis=axis)
    else:
        out = (jax.nn.softmax if node.type == "Softmax" else jax.nn.log_softmax)(flat, axis=axis)
    return out.reshape(x.shape)


def normalized(
    node,
    x,
    axes,
    epsilon: float = 1e-5,
    centers: bool = True,
):
    """x normalized over axes, its mean, and the inverse of its standard deviation, or of the root of its mean square."""
    if centers:
        mean = jnp.mean(x, axes, keepdims=True)
    else:
        mean = jnp.zeros((1,) * x.ndim, x.dtype)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
    inverse = lax.rsqrt(variance + np.asarray(node.get("epsilon", epsilon), x.dtype))
    return (x - mean) * inverse, mean, inverse


def by_channel(numbers, x):
    """One number for each channel, in a shape that broadcasts with x [N, C, ...]."""
    return numbers.reshape((1, -1) + (1,) * (x.ndim - 2))


@op("LpNormalization")
def _(node, x):
    axis = node.get("axis", -1)
    order = node.get("p", 2)
    if order == 2:
        size = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    else:
        size = jnp.sum(jnp.abs(x), axis, keepdims=True)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))


@op("LayerNormalization")
def _(node, x, scale, bias=None):
    normal, mean, inverse = normalized(node, x, tuple(range(x.ndim))[node.get("axis", -1) :])
    scaled = normal * spread(normal, scale)[1]
    return (scaled if bias is None else scaled + spread(scaled, bias)[1]), mean, inverse


@op("InstanceNormalization")
def _(node, x, scale, bias):
    normal, _, _ = normalized(node, x, tuple(range(2, x.ndim)))
    return normal * by_channel(scale, x) + by_channel(bias, x)


@op("BatchNormalization")
def _(
    node,
    x,
    scale,
    bias,
    mean,
    variance,
):
    if node.get("training_mode", 0):
        raise ConversionError(f"{node}: training_mode is set; graphs are read for inference")
    factor = scale * lax.rsqrt(variance + np.asarray(node.get("epsilon", 1e-5), variance.dtype))
    return (x - by_channel(mean, x)) * by_channel(factor, x) + by_channel(bias, x)
