"""Operators that sum over axes: products, convolutions, pooling, reductions and normalizations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import ConversionError
from jrnn.onnx.graph import cast, op, spread, xp


def precision() -> lax.Precision | None:
    """A float32 product is a float32 product on every device, unless the user's configuration says otherwise."""
    return lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None else None  # type: ignore[attr-defined]


op("Einsum")(lambda node, *values: jnp.einsum(node.get("equation"), *values, precision=precision()))
op("MatMul")(lambda node, a, b: jnp.matmul(a, b, precision=precision()))


@op("Gemm")
def _(node, a, b, c=None):
    a = a.T if node.get("transA") else a
    b = b.T if node.get("transB") else b
    found = jnp.matmul(a, b, precision=precision())
    if node.get("alpha", 1.0) != 1.0:
        found = found * jnp.asarray(node.get("alpha"), found.dtype)
    if c is None:
        return found
    found, c = spread(found, c)
    return found + (c if node.get("beta", 1.0) == 1.0 else c * jnp.asarray(node.get("beta"), c.dtype))


def _pads(node, shape, kernel, strides, dilations):
    """The padding of each spatial axis, as pairs."""
    auto, rank = node.get("auto_pad", "NOTSET"), len(kernel)
    if auto == "NOTSET":
        return np.reshape(node.get("pads", [0] * 2 * rank), (2, rank)).T.tolist()
    if auto == "VALID":
        return [[0, 0]] * rank
    pads = []
    for size, k, stride, dilation in zip(shape, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        low = total // 2 if auto == "SAME_UPPER" else total - total // 2
        pads.append([low, total - low])
    return pads


@op("Conv")
def _(node, x, weight, bias=None):
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    rank = x.ndim - 2
    strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    pads = _pads(node, x.shape[2:], weight.shape[2:], strides, dilations)
    options = {"rhs_dilation": dilations, "feature_group_count": node.get("group", 1), "precision": precision()}
    found = lax.conv_general_dilated(x, weight, strides, pads, **options)
    return found if bias is None else found + bias.reshape((1, -1) + (1,) * rank)


@op("MaxPool", "AveragePool")
def _(node, x):
    if len(node.outputs) > 1:
        raise ConversionError(f"{node}: the indices of the maxima are not read")
    kernel = node.get("kernel_shape")
    ones = [1] * len(kernel)
    strides, dilations = node.get("strides", ones), node.get("dilations", ones)
    pads = _pads(node, x.shape[2:], kernel, strides, dilations)
    if node.get("ceil_mode", 0):
        raise ConversionError(f"{node}: ceil_mode is not read")
    window = ((1, 1, *kernel), (1, 1, *strides), [(0, 0), (0, 0), *map(tuple, pads)], None, (1, 1, *dilations))
    if node.type == "MaxPool":
        return lax.reduce_window(x, np.asarray(-np.inf, x.dtype), lax.max, *window)
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(x, zero, lax.add, *window)
    if node.get("count_include_pad", 0):
        return total / math.prod(kernel)
    return total / lax.reduce_window(jnp.ones_like(x), zero, lax.add, *window)


@op("GlobalAveragePool", "GlobalMaxPool")
def _(node, x):
    reduce = jnp.mean if node.type == "GlobalAveragePool" else jnp.max
    return reduce(x, axis=tuple(range(2, x.ndim)), keepdims=True)


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


@op(*_REDUCE)
def _(node, x, axes=None):
    axes = node.ints("axes", axes)
    if not axes and node.get("noop_with_empty_axes", 0):
        return x
    found = _REDUCE[node.type](xp(x), x, axis=tuple(axes) if axes else None, keepdims=bool(node.get("keepdims", 1)))
    return cast(found, x.dtype)


@op("ArgMax", "ArgMin")
def _(node, x):
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    find = jnp.argmax if node.type == "ArgMax" else jnp.argmin
    if not node.get("select_last_index", 0):
        return find(x, axis=axis, keepdims=keep)
    return x.shape[axis] - 1 - find(jnp.flip(x, axis), axis=axis, keepdims=keep)


@op("Softmax", "LogSoftmax", "Hardmax")
def _(node, x):
    axis = node.get("axis", -1 if node.opset >= 13 else 1)
    flat = x.reshape((math.prod(x.shape[:axis]), -1)) if node.opset < 13 else x  # once over all axes from `axis`
    axis = 1 if node.opset < 13 else axis
    if node.type == "Hardmax":
        found = jax.nn.one_hot(jnp.argmax(flat, axis), flat.shape[axis], dtype=x.dtype, axis=axis)
    else:
        found = (jax.nn.softmax if node.type == "Softmax" else jax.nn.log_softmax)(flat, axis=axis)
    return found.reshape(x.shape)


def _normal(node, x, axes):
    """x normalized over axes, its mean, and the inverse of its standard deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
    inverse = lax.rsqrt(variance + np.asarray(node.get("epsilon", 1e-5), x.dtype))
    return (x - mean) * inverse, mean, inverse


@op("LayerNormalization")
def _(node, x, scale, bias=None):
    normal, mean, inverse = _normal(node, x, tuple(range(x.ndim))[node.get("axis", -1) :])
    found = normal * spread(normal, scale)[1]
    return (found if bias is None else found + spread(found, bias)[1]), mean, inverse


@op("InstanceNormalization")
def _(node, x, scale, bias):
    row = (1, -1) + (1,) * (x.ndim - 2)
    return _normal(node, x, tuple(range(2, x.ndim)))[0] * scale.reshape(row) + bias.reshape(row)


@op("BatchNormalization")
def _(node, x, scale, bias, mean, variance):
    if node.get("training_mode", 0):
        raise ConversionError(f"{node}: training_mode is set; graphs are read for inference")
    row = (1, -1) + (1,) * (x.ndim - 2)
    factor = scale * lax.rsqrt(variance + np.asarray(node.get("epsilon", 1e-5), variance.dtype))
    return (x - mean.reshape(row)) * factor.reshape(row) + bias.reshape(row)
