"""Tables whose rows are stored in 8, 4 or 2 bits a number, and embedding bags over them.

Shapes: data [M, ...] uint8, indices [L], lengths [S] that add up to L -> float32 [S, D]. A *fused* row holds its D numbers,
then its scale and its bias: as two float32 after 8-bit numbers, as two float16 after 4- and 2-bit ones, of which 2 and 4
share a byte, the lowest bits first. A number of a row is `scale * stored + bias`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.lengths import check_lengths, per_row, segment_ids
from jrnn.ops.values import check_float, check_indices, check_rank, check_shape, describe
from jrnn.registry import op

_TINY = 1e-8  # added to the range of a row, which may be 0


def _check_bytes(data: Any, name: str = "data") -> None:
    check_rank(data, 2, name)
    if data.dtype != np.uint8:
        raise OpError(f"{name} is {describe(data)}; it must hold bytes (uint8)")


def _unfused(rows: Any, bits: int) -> tuple[Any, Any, Any]:
    """Fused rows as stored numbers [M, D] in float32, scales [M, 1] and biases [M, 1]."""
    _check_bytes(rows)
    wide = np.float32 if bits == 8 else np.float16
    tail = 2 * np.dtype(wide).itemsize
    if rows.shape[1] <= tail:
        raise OpError(f"data is {describe(rows)}; a fused row of {bits} bits a number ends in {tail} bytes")
    rows = jnp.asarray(rows)
    ends = rows[:, -tail:].reshape(rows.shape[0], 2, tail // 2)
    scale_bias = lax.bitcast_convert_type(ends, wide).astype(jnp.float32)
    return _unpacked(rows[:, :-tail], bits), scale_bias[:, :1], scale_bias[:, 1:]


def _unpacked(packed: Any, bits: int) -> Any:
    """[M, B] bytes as float32 [M, B * 8 / bits] of numbers of `bits` bits."""
    parts = (packed[..., None] >> _shifts(bits)) & np.uint8((1 << bits) - 1)
    return parts.reshape(packed.shape[0], packed.shape[1] * 8 // bits).astype(jnp.float32)


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)[None, None, :]


def _bag(rows: Any, weights: Any, lengths: Any, mean: bool) -> Any:
    """Rows [L, D], each times its weight, added up over segments; with `mean` divided by their lengths."""
    check_lengths(lengths, rows.shape[0])
    if weights is not None:
        check_shape(weights, (rows.shape[0],), "weights")
        rows = rows * per_row(jnp.asarray(weights), rows)
    total = jax.ops.segment_sum(rows, segment_ids(lengths, rows.shape[0]), lengths.size)
    return total / per_row(jnp.maximum(jnp.asarray(lengths), 1).astype(total.dtype), total) if mean else total


def _gathered(indices: Any, count: int, *parts: Any) -> list[Any]:
    check_rank(indices, 1, "indices")
    check_indices(indices, count)
    return [jnp.take(p, indices, axis=0, mode="clip") for p in parts]


def _fused_bag(data: Any, weights: Any, indices: Any, lengths: Any, bits: int, mean: bool) -> Any:
    _check_bytes(data)
    (rows,) = _gathered(indices, data.shape[0], jnp.asarray(data))
    stored, scale, bias = _unfused(rows, bits)
    return _bag(scale * stored + bias, weights, lengths, mean)


def _register_fused(bits: int, kind: str) -> None:
    @op(f"SparseLengths{kind}Fused{bits}BitRowwise", gradient="forbidden")
    def bag(data, indices, lengths):
        return _fused_bag(data, None, indices, lengths, bits, kind == "Mean")


def _register_weighted(bits: int) -> None:
    @op(f"SparseLengthsWeightedSumFused{bits}BitRowwise", gradient="forbidden")
    def bag(data, weights, indices, lengths):
        return _fused_bag(data, weights, indices, lengths, bits, False)


for _bits in (8, 4, 2):
    _register_fused(_bits, "Sum")
    _register_fused(_bits, "Mean")
    _register_weighted(_bits)


def _apart_bag(data: Any, weights: Any, indices: Any, lengths: Any, scale_bias: Any, mean: bool) -> Any:
    if data.dtype != np.uint8 or data.ndim < 1:
        raise OpError(f"data is {describe(data)}; it must hold bytes (uint8)")
    check_shape(scale_bias, (data.shape[0], 2), "scale_bias")
    stored, ends = _gathered(indices, data.shape[0], jnp.asarray(data), jnp.asarray(scale_bias))
    stored = stored.astype(jnp.float32)
    return _bag(per_row(ends[:, 0], stored) * stored + per_row(ends[:, 1], stored), weights, lengths, mean)


@op("SparseLengthsSum8BitsRowwise", gradient="forbidden")
def sum_8_bits(data, indices, lengths, scale_bias):
    return _apart_bag(data, None, indices, lengths, scale_bias, False)


@op("SparseLengthsMean8BitsRowwise", gradient="forbidden")
def mean_8_bits(data, indices, lengths, scale_bias):
    return _apart_bag(data, None, indices, lengths, scale_bias, True)


@op("SparseLengthsWeightedSum8BitsRowwise", gradient="forbidden")
def weighted_sum_8_bits(data, weights, indices, lengths, scale_bias):
    return _apart_bag(data, weights, indices, lengths, scale_bias, False)


@op("SparseLengthsWeightedMean8BitsRowwise", gradient="forbidden")
def weighted_mean_8_bits(data, weights, indices, lengths, scale_bias):
    return _apart_bag(data, weights, indices, lengths, scale_bias, True)


def _divisors(number: int, like: Any) -> Any:
    """A number to divide by; XLA would multiply by the reciprocal of a single one, which rounds otherwise."""
    return lax.optimization_barrier(jnp.full_like(like, number))


def _fused(x: Any, bits: int) -> Any:
    """Float rows [M, D] as fused ones: numbers from 0 to 2^bits - 1, lowest bits first, then scale and bias."""
    check_float(x, "x")
    check_rank(x, 2, "x")
    per_byte = 8 // bits
    if x.shape[1] % per_byte or not x.shape[1]:
        raise OpError(f"x is {describe(x)}; its rows must have a multiple of {per_byte} numbers, that share bytes")
    x = jnp.asarray(x).astype(jnp.float32)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    steps = _divisors((1 << bits) - 1, low)
    if bits == 8:
        scale, bias = (high - low) / steps, low
        factor = steps / (high - low + np.float32(_TINY))
        stored = jnp.rint((x - low) * factor)
        ends = jnp.concatenate([scale, bias], 1)
    else:
        bias = low.astype(jnp.float16)
        low = bias.astype(jnp.float32)
        scale = jnp.where(high == low, 1, (high - low) / steps).astype(jnp.float16)
        scale = jnp.where((scale == 0) | jnp.isinf(1 / scale.astype(jnp.float32)), jnp.float16(1), scale)
        stored = jnp.clip(jnp.rint((x - low) / scale.astype(jnp.float32)), 0, steps)
        ends = jnp.concatenate([scale, bias], 1)
    parts = stored.astype(jnp.uint8).reshape(x.shape[0], x.shape[1] // per_byte, per_byte)
    packed = jnp.sum(parts << _shifts(bits), axis=2, dtype=jnp.uint8)
    return jnp.concatenate([packed, _bytes(ends)], 1)


def _bytes(ends: Any) -> Any:
    """Scales and biases [M, 2] as the bytes that hold them."""
    return lax.bitcast_convert_type(ends, jnp.uint8).reshape(ends.shape[0], 2 * ends.dtype.itemsize)


def _register_conversions(bits: int) -> None:
    @op(f"FloatToFused{bits}BitRowwiseQuantized", gradient="forbidden")
    def quantize(x):
        return _fused(x, bits)

    @op(f"Fused{bits}BitRowwiseQuantizedToFloat", gradient="forbidden")
    def dequantize(x):
        stored, scale, bias = _unfused(x, bits)
        return scale * stored + bias


for _bits in (8, 4, 2):
    _register_conversions(_bits)


@op("FloatToRowwiseQuantized8Bits", outputs=2, gradient="forbidden")
def quantize_8_bits(x):
    """The stored numbers, and the scale and bias of each row [M, 2]."""
    check_float(x, "x")
    flat = jnp.asarray(x).astype(jnp.float32).reshape(x.shape[0], -1)
    low, high = flat.min(1, keepdims=True), flat.max(1, keepdims=True)
    scale = jnp.where(high == low, 1, (high - low) / _divisors(255, low))
    factor = np.float32(255) / (high - low + np.float32(_TINY))
    stored = jnp.rint((flat - low) * factor).astype(jnp.uint8).reshape(x.shape)
    return stored, jnp.concatenate([scale, low], 1)


@op("Rowwise8BitQuantizedToFloat", gradient="forbidden")
def dequantize_8_bits(x, scale_bias):
    check_shape(scale_bias, (x.shape[0], 2), "scale_bias")
    stored = jnp.asarray(x).astype(jnp.float32)
    return per_row(scale_bias[:, 0], stored) * stored + per_row(scale_bias[:, 1], stored)
