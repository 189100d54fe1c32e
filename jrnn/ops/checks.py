"""Checks of shapes, whose errors state the shape given and the shape required, and how errors print arrays."""

import math
from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError


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
