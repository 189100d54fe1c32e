"""Tensors of 8-bit numbers with one scale and one zero point, as in Caffe2's Int8 operators: elements, shapes, layers.

A stored number q stands for `scale * (q - zero_point)`. Plain floats are accepted as inputs; only Int8Quantize and the
outputs of operators are quantized.

Shapes: N batch, C channels, M outputs. Images are [N, H, W, C] (order NHWC), filters [M, kernel, C / group], biases [M].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.memory import check_size
from jrnn.nets.ops.contrib.conv import conv
from jrnn.nets.ops.contrib.image import scale_factors, stretched
from jrnn.nets.ops.contrib.pool import average_pool, max_pool
from jrnn.nets.ops.contrib.window import Window, takes_window
from jrnn.nets.ops.values import canonical_axis, check_float, describe, flat_at, raise_if, takes
from jrnn.nets.registry import op


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["scale", "zero_point"]
)
@dataclass(frozen=True)
class Int8Tensor:
    """Stored numbers: uint8, or int32 for biases. `np.asarray` returns the numbers that they represent."""

    stored: Any
    scale: float
    zero_point: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return (np.asarray(self.stored).astype(np.float32) - self.zero_point) * np.float32(
            self.scale
        )

    def like(self, stored: Any) -> Int8Tensor:
        """Other stored numbers with the same scale and zero point."""
        return Int8Tensor(stored, self.scale, self.zero_point)


def centered(x: Int8Tensor, dtype: Any = jnp.int32) -> Any:
    """Stored numbers without the zero point."""
    return jnp.asarray(x.stored).astype(dtype) - np.asarray(x.zero_point, dtype)


def real(x: Any) -> Any:
    """The numbers that a blob represents, as floats."""
    return (
        centered(x, jnp.float32) * np.float32(x.scale)
        if isinstance(x, Int8Tensor)
        else jnp.asarray(x)
    )


def need_int8(x: Any, name: str) -> Int8Tensor:
    if not isinstance(x, Int8Tensor):
        raise OpError(f"{name} is {describe(x)}; it must be quantized, as by Int8Quantize")
    return x


def away_from_zero(x: Any) -> Any:
    """Rounds to integers, halves away from zero."""
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def quantized(steps: Any, scale: float, zero_point: int, relu: bool = False) -> Int8Tensor:
    """Quantizes numbers given in whole steps of the scale: adds the zero point and clips to uint8, or with `relu` at 0."""
    stored = jnp.clip(steps + zero_point, zero_point if relu else 0, 255).astype(jnp.uint8)
    return Int8Tensor(stored, scale, zero_point)


def check_scale(scale: float, zero_point: int) -> None:
    if not scale > 0 or not 0 <= zero_point <= 255:
        raise OpError(
            f"Y_scale {scale} must be positive, and Y_zero_point {zero_point} within 0 and 255"
        )


def _kept(
    *, Y_scale: float | None = None, Y_zero_point: int | None = None
) -> Callable[[Any], Int8Tensor]:
    """A check for operators that keep scale and zero point: their arguments must equal the input's, or both be absent."""

    def checked(x: Any) -> Int8Tensor:
        x = need_int8(x, "x")
        if (Y_scale, Y_zero_point) not in ((None, None), (x.scale, x.zero_point)):
            raise OpError(
                f"Y_scale {Y_scale} and Y_zero_point {Y_zero_point} must be those of its input, {x.scale} and "
                f"{x.zero_point}: it does not change the numbers"
            )
        return x

    return checked


@op("Int8Quantize", gradient="forbidden")
def quantize(x, *, Y_scale: float = 1.0, Y_zero_point: int = 0):
    check_float(x, "x")
    check_scale(Y_scale, Y_zero_point)
    steps = jnp.rint(jnp.asarray(x).astype(jnp.float32) * (np.float32(1) / np.float32(Y_scale)))
    return quantized(steps, Y_scale, Y_zero_point)


op("Int8Dequantize", gradient="forbidden")(lambda x: real(need_int8(x, "x")))


@op("Int8GivenTensorFill", gradient="forbidden")
def given_tensor_fill(
    *, values: bytes, shape: tuple[int, ...], Y_scale: float = 1.0, Y_zero_point: int = 0
):
    """`values` holds one byte a number."""
    return _given(np.frombuffer(values, np.uint8), shape, Y_scale, Y_zero_point)


@op("Int8GivenIntTensorFill", gradient="forbidden")
def given_int_tensor_fill(
    *, values: np.ndarray, shape: tuple[int, ...], Y_scale: float = 1.0, Y_zero_point: int = 0
):
    """Numbers of 32 bits: biases."""
    return _given(values.astype(np.int32), shape, Y_scale, Y_zero_point)


def _given(values: np.ndarray, shape: tuple[int, ...], scale: float, zero_point: int) -> Int8Tensor:
    shape = check_size(shape, values.dtype)
    if int(np.prod(shape)) != values.size:
        raise OpError(
            f"values has {values.size} elements, and shape {list(shape)} needs {int(np.prod(shape))}"
        )
    raise_if(not scale > 0, f"Y_scale {scale} must be positive")
    return Int8Tensor(jnp.asarray(values.reshape(shape)), scale, zero_point)


def _register_sum(type: str, relu: bool) -> None:
    @op(type, gradient="forbidden", inplace={0: 0})
    def add(a, b, *, Y_scale: float = 1.0, Y_zero_point: int = 0):
        check_scale(Y_scale, Y_zero_point)
        if a.shape != b.shape:
            raise OpError(
                f"its inputs are {describe(a)} and {describe(b)}; they must have the same shape"
            )
        parts = [
            centered(x, jnp.float32) * (np.float32(x.scale) / np.float32(Y_scale))
            if isinstance(x, Int8Tensor)
            else jnp.asarray(x) / np.float32(Y_scale)
            for x in (a, b)
        ]
        return quantized(away_from_zero(parts[0] + parts[1]), Y_scale, Y_zero_point, relu)


for _type in ("Int8Sum", "Int8Add"):
    _register_sum(_type, False)
    _register_sum(_type + "Relu", True)


@op("Int8Relu", gradient="forbidden", inplace={0: 0})
@takes(kept=_kept)
def relu(x, *, kept):
    x = kept(x)
    return x.like(jnp.maximum(x.stored, jnp.uint8(x.zero_point)))


@op("Int8Softmax", gradient="forbidden")
def softmax(x, *, axis: int = 1, Y_scale: float = 1.0, Y_zero_point: int = 0):
    """Over all but the first dimension, with exponentials from a table of integers, in steps of 1/256."""
    x = need_int8(x, "x")
    if (Y_scale, Y_zero_point) != (1 / 256, 0):
        raise OpError(f"Y_scale {Y_scale} and Y_zero_point {Y_zero_point} must be 1/256 and 0")
    raise_if(canonical_axis(axis, x.ndim) != 1, f"axis is {axis}; it must be 1")
    flat = jnp.asarray(x.stored).reshape(x.shape[0], -1).astype(jnp.int32)
    largest = min(
        (2**32 - 1) / flat.shape[1], 2.0**23 - 1
    )  # so that the sum of a row fits in 32 bits
    table = np.rint(
        largest * np.exp((np.arange(256) - 255) * np.float64(np.float32(x.scale)))
    ).astype(np.uint32)
    exponentials = jnp.asarray(table)[flat - flat.max(1, keepdims=True) + 255]
    total = exponentials.sum(1, keepdims=True, dtype=jnp.uint32)
    stored = jnp.minimum((exponentials * np.uint32(256) + total // np.uint32(2)) // total, 255)
    return Int8Tensor(stored.astype(jnp.uint8).reshape(x.shape), Y_scale, 0)


@op("Int8Flatten", gradient="forbidden")
@takes(kept=_kept)
def flatten(x, *, kept, axis: int = 1):
    x = kept(x)
    raise_if(not 0 <= axis <= x.ndim, f"axis {axis} must be within 0 and {x.ndim}")
    return x.like(flat_at(x.stored, axis))


@op("Int8Reshape", outputs=2, gradient="forbidden")
@takes(kept=_kept)
def reshape(x, *, kept, shape: tuple[int, ...]):
    """0 keeps a dimension, -1 takes the rest. The second output is the old shape."""
    x = kept(x)
    wanted = [x.shape[k] if d == 0 and k < x.ndim else d for k, d in enumerate(shape)]
    return x.like(jnp.reshape(x.stored, wanted)), np.array(x.shape, np.int64)


@op("Int8Transpose", gradient="forbidden")
@takes(kept=_kept)
def transpose(x, *, kept, axes: tuple[int, ...] = ()):
    x = kept(x)
    return x.like(jnp.transpose(x.stored, axes or None))


@op("Int8Slice", gradient="forbidden")
@takes(kept=_kept)
def slice_(x, *, kept, starts: tuple[int, ...], ends: tuple[int, ...]):
    """Ends below 0 count from one past the last element."""
    x = kept(x)
    stops = [e if e >= 0 else x.shape[k] + 1 + e for k, e in enumerate(ends)]
    return x.like(x.stored[tuple(map(slice, starts, stops))])


@op("Int8Concat", outputs=(1, 2), gradient="forbidden")
def concat(
    *xs, axis: int = 1, order: str | None = None, Y_scale: float = 1.0, Y_zero_point: int = 0
):
    """Along `axis`, or with `order` along channels, which come last. All inputs have the scale of the result."""
    tensors = [_kept(Y_scale=Y_scale, Y_zero_point=Y_zero_point)(x) for x in xs]
    along = tensors[0].ndim - 1 if order is not None else canonical_axis(axis, tensors[0].ndim)
    joined = jnp.concatenate([x.stored for x in tensors], along)
    return tensors[0].like(joined), np.array([x.shape[along] for x in tensors], np.int32)


def _requantized(
    total: Any, x: Any, w: Any, bias: Any, scale: float, zero_point: int, relu: bool, floats: bool
) -> Any:
    """Quantizes a sum of products, which float64 holds exactly, after adding the bias; with `floats` leaves it in floats."""
    # what 1 in `total` represents
    unit = np.float32(getattr(x, "scale", 1.0)) * np.float32(getattr(w, "scale", 1.0))
    if bias is not None:
        own = _whole(bias) if isinstance(bias, Int8Tensor) else _whole(bias) / np.float64(unit)
        total = total + jnp.expand_dims(own, tuple(range(total.ndim - 1)))
    if floats:
        return (total * np.float64(unit)).astype(jnp.float32)
    check_scale(scale, zero_point)
    factor = float(unit / np.float32(scale))
    if factor < 1 and isinstance(x, Int8Tensor) and isinstance(w, Int8Tensor):
        fraction, exponent = math.frexp(factor)
        # compat: QNNPACK rounds the product with the fraction first, then the shift by the exponent
        return quantized(
            away_from_zero(jnp.floor(total * fraction + 0.5) * 2.0**exponent),
            scale,
            zero_point,
            relu,
        )
    return quantized(away_from_zero(total * factor), scale, zero_point, relu)


def _whole(x: Any) -> Any:
    """Stored numbers without the zero point, or floats, in float64, which keeps integers exact."""
    return (
        centered(x).astype(jnp.float64)
        if isinstance(x, Int8Tensor)
        else jnp.asarray(x).astype(jnp.float64)
    )


@op("Int8FC", gradient="forbidden")
def fc(
    x,
    w,
    b,
    *,
    axis: int = 1,
    Y_scale: float = 1.0,
    Y_zero_point: int = 0,
    dequantize_output: bool = False,
):
    """y = x w^T + b, with x flattened from `axis` on; as floats with `dequantize_output`."""
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


def _check_order(window: Window) -> None:
    raise_if(not window.channels_last, "order is NCHW; Int8 operators take order NHWC")


def _register_convolution(type: str, relu: bool) -> None:
    @op(type, gradient="forbidden")
    @takes_window
    def convolution(
        x, filter, bias=None, *, window, group: int = 1, Y_scale: float = 1.0, Y_zero_point: int = 0
    ):
        _check_order(window)
        with jax.enable_x64(True):
            total = conv(_whole(x), _whole(filter), window=window, group=group)
            if bias is not None and bias.shape != total.shape[-1:]:
                raise OpError(f"bias is {describe(bias)}; its shape must be [{total.shape[-1]}]")
            return _requantized(total, x, filter, bias, Y_scale, Y_zero_point, relu, False)


_register_convolution("Int8Conv", False)
_register_convolution("Int8ConvRelu", True)


def _register_pools(suffix: str, relu: bool) -> None:
    @op("Int8AveragePool" + suffix, gradient="forbidden")
    @takes_window
    def average(x, *, window, Y_scale: float = 1.0, Y_zero_point: int = 0):
        x = need_int8(x, "x")
        check_scale(Y_scale, Y_zero_point)
        _check_order(window)
        mean = average_pool(
            centered(x, jnp.float32), window=window, count_include_pad=True
        )  # compat: padding represents 0
        steps = away_from_zero(mean * (np.float32(x.scale) / np.float32(Y_scale)))
        return quantized(steps, Y_scale, Y_zero_point, relu)

    @op("Int8MaxPool" + suffix, gradient="forbidden")
    @takes_window
    def maximum(x, *, window, Y_scale: float = 1.0, Y_zero_point: int = 0):
        x = _kept(Y_scale=Y_scale, Y_zero_point=Y_zero_point)(x)
        _check_order(window)
        greatest = max_pool(centered(x, jnp.float32), window=window)
        return quantized(greatest, x.scale, x.zero_point, relu)


_register_pools("", False)
_register_pools("Relu", True)


@op("Int8ResizeNearest", gradient="forbidden")
def resize_nearest(
    x,
    *,
    width_scale: float = 1.0,
    height_scale: float = 1.0,
    Y_scale: float = 1.0,
    Y_zero_point: int = 0,
):
    x = _kept(Y_scale=Y_scale, Y_zero_point=Y_zero_point)(x)
    return x.like(
        stretched(jnp.asarray(x.stored), scale_factors(None, (height_scale, width_scale)), (1, 2))
    )
