"""Fills: blobs made from arguments, constant or random.

A random fill is a function of the run's key: the same key, operator and outputs give the same numbers. They are JAX's
numbers, not Caffe2's.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.ir import Shape
from jrnn.nets.memory import check_size
from jrnn.nets.ops.values import (
    STRING,
    check_integers,
    check_rank,
    describe,
    dtype_of,
    int64,
    need_key,
    raise_if,
    scalar,
    takes,
)
from jrnn.nets.registry import op

_STATIC_SIZE = (
    4096  # elements; integers up to this stay numpy, so that they can be shapes inside jit
)


def _shape(
    *,
    shape: Shape | None = None,
    extra_shape: Shape = (),
    input_as_shape: bool = False,
) -> Callable[..., Shape]:
    """A function of the input (or None) and the dtype of the elements, which returns the shape to fill."""

    def shape_for(x: Any, dtype: Any = np.float32) -> Shape:
        if x is None:
            if extra_shape or input_as_shape:
                raise OpError(
                    "extra_shape and input_as_shape are about an input, and none is given; give shape alone"
                )
            return check_size(shape or (), dtype)
        if shape:
            raise OpError(
                f"has an input and shape {list(shape)}; give one of them (or extra_shape with the input)"
            )
        if not input_as_shape:
            return check_size(x.shape + extra_shape, dtype)
        check_rank(x, 1, "the input, read as a shape,")
        check_integers(x, "the input, read as a shape,")
        return check_size((*np.asarray(x).tolist(), *extra_shape), dtype)

    return shape_for


takes_shape = takes(shape_for=_shape)


def _constant(shape: Shape, value: Any, dtype: Any) -> Any:
    kind = np.dtype(dtype).kind
    if kind in "iu":
        limits = np.iinfo(dtype)
        if value != int(value) or not limits.min <= value <= limits.max:
            raise OpError(
                f"value {value} is not one of {np.dtype(dtype)}; set dtype to a type that holds it"
            )
        value = int(value)
    if kind in "iub" and np.prod(shape) <= _STATIC_SIZE:
        return np.full(shape, value, dtype)
    return jnp.full(shape, value, dtype)


def _value_type(dtype: int | None, value: Any) -> Any:
    """The dtype of a fill: `dtype`, or if it is absent, the type of the value on the wire."""
    if dtype is not None:
        return dtype_of(dtype)
    return int64() if isinstance(value, int) else np.float32


@op("ConstantFill", gradient="stops")
@takes_shape
def constant_fill(
    x=None,
    value_blob=None,
    *,
    shape_for,
    value: int | float | bytes = 0.0,
    dtype: int | None = None,
    op,
):
    wire = op.arg("value", 0.0)  # 3 and 3.0 differ on the wire, and make int64 and float32
    if dtype == STRING:
        text = wire if isinstance(wire, bytes) else b""
        return np.full(shape_for(x, np.uint64), text, object)
    raise_if(
        isinstance(wire, bytes),
        f"value {wire!r} is a string, and dtype is {dtype}; set dtype to {STRING}",
    )
    filled = _value_type(dtype, wire)
    if filled == np.float32 and dtype is None and getattr(x, "dtype", None) == np.float64:
        # The seed of a gradient has the loss's precision: gradients are multiples of it.
        filled = np.float64
    shape = shape_for(x, filled)
    if value_blob is None:
        return _constant(shape, value, filled)
    return jnp.full(shape, scalar(value_blob, "the value to fill in"), filled)


def _given(values: Any, shape: Shape, dtype: Any) -> Any:
    """`values` reshaped: numbers of `dtype`, or byte strings as objects."""
    if np.prod(shape) != len(values):
        raise OpError(
            f"values has {len(values)} elements, and shape {list(shape)} needs {int(np.prod(shape))}"
        )
    if dtype is object:
        array = np.empty(len(values), object)  # numpy's own byte strings would lose NULs at the end
        array[:] = values
        return array.reshape(shape)
    array = np.asarray(values).astype(dtype).reshape(shape)
    return array if array.dtype.kind in "iub" else jnp.asarray(array)


@op("GivenTensorFill", gradient="stops")
@takes_shape
def given_tensor_fill(
    x=None, *, shape_for, values: tuple[bytes, ...] | np.ndarray = (), dtype: int = 1
):
    dims = shape_for(x)
    return _given(values, dims, object if dtype == STRING else dtype_of(dtype))


def _register_given(type: str, dtype: Any) -> None:
    @op(type, gradient="stops")
    @takes_shape
    def given_tensor(x=None, *, shape_for, values: tuple[bytes, ...] | np.ndarray = ()):
        return _given(values, shape_for(x), dtype)


_register_given("GivenTensorInt16Fill", np.int16)
_register_given("GivenTensorIntFill", np.int32)
_register_given("GivenTensorFp16Fill", np.float16)
_register_given("GivenTensorInt64Fill", np.int64)
_register_given("GivenTensorBoolFill", np.bool_)
_register_given("GivenTensorDoubleFill", np.float64)
_register_given("GivenTensorStringFill", object)


@op("GivenTensorByteStringToUInt8Fill", gradient="stops")
@takes_shape
def given_byte_string(x=None, *, shape_for, values: tuple[bytes, ...]):
    dims = shape_for(x)
    data = b"".join(values)[: int(np.prod(dims))]  # compat: bytes beyond the shape are dropped
    return _given(np.frombuffer(data, np.uint8), dims, np.uint8)


@op("DiagonalFill", gradient="stops")
@takes_shape
def diagonal_fill(x=None, *, shape_for, value: int | float = 0.0, dtype: int | None = None, op):
    filled = _value_type(dtype, op.arg("value", 0.0))
    dims = shape_for(x, filled)
    if len(dims) < 2 or (len(dims) > 2 and len(set(dims)) > 1):
        raise OpError(
            f"shape {list(dims)} has no diagonal; it must be a matrix, or have equal dimensions"
        )
    diagonal = np.zeros(dims, filled)
    diagonal[(np.arange(min(dims)),) * len(dims)] = value
    return diagonal if diagonal.dtype.kind in "iub" else jnp.asarray(diagonal)


@op("RangeFill", gradient="stops")
@takes_shape
def range_fill(x=None, *, shape_for):
    dims = shape_for(x)
    return jnp.arange(int(np.prod(dims)), dtype=jnp.float32).reshape(dims)


@op("Range", gradient="stops", dynamic=True)
def range_(start_or_stop, stop=None, step=None):
    given = [x for x in (start_or_stop, stop, step) if x is not None]
    if any(x.size != 1 or x.dtype != given[0].dtype for x in given):
        raise OpError(
            f"inputs are {', '.join(map(describe, given))}; they must be scalars of one type"
        )
    bounds = [np.asarray(x).reshape(()) for x in given]
    start, end = (
        (bounds[0], bounds[1]) if stop is not None else (bounds[0].dtype.type(0), bounds[0])
    )
    by = bounds[2] if step is not None else bounds[0].dtype.type(1)
    raise_if(by == 0, "step is 0; it must not be")
    way = (end - start).item()
    step_size = by.item()
    if given[0].dtype.kind == "f":
        count = math.ceil(way / step_size)
    else:
        count = math.trunc(way / step_size)
        # compat: also for negative steps, which may thus stop a step early
        count += count * step_size < way
    count = max(0, count)
    check_size((count,), given[0].dtype)
    numbers = (start + np.arange(count) * by).astype(given[0].dtype)
    return numbers if numbers.dtype.kind in "iu" else jnp.asarray(numbers)


def _fan(shape: Shape, axis: int) -> int:
    """The number of elements for each index of `axis`."""
    if len(shape) <= axis or 0 in shape:
        raise OpError(
            f"shape {list(shape)} has no fan; it must have at least {axis + 1} dimensions, none of them 0"
        )
    return int(np.prod(shape)) // shape[axis]


@op("XavierFill", gradient="stops", random=True)
@takes_shape
def xavier_fill(x=None, *, shape_for, key):
    dims = shape_for(x)
    bound = (3 / _fan(dims, 0)) ** 0.5
    return jax.random.uniform(need_key(key), dims, jnp.float32, -bound, bound)


@op("MSRAFill", gradient="stops", random=True)
@takes_shape
def msra_fill(x=None, *, shape_for, key):
    dims = shape_for(x)
    return jax.random.normal(need_key(key), dims, jnp.float32) * (2 / _fan(dims, 1)) ** 0.5


@op("GaussianFill", gradient="stops", random=True)
@takes_shape
def gaussian_fill(x=None, *, shape_for, mean: float = 0.0, std: float = 1.0, key):
    raise_if(std < 0, f"std is {std}; it must not be negative")
    dims = shape_for(x)
    return jax.random.normal(need_key(key), dims, jnp.float32) * std + mean


def _bounds(
    low: Any, high: Any, low_blob: Any, high_blob: Any, defaults: tuple[Any, Any]
) -> tuple[Any, Any]:
    """The limits of a uniform distribution, from arguments or from two scalar blobs."""
    if low_blob is None:
        low = defaults[0] if low is None else low
        high = defaults[1] if high is None else high
        raise_if(low >= high, f"min {low} must be below max {high}")
        return low, high
    raise_if(
        low is not None or high is not None,
        "min and max come as blobs and as arguments; give them once",
    )
    raise_if(
        high_blob is None, "the blobs for min and max must both be given and have 1 element each"
    )
    return scalar(low_blob, "min"), scalar(high_blob, "max")


@op("UniformFill", gradient="stops", random=True)
@takes_shape
def uniform_fill(
    x=None,
    min_blob=None,
    max_blob=None,
    *,
    shape_for,
    min: float | None = None,
    max: float | None = None,
    key,
):
    low, high = _bounds(min, max, min_blob, max_blob, (0.0, 1.0))
    dims = shape_for(x)
    return jax.random.uniform(need_key(key), dims, jnp.float32, low, high)


@op("UniformIntFill", gradient="stops", random=True)
@takes_shape
def uniform_int_fill(
    x=None,
    min_blob=None,
    max_blob=None,
    *,
    shape_for,
    min: int | None = None,
    max: int | None = None,
    key,
):
    low, high = _bounds(min, max, min_blob, max_blob, (0, 1))
    dims = shape_for(x)
    # max is among the numbers drawn
    return jax.random.randint(need_key(key), dims, low, high + 1, jnp.int32)


@op("UniqueUniformFill", gradient="stops", random=True)
@takes_shape
def unique_uniform_fill(x=None, avoid=None, *, shape_for, min: int, max: int, dtype: int = 2, key):
    raise_if(dtype not in (2, 10), f"dtype is {dtype}; it must be 2 (INT32) or 10 (INT64)")
    filled = dtype_of(dtype)
    dims = shape_for(x, filled)
    count = int(np.prod(dims))
    raise_if(min > max, f"min {min} must not be above max {max}")
    check_size((max - min + 1,), filled)
    free = np.arange(min, max + 1, dtype=np.int64)
    if avoid is not None:
        free = np.setdiff1d(free, np.asarray(avoid))
    raise_if(
        count > free.size,
        f"{count} different numbers are asked for, and [{min}, {max}] has {free.size} to give",
    )
    return jax.random.choice(need_key(key), jnp.asarray(free, filled), dims, replace=False)
