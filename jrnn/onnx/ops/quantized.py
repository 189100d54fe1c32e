"""Casts, and operators of quantized numbers: q = round(x / scale) + zero point.

Products of quantized numbers are exact: they are summed in int32.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import TensorProto, helper

from jrnn.errors import ConversionError
from jrnn.jaxprs.queries import is_floating
from jrnn.nn.span import along_last
from jrnn.onnx.graph import cast, op, xp
from jrnn.onnx.ops.contract import by_channel
from jrnn.onnx.ops.windows import add_bias, convolve

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NARROW = ("int2", "uint2", "int4", "uint4")


def converted(x, dtype, saturate: bool = True, rounding: str = "up"):
    """`x` in another type, as Cast defines it.

    Args:
        saturate: whether a number that a type of 8 bits cannot represent becomes the nearest one that it can.
        rounding: to a power of two for float8_e8m0fnu: up, down or nearest.
    """
    name = np.dtype(dtype).name
    if x.dtype == dtype or not is_floating(x):
        return cast(x, dtype)
    if name in _NARROW:
        return cast(cast(x, np.int32), dtype)
    if name == "float8_e8m0fnu":
        return _power_of_two(x, dtype, saturate, rounding)
    if (name in _FLOAT8 and saturate) or name == "float4_e2m1fn":
        bounds = jnp.finfo(dtype)
        low, high = (np.asarray(v, np.float32) for v in (bounds.min, bounds.max))
        x = xp(x).clip(x, low.astype(x.dtype), high.astype(x.dtype))
    return cast(x, dtype)


def _power_of_two(x, dtype, saturate: bool, rounding: str):
    """The exponent of a float32 as the 8 bits of a float8_e8m0fnu; 255 is NaN."""
    bits = lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    half = 0x400000
    more = {
        "up": fraction > 0,
        "down": jnp.zeros_like(fraction, bool),
        "nearest": (fraction > half) | ((fraction == half) & (exponent > 0)),
    }
    if rounding not in more:
        raise ConversionError(f"round_mode is {rounding!r}; it must be up, down or nearest")
    power = exponent + more[rounding]
    if saturate:
        power = jnp.minimum(power, 254)
    power = jnp.where(exponent == 255, 255, power).astype(jnp.uint8)
    return lax.bitcast_convert_type(power, dtype)


def _dtype(node, code) -> np.dtype:
    if code == TensorProto.STRING:
        raise ConversionError(f"{node}: strings are not read")
    return helper.tensor_dtype_to_np_dtype(code)


def _cast(node, x, dtype):
    return converted(x, dtype, bool(node.get("saturate", 1)), node.get("round_mode", "up"))


@op("Cast")
def _(node, x):
    return _cast(node, x, _dtype(node, node.get("to")))


@op("BitCast")
def _(node, x):
    return _bits(jnp.asarray(x), _dtype(node, node.get("to")))


@op("CastLike")
def _(node, x, like):
    return _cast(node, x, like.dtype)


def _bits(x, dtype):
    """The bits of x as another type; a boolean is one byte."""
    if bool in (x.dtype, dtype):
        return x.astype(dtype)
    return lax.bitcast_convert_type(x, dtype)


def _along(node, value, x):
    """A scale or zero point that broadcasts with x: one, one for each index of an axis, or one for each block of it."""
    value = jnp.asarray(value)
    axis = node.get("axis", 1)
    block = node.get("block_size", 0)
    if value.size == 1:
        return value.reshape((1,) * x.ndim)
    axis %= x.ndim
    if block:
        return lax.slice_in_dim(jnp.repeat(value, block, axis), 0, x.shape[axis], axis=axis)
    row = [1] * x.ndim
    row[axis] = -1
    return value.reshape(row)


def divided(x, scale):
    """x / scale, correctly rounded: XLA multiplies by the inverse of a divisor that it sees is broadcast."""
    return x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape))


def rounded(x, zero, dtype):
    """Numbers of a quantized type: x, which is in units of the scale, rounded to even and moved by the zero point."""
    bounds = jnp.iinfo(dtype)
    # Clipped as float32: these bounds, and their sums with a zero point, are exact in it.
    shifted = jnp.round(x) + (0 if zero is None else zero.astype(x.dtype))
    return jnp.clip(shifted, bounds.min, bounds.max).astype(jnp.int32).astype(dtype)


@op("QuantizeLinear")
def _(node, x, scale, zero=None):
    code = node.get("output_dtype", 0)
    if zero is not None:
        dtype = zero.dtype
    else:
        if code:
            dtype = _dtype(node, code)
        else:
            dtype = np.dtype(np.uint8)
    x = jnp.asarray(x)
    if is_floating(x):
        units = x
    else:
        units = x.astype(jnp.float32)
    if node.get("precision", 0):
        units = units.astype(_dtype(node, node.get("precision")))
    units = divided(units, _along(node, scale, x).astype(units.dtype))
    if zero is not None:
        zero = _along(node, zero, x)
    if jnp.issubdtype(dtype, jnp.integer):
        return rounded(units.astype(jnp.promote_types(units.dtype, jnp.float32)), zero, dtype)
    return converted(
        units if zero is None else units + zero.astype(units.dtype),
        dtype,
        bool(node.get("saturate", 1)),
    )


@op("DequantizeLinear")
def _(node, x, scale, zero=None):
    x = jnp.asarray(x)
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    steps = x.astype(wide)
    if zero is not None:
        steps = steps - _along(node, zero, x).astype(wide)
    code = node.get("output_dtype", 0)
    scale = _along(node, scale, x)
    return (steps.astype(jnp.float32) * scale.astype(jnp.float32)).astype(
        _dtype(node, code) if code else scale.dtype
    )


def dynamic(x):
    """x as numbers of uint8, their scale and their zero point, of the range of x and 0."""
    low = jnp.min(x, initial=0.0)
    high = jnp.max(x, initial=0.0)
    scale = (high - low) / np.asarray(255, x.dtype)
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    zero = jnp.clip(jnp.round(0 - low / scale), 0, 255)
    wide = (None,) * x.ndim
    numbers = rounded(divided(x, scale[wide]), zero[wide], jnp.uint8)
    return numbers, scale, zero.astype(jnp.uint8)


@op("DynamicQuantizeLinear")
def _(node, x):
    return dynamic(jnp.asarray(x))


def centered(x, zero, is_row: bool = False):
    """x without its zero point, in int32. `is_row`: the zero points are one for each row, the axis before the last."""
    x = jnp.asarray(x).astype(jnp.int32)
    if zero is None:
        return x
    zero = jnp.asarray(zero).astype(jnp.int32)
    zero = zero[..., None] if is_row and zero.ndim else zero
    return x - along_last(zero, x)


def _filters(weight, zero):
    """A kernel without its zero point, or without one for each filter."""
    if zero is not None:
        zero = jnp.asarray(zero).reshape((-1,) + (1,) * (weight.ndim - 1))
    return centered(weight, zero)


@op("MatMulInteger")
def _(
    node,
    a,
    b,
    a_zero=None,
    b_zero=None,
):
    return jnp.matmul(centered(a, a_zero, is_row=True), centered(b, b_zero))


@op("ConvInteger")
def _(
    node,
    x,
    weight,
    x_zero=None,
    zero=None,
):
    return convolve(node, centered(x, x_zero), _filters(weight, zero))


@op("QLinearMatMul")
def _(
    node,
    a,
    a_scale,
    a_zero,
    b,
    b_scale,
    b_zero,
    scale,
    zero,
):
    product = jnp.matmul(centered(a, a_zero, is_row=True), centered(b, b_zero)).astype(jnp.float32)
    a_scale, b_scale, scale = (jnp.asarray(s, jnp.float32) for s in (a_scale, b_scale, scale))
    a_scale = a_scale[..., None] if a_scale.ndim else a_scale
    units = divided(
        product * _wide(a_scale, product) * _wide(b_scale, product), _wide(scale, product)
    )
    return rounded(units, _wide(zero, units), zero.dtype)


def _wide(value, like):
    return along_last(jnp.asarray(value), like)


@op("QLinearConv")
def _(
    node,
    x,
    x_scale,
    x_zero,
    weight,
    w_scale,
    w_zero,
    scale,
    zero,
    bias=None,
):
    total = add_bias(convolve(node, centered(x, x_zero), _filters(weight, w_zero)), bias)
    factor = (
        jnp.asarray(x_scale).reshape(-1)
        * jnp.asarray(w_scale).reshape(-1)
        / jnp.asarray(scale).reshape(-1)
    )
    return rounded(
        total.astype(jnp.float32) * by_channel(factor, x),
        jnp.asarray(zero).reshape((1,) * x.ndim),
        zero.dtype,
    )
