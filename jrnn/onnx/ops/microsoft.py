"""Operators of onnxruntime, which its optimizer and its quantization write in place of several of the standard's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.onnx.graph import OPERATORS, OnnxNode, op, spread
from jrnn.onnx.ops.contract import normalized, precision
from jrnn.onnx.ops.quantized import centered, dynamic

_DOMAIN = "com.microsoft."


def _activated(node: OnnxNode, y, values):
    """y after the activation of the node, an operator of the standard, whose attributes are `values`."""
    name = node.get("activation")
    if not name:
        return y
    names = ("min", "max") if name == "Clip" else ("alpha", "beta", "gamma")
    return OPERATORS[name](replace(node, type=name, attributes=dict(zip(names, values))), y)


def _gelu(x, bias=None, approximate: bool = False):
    x, bias = spread(jnp.asarray(x), np.zeros((), x.dtype) if bias is None else bias)
    return jax.nn.gelu(x + bias, approximate=approximate)


@op(_DOMAIN + "Gelu", _DOMAIN + "BiasGelu")
def _(node, *values):
    return _gelu(*values)


@op(_DOMAIN + "FastGelu")
def _(node, *values):
    return _gelu(*values, approximate=True)


@op(_DOMAIN + "QuickGelu")
def _(node, x):
    return x * jax.nn.sigmoid(jnp.asarray(node.get("alpha", 1.702), x.dtype) * x)


@op(_DOMAIN + "FusedMatMul", _DOMAIN + "TransposeMatMul")
def _(node, a, b):
    def transposed(x, which: str):
        if node.get(f"transBatch{which}"):
            x = jnp.moveaxis(x, 0, -2)
        if node.get(f"trans{which}") and x.ndim > 1:
            return jnp.swapaxes(x, -1, -2)
        return x

    product = jnp.matmul(transposed(a, "A"), transposed(b, "B"), precision=precision())
    return product * jnp.asarray(node.get("alpha", 1.0), product.dtype)


@op(_DOMAIN + "FusedGemm")
def _(node, *values):
    options = (node.get(f"activation_{name}") for name in ("alpha", "beta", "gamma"))
    return _activated(node, OPERATORS["Gemm"](node, *values), [v for v in options if v is not None])


@op(_DOMAIN + "FusedConv")
def _(
    node,
    x,
    weight,
    bias=None,
    add=None,
):
    y = OPERATORS["Conv"](node, x, weight, bias)
    return _activated(node, y if add is None else y + add, node.get("activation_params", ()))


@op("SimplifiedLayerNormalization", _DOMAIN + "SimplifiedLayerNormalization")
def _(node, x, scale):
    normal, _, inverse = normalized(
        node, x, tuple(range(x.ndim))[node.get("axis", -1) :], centers=False
    )
    return normal * spread(normal, scale)[1], inverse


@op(_DOMAIN + "SkipLayerNormalization")
def _(
    node,
    x,
    skip,
    gamma,
    beta=None,
    bias=None,
):
    return _residual(node, x, skip, bias, gamma, beta)


@op(_DOMAIN + "SkipSimplifiedLayerNormalization")
def _(
    node,
    x,
    skip,
    gamma,
    bias=None,
):
    return _residual(node, x, skip, bias, gamma, None, centers=False)


def _residual(
    node,
    x,
    skip,
    bias,
    gamma,
    beta,
    centers: bool = True,
):
    """The norm of x + skip + bias over the last axis, its mean, the inverse of its deviation, and the sum."""
    total = x + spread(x, skip)[1]
    if bias is not None:
        total = total + spread(total, bias)[1]
    normal, mean, inverse = normalized(node, total, (-1,), 1e-12, centers)
    scaled = normal * spread(normal, gamma)[1]
    return (scaled if beta is None else scaled + spread(scaled, beta)[1]), mean, inverse, total


@op(_DOMAIN + "DynamicQuantizeMatMul")
def _(
    node,
    a,
    b,
    b_scale,
    b_zero=None,
    bias=None,
):
    small, scale, zero = dynamic(jnp.asarray(a))
    return _rescaled(centered(small, zero), centered(b, b_zero), scale, b_scale, bias)


@op(_DOMAIN + "MatMulIntegerToFloat")
def _(
    node,
    a,
    b,
    a_scale,
    b_scale,
    a_zero=None,
    b_zero=None,
    bias=None,
):
    return _rescaled(centered(a, a_zero, is_row=True), centered(b, b_zero), a_scale, b_scale, bias)


def _rescaled(
    a,
    b,
    a_scale,
    b_scale,
    bias,
):
    """The product of integers without zero points, times both scales. b has one scale, or one for each column."""
    total = jnp.matmul(a, b)
    factor = jnp.asarray(a_scale).reshape(-1) * jnp.asarray(b_scale).reshape(-1)
    result = total.astype(factor.dtype) * lax.expand_dims(factor, range(total.ndim - 1))
    if bias is None:
        return result
    return result + spread(result, bias)[1]
