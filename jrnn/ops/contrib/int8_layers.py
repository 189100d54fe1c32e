"""Layers on 8-bit numbers: convolution, fully connected, pooling. Integer products are added exactly.

Shapes: N batch, C channels, M outputs. x [N, H, W, C], filter [M, kernel, C / group], bias [M]: the order is NHWC.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe, flat_at
from jrnn.ops.contrib.conv import convolution
from jrnn.ops.contrib.image import scale_factors, stretched
from jrnn.ops.contrib.int8 import (
    Int8Tensor,
    away_from_zero,
    centered,
    check_same_scale,
    check_scale,
    need_int8,
    quantized,
)
from jrnn.ops.contrib.pool import averaged, greatest
from jrnn.ops.contrib.window import Window, takes_window
from jrnn.ops.values import canonical_axis
from jrnn.registry import op


def _requantized(total: Any, x: Any, w: Any, bias: Any, scale: float, zero_point: int, relu: bool, floats: bool) -> Any:
    """The sum of products plus the bias, in float64 (which holds it exactly), as a result of the scale that is asked for."""
    unit = np.float32(getattr(x, "scale", 1.0)) * np.float32(getattr(w, "scale", 1.0))  # of whole numbers
    if bias is not None:
        own = _whole(bias) if isinstance(bias, Int8Tensor) else _whole(bias) / np.float64(unit)
        total = total + jnp.expand_dims(own, tuple(range(total.ndim - 1)))
    if floats:
        y = (total * np.float64(unit)).astype(jnp.float32)
        return jnp.maximum(y, 0) if relu else y
    check_scale(scale, zero_point)
    factor = float(unit / np.float32(scale))
    if factor < 1 and isinstance(x, Int8Tensor) and isinstance(w, Int8Tensor):
        fraction, exponent = math.frexp(factor)
        # compat: QNNPACK rounds the product with the fraction first, then the shift by the exponent
        return quantized(away_from_zero(jnp.floor(total * fraction + 0.5) * 2.0**exponent), scale, zero_point, relu)
    return quantized(away_from_zero(total * factor), scale, zero_point, relu)


def _whole(x: Any) -> Any:
    """Stored numbers without the zero point, or floats, in float64: whole numbers stay exact."""
    return centered(x).astype(jnp.float64) if isinstance(x, Int8Tensor) else jnp.asarray(x).astype(jnp.float64)


@op("Int8FC", gradient="forbidden")
def fc(x, w, b, *, axis: int = 1, Y_scale: float = 1.0, Y_zero_point: int = 0, dequantize_output: bool = False):
    """y = x w^T + b, with x flattened from `axis` on; with `dequantize_output` in floats."""
    axis = canonical_axis(axis, x.ndim)
    with jax.enable_x64(True):
        x2 = flat_at(_whole(x), axis)
        if w.ndim != 2 or w.shape[1] != x2.shape[1] or b.shape != w.shape[:1]:
            raise OpError(
                f"x {describe(x)} has {x2.shape[1]} features from axis {axis} on, w is {describe(w)} and b {describe(b)}; "
                f"they must be [M, {x2.shape[1]}] and [M]"
            )
        total = (x2 @ _whole(w).T).reshape(*x.shape[:axis], w.shape[0])
        return _requantized(total, x, w, b, Y_scale, Y_zero_point, False, dequantize_output)


def _convolution(x: Any, filter: Any, bias: Any, window: Window, group: int, *result: Any) -> Any:
    if not window.channels_last:
        raise OpError("order is NCHW; an Int8 convolution has order NHWC")
    with jax.enable_x64(True):
        total = convolution(_whole(x), _whole(filter), window, group)
        if bias is not None and bias.shape != total.shape[-1:]:
            raise OpError(f"bias is {describe(bias)}; its shape must be [{total.shape[-1]}]")
        return _requantized(total, x, filter, bias, *result, False)


def _register_convolution(type: str, relu: bool) -> None:
    @op(type, gradient="forbidden")
    @takes_window
    def conv(x, filter, bias=None, *, window, group: int = 1, Y_scale: float = 1.0, Y_zero_point: int = 0):
        return _convolution(x, filter, bias, window, group, Y_scale, Y_zero_point, relu)


_register_convolution("Int8Conv", False)
_register_convolution("Int8ConvRelu", True)


def _register_pools(suffix: str, relu: bool) -> None:
    @op("Int8AveragePool" + suffix, gradient="forbidden")
    @takes_window
    def average(x, *, window, Y_scale: float = 1.0, Y_zero_point: int = 0):
        x = need_int8(x, "x")
        check_scale(Y_scale, Y_zero_point)
        _check_order(window)
        mean = averaged(centered(x, jnp.float32), window, count_include_pad=True)  # compat: padding stands for 0
        steps = away_from_zero(mean * (np.float32(x.scale) / np.float32(Y_scale)))
        return quantized(steps, Y_scale, Y_zero_point, relu)

    @op("Int8MaxPool" + suffix, gradient="forbidden")
    @takes_window
    def maximum(x, *, window, Y_scale: float = 1.0, Y_zero_point: int = 0):
        x = need_int8(x, "x")
        check_same_scale(x, Y_scale, Y_zero_point)
        _check_order(window)
        return quantized(greatest(centered(x, jnp.float32), window), x.scale, x.zero_point, relu)


_register_pools("", False)
_register_pools("Relu", True)


def _check_order(window: Window) -> None:
    if not window.channels_last:
        raise OpError("order is NCHW; Int8 pooling has order NHWC")


@op("Int8ResizeNearest", gradient="forbidden")
def resize_nearest(
    x, *, width_scale: float = 1.0, height_scale: float = 1.0, Y_scale: float = 1.0, Y_zero_point: int = 0
):
    x = need_int8(x, "x")
    check_same_scale(x, Y_scale, Y_zero_point)
    return x.like(stretched(jnp.asarray(x.stored), scale_factors(None, (height_scale, width_scale)), (1, 2)))
