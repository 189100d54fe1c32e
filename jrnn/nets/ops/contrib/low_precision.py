"""Numbers in half precision, and tables whose rows are stored in 8, 4 or 2 bits a number, with embedding bags over them.

Shapes: data [M, ...] uint8, indices [L], lengths [S] that add up to L -> float32 [S, D]. A *fused* row holds its D numbers,
then its scale and its bias: as two float32 after 8-bit numbers, as two float16 after 4- and 2-bit ones, of which 2 and 4
share a byte, the lowest bits first. A number of a row is `scale * stored + bias`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ops.contrib.segments import bag, gathered
from jrnn.nets.ops.lengths import per_row
from jrnn.nets.ops.matmul import fc
from jrnn.nets.ops.values import as_float, check_rank, check_shape, describe, raise_if
from jrnn.nets.registry import op

_LARGEST_HALF = 65504.0


@op("FloatToHalf", gradient="HalfToFloat(dy)")
def float_to_half(x, *, clip: bool = False, wide=False):
    """float32 -> float16; with `clip`, numbers too large become the largest float16 instead of infinity."""
    raise_if(not wide and x.dtype != np.float32, "it must be float32", x=x)
    x = jnp.clip(x, -_LARGEST_HALF, _LARGEST_HALF) if clip else jnp.asarray(x)
    return x if wide else x.astype(jnp.float16)


@op("HalfToFloat", gradient="FloatToHalf(dy)")
def half_to_float(x, *, wide=False):
    raise_if(not wide and x.dtype != np.float16, "it must be float16", x=x)
    return jnp.asarray(x) if wide else x.astype(jnp.float32)


@op("FbGemmPack", gradient="forbidden")
def pack(w):
    """w in half precision, in which FbFCPacked reads it."""
    return as_float(w, "w").astype(jnp.float16)


op("FbGemmPackTranspose", gradient="forbidden")(lambda w: jnp.swapaxes(pack(w), -1, -2))


@op("FbFCPacked", gradient="forbidden")
def fc_packed(x, w, b, *, axis: int = 1, axis_w: int = 1):
    """y = x w^T + b with w rounded to half precision, and sums in x's precision."""
    half: Any = jnp.asarray(w).astype(jnp.float16)
    return fc(x, half.astype(x.dtype), b, axis=axis, axis_w=axis_w)


def _check_bytes(data: Any) -> None:
    raise_if(data.dtype != np.uint8 or data.ndim < 1, "it must hold bytes (uint8)", data=data)


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)[None, None, :]


def _dequantized(rows: Any, bits: int) -> Any:
    """Fused rows as floats [M, D]."""
    check_rank(rows, 2, "data")
    _check_bytes(rows)
    wide = np.float32 if bits == 8 else np.float16
    tail = 2 * np.dtype(wide).itemsize
    raise_if(
        rows.shape[1] <= tail,
        f"a fused row of {bits} bits a number ends in {tail} bytes",
        data=rows,
    )
    rows = jnp.asarray(rows)
    ends = rows[:, -tail:].reshape(rows.shape[0], 2, tail // 2)
    scale_bias = lax.bitcast_convert_type(ends, wide).astype(jnp.float32)
    packed = rows[:, :-tail]
    parts = (packed[..., None] >> _shifts(bits)) & np.uint8((1 << bits) - 1)
    stored = parts.reshape(packed.shape[0], packed.shape[1] * 8 // bits).astype(jnp.float32)
    return scale_bias[:, :1] * stored + scale_bias[:, 1:]


def _bag(data: Any, weights: Any, indices: Any, lengths: Any, bits: int, mean: bool = False) -> Any:
    check_rank(data, 2, "data")
    _check_bytes(data)
    return bag(_dequantized(gathered(jnp.asarray(data), indices), bits), weights, lengths, mean)


def _register_fused(bits: int) -> None:
    rows = {
        "SparseLengthsSumFused{}BitRowwise": lambda data, indices, lengths: _bag(
            data, None, indices, lengths, bits
        ),
        "SparseLengthsMeanFused{}BitRowwise": lambda data, indices, lengths: _bag(
            data, None, indices, lengths, bits, True
        ),
        "SparseLengthsWeightedSumFused{}BitRowwise": lambda data, weights, indices, lengths: _bag(
            data, weights, indices, lengths, bits
        ),
        "FloatToFused{}BitRowwiseQuantized": lambda x: _fused(x, bits),
        "Fused{}BitRowwiseQuantizedToFloat": lambda x: _dequantized(x, bits),
    }
    for type, fn in rows.items():
        op(type.format(bits), gradient="forbidden")(fn)


for _bits in (8, 4, 2):
    _register_fused(_bits)


def _register_apart(kind: str, mean: bool) -> None:
    """Bags over rows of 8 bits a number whose scales and biases are a blob of their own, [M, 2]."""

    def lookup(data, weights, indices, lengths, scale_bias):
        _check_bytes(data)
        check_shape(scale_bias, (data.shape[0], 2), "scale_bias")
        rows = dequantize_8_bits(
            gathered(jnp.asarray(data), indices), gathered(jnp.asarray(scale_bias), indices)
        )
        return bag(rows, weights, lengths, mean)

    @op(f"SparseLengths{kind}8BitsRowwise", gradient="forbidden")
    def plain(data, indices, lengths, scale_bias):
        return lookup(data, None, indices, lengths, scale_bias)

    op(f"SparseLengthsWeighted{kind}8BitsRowwise", gradient="forbidden")(lookup)


_register_apart("Sum", False)
_register_apart("Mean", True)


def _divisors(number: int, like: Any) -> Any:
    """A number to divide by, as an array: XLA would multiply by the reciprocal of a constant, which rounds differently."""
    return lax.optimization_barrier(jnp.full_like(like, number))


_TINY = np.float32(1e-8)  # added to the range of a row, which may be 0


def _fused(x: Any, bits: int) -> Any:
    """Float rows [M, D] as fused rows of numbers from 0 to 2^bits - 1."""
    check_rank(as_float(x), 2, "x")
    per_byte = 8 // bits
    if x.shape[1] % per_byte or not x.shape[1]:
        raise OpError(
            f"x is {describe(x)}; its rows must have a multiple of {per_byte} numbers, which share bytes"
        )
    x = jnp.asarray(x).astype(jnp.float32)
    low = x.min(1, keepdims=True)
    high = x.max(1, keepdims=True)
    steps = _divisors((1 << bits) - 1, low)
    if bits == 8:
        scale = (high - low) / steps
        bias = low
        stored = jnp.rint((x - low) * (steps / (high - low + _TINY)))
    else:
        bias = low.astype(jnp.float16)
        low = bias.astype(jnp.float32)
        scale = jnp.where(high == low, 1, (high - low) / steps).astype(jnp.float16)
        scale = jnp.where(
            (scale == 0) | jnp.isinf(1 / scale.astype(jnp.float32)), jnp.float16(1), scale
        )
        stored = jnp.clip(jnp.rint((x - low) / scale.astype(jnp.float32)), 0, steps)
    parts = stored.astype(jnp.uint8).reshape(x.shape[0], x.shape[1] // per_byte, per_byte)
    packed = jnp.sum(parts << _shifts(bits), axis=2, dtype=jnp.uint8)
    ends = jnp.concatenate([scale, bias], 1)
    ends = lax.bitcast_convert_type(ends, jnp.uint8).reshape(ends.shape[0], 2 * ends.dtype.itemsize)
    return jnp.concatenate([packed, ends], 1)


@op("FloatToRowwiseQuantized8Bits", outputs=2, gradient="forbidden")
def quantize_8_bits(x):
    """The stored numbers, and the scale and bias of each row [M, 2]."""
    flat = as_float(x).astype(jnp.float32).reshape(x.shape[0], -1)
    low = flat.min(1, keepdims=True)
    high = flat.max(1, keepdims=True)
    scale = jnp.where(high == low, 1, (high - low) / _divisors(255, low))
    factor = np.float32(255) / (high - low + _TINY)
    stored = jnp.rint((flat - low) * factor).astype(jnp.uint8).reshape(x.shape)
    return stored, jnp.concatenate([scale, low], 1)


@op("Rowwise8BitQuantizedToFloat", gradient="forbidden")
def dequantize_8_bits(x, scale_bias):
    check_shape(scale_bias, (x.shape[0], 2), "scale_bias")
    stored = jnp.asarray(x).astype(jnp.float32)
    return per_row(scale_bias[:, 0], stored) * stored + per_row(scale_bias[:, 1], stored)
