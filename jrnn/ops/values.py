"""What operators of every family share: checks of inputs, how errors print arrays, data types, axes, sizes and keys."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.jax_names import is_traced


def describe(x: Any) -> str:
    """`float32[2,3]`, for error messages."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def check_rank(x: Any, rank: int, name: str) -> None:
    """Raises OpError where the array has not this number of dimensions."""
    if len(x.shape) != rank:
        raise OpError(f"{name} is {describe(x)}; it must have {rank} dimension{'s' * (rank != 1)}")


def check_shape(x: Any, shape: tuple[int, ...], name: str) -> None:
    """Raises OpError where the array has not this shape."""
    if x.shape != tuple(shape):
        raise OpError(f"{name} is {describe(x)}; its shape must be {list(shape)}")


def check_float(x: Any, name: str) -> None:
    """Raises OpError where the array does not hold floating-point numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise OpError(f"{name} is {describe(x)}; it must hold floating-point numbers")


def flat_at(x: Any, axis: int) -> Any:
    """`x` as a matrix: the dimensions before `axis`, and those from it."""
    return jnp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


# TensorProto.DataType, the numbers that arguments such as `dtype` hold, but for STRING.
STRING = 4
DTYPES = {
    1: np.float32,
    2: np.int32,
    5: np.bool_,
    6: np.uint8,
    7: np.int8,
    8: np.uint16,
    9: np.int16,
    10: np.int64,
    12: np.float16,
    13: np.float64,
}

STRINGS = "OSU"  # the kinds of numpy's string types, which stay numpy

LARGEST_FILL = 2**31  # bytes; a shape with a slip in it should be an error, not an exhausted machine


def dtype_of(code: int) -> Any:
    """The dtype for a `TensorProto.DataType`, narrowed to 32 bits where JAX's 64-bit types are off.

    Raises OpError for a code without one.

    >>> dtype_of(2)
    dtype('int32')
    """
    if code not in DTYPES:
        choices = ", ".join(f"{c} ({np.dtype(DTYPES[c])})" for c in DTYPES)
        raise OpError(f"data type {code} is not one that it can make; it must be one of {choices}")
    return jax.dtypes.canonicalize_dtype(DTYPES[code])


def int64() -> Any:
    """The dtype of an int64 output: int32 where JAX's 64-bit types are off."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def canonical_axis(axis: int, rank: int, name: str = "axis") -> int:
    """`axis` counted from the front.

    >>> canonical_axis(-1, 3)
    2
    """
    if not -rank <= axis < rank:
        raise OpError(f"{name} {axis} is outside an input of {rank} dimensions; it must be in [{-rank}, {rank})")
    return axis % rank


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be looked at now: it is not being traced."""
    return not is_traced(x)


def check_integers(x: Any, name: str) -> None:
    """Raises OpError unless `x` holds integers."""
    if x.dtype.kind not in "iu":
        raise OpError(f"{name} is {describe(x)}; it must hold integers")


def check_indices(indices: Any, size: int, name: str = "indices") -> None:
    """Raises OpError unless `indices` are integers in [0, size).

    Values can only be checked where they are not traced; there, what an index out of range reads is NaN.
    """
    check_integers(indices, name)
    if not is_concrete(indices):
        return
    found = np.asarray(indices)
    wrong = found[(found < 0) | (found >= size)]
    if wrong.size:
        raise OpError(f"{name} holds {wrong.flat[0]}, which is out of range; it must be in [0, {size})")


def check_same_shape(names: str, *xs: Any) -> None:
    """Raises OpError unless all `xs`, called `names` in the error, have one shape."""
    if any(x.shape != xs[0].shape for x in xs):
        raise OpError(f"{names} are {', '.join(describe(x) for x in xs)}; they must have the same shape")


def check_size(shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """`shape` as a tuple of ints; OpError for a negative dimension or an array above `LARGEST_FILL` bytes.

    >>> check_size(np.array([2, 3]), np.float32)
    (2, 3)
    """
    shape = tuple(int(d) for d in shape)
    if any(d < 0 for d in shape):
        raise OpError(f"shape {list(shape)} has a negative dimension")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > LARGEST_FILL:
        raise OpError(f"shape {list(shape)} takes {size} bytes; an operator fills at most {LARGEST_FILL}")
    return shape


def as_float(x: Any, name: str = "x") -> Any:
    """`x` as an array of floating-point numbers; OpError where it holds anything else."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise OpError(f"{name} is {describe(x)}; it must hold floating-point numbers")
    return jnp.asarray(x)


def magnitude(x: Any) -> Any:
    """The absolute value, with derivative 0 at 0 (that of jnp.abs is 1)."""
    return x * jnp.sign(x)


def need_key(key: Any) -> Any:
    """The key of a random operator; OpError where the run has none."""
    if key is None:
        raise OpError(
            "draws random numbers and has no key; run with key=jax.random.key(0), or set random_seed in its device option"
        )
    return key
