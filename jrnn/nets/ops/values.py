"""What all operators share: checks of inputs, how errors print arrays, data types, axes, sizes, keys, and arguments."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.errors import describe_value as describe
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.ir import Shape

# TensorProto.DataType: the numbers that arguments such as `dtype` hold. STRING has no dtype.
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


def raise_if(wrong: Any, rule: str, /, **arrays: Any) -> None:
    """Raises OpError where `wrong` holds. The error names the arrays: `x=x` begins it with "x is float32[2,3]; "."""
    if wrong:
        given = " and ".join(f"{name} is {describe(x)}" for name, x in arrays.items())
        raise OpError(f"{given}; {rule}" if given else rule)


def check_rank(x: Any, rank: int, name: str) -> None:
    """Raises OpError unless `x` has `rank` dimensions."""
    raise_if(len(x.shape) != rank, f"it must have {rank} dimension{'s' * (rank != 1)}", **{name: x})


def check_shape(x: Any, shape: Shape, name: str) -> None:
    """Raises OpError unless `x` has this shape."""
    raise_if(x.shape != tuple(shape), f"its shape must be {list(shape)}", **{name: x})


def check_same_shape(names: str, *xs: Any) -> None:
    """Raises OpError unless all `xs`, called `names` in the error, have one shape."""
    if any(x.shape != xs[0].shape for x in xs):
        raise OpError(f"{names} are {', '.join(map(describe, xs))}; they must have the same shape")


def check_float(x: Any, name: str) -> None:
    """Raises OpError unless `x` holds floating-point numbers."""
    raise_if(
        not is_floating(x),
        "it must hold floating-point numbers",
        **{name: x},
    )


def as_float(x: Any, name: str = "x") -> Any:
    """`x` as a JAX array; OpError unless it holds floating-point numbers."""
    check_float(x, name)
    return jnp.asarray(x)


def check_integers(x: Any, name: str) -> None:
    """Raises OpError unless `x` holds integers."""
    raise_if(x.dtype.kind not in "iu", "it must hold integers", **{name: x})


def check_indices(indices: Any, size: int, name: str = "indices") -> None:
    """Raises OpError unless `indices` are integers in [0, size).

    Values can only be checked where they are not traced; a traced index out of range reads NaN.
    """
    check_integers(indices, name)
    if is_concrete(indices):
        numbers = np.asarray(indices)
        wrong = numbers[(numbers < 0) | (numbers >= size)]
        if wrong.size:
            raise OpError(
                f"{name} holds {wrong.flat[0]}, which is out of range; it must be in [0, {size})"
            )


def scalar(x: Any, name: str) -> Any:
    """A blob of one element as a scalar; OpError where it has more."""
    raise_if(x.size != 1, "it must have 1 element", **{name: x})
    return jnp.reshape(x, ())


def known_integer(x: Any, name: str) -> int:
    """A blob of one integer as an int, for operators whose output's shape depends on it; it must not be traced."""
    check_integers(x, name)
    raise_if(x.size != 1, "it must have 1 element", **{name: x})
    return int(np.asarray(x).reshape(()))


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` are known now: it is not being traced."""
    return not is_traced(x)


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
        raise OpError(
            f"{name} {axis} is outside an input of {rank} dimensions; it must be in [{-rank}, {rank})"
        )
    return axis % rank


def flat_at(x: Any, axis: int) -> Any:
    """`x` as a matrix: the dimensions before `axis` are its rows, the others its columns."""
    return jnp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def magnitude(x: Any) -> Any:
    """The absolute value, with derivative 0 at 0 (the derivative of jnp.abs is 1)."""
    return x * jnp.sign(x)


def need_key(key: Any) -> Any:
    """The key of a random operator; OpError where the run has none."""
    if key is None:
        raise OpError(
            "draws random numbers and has no key; run with key=jax.random.key(0), or set random_seed in its device option"
        )
    return key


def takes(**makers: Callable) -> Callable[[Callable], Callable]:
    """Replaces keyword-only parameters of an operator's function by the Arguments from which they are made.

    Each maker is a function of keyword-only parameters. With `@takes(window=make_window)`, the operator has the Arguments of
    `make_window` in place of `window`, and its function is called with `window=make_window(...)`.
    """
    arguments = {}
    for name, make in makers.items():
        arguments[name] = inspect.signature(make, eval_str=True).parameters

    def register(fn: Callable) -> Callable:
        own = inspect.signature(fn, eval_str=True).parameters.values()

        @functools.wraps(fn)
        def call(*blobs: Any, **args: Any) -> Any:
            for name, make in makers.items():
                given = {k: args.pop(k) for k in arguments[name] if k in args}
                args[name] = make(**given)
            return fn(*blobs, **args)

        signature = [p for p in own if p.name not in makers]
        for parameters in arguments.values():
            signature += parameters.values()
        call.__signature__ = inspect.Signature(signature)  # type: ignore
        return call

    return register
