"""Primitives computed by numpy: the functions of `Row.numpy` that numpy lacks, or has under another name.

A rule gets the operands, and the parameters as keywords. It returns None for a case that it leaves to JAX.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrnn.jaxprs.programs import take
from jrnn.jaxprs.queries import other_axes

Array = np.ndarray[Any, np.dtype[Any]]
Evaluate = Callable[..., Any]  # from the operands, and the parameters as keywords
Function = Callable[..., Array]  # of arrays alone
Axes = Sequence[int]

FLOAT = "fcV"  # kinds of types; V is bfloat16
_KINDS = {"any": "biufcV", "real": "iufcV", "float": FLOAT}


def of_kinds(kinds: str) -> Callable[[Function], Evaluate]:
    """Returns the decorator of a function of arrays that computes the same as XLA for some kinds of types."""

    def decorate(function: Function) -> Evaluate:
        def rule(*operands: Array, **_: Any) -> Array | None:
            for operand in operands:
                if operand.dtype.kind not in kinds:
                    return None
            return function(*operands)

        return rule

    return decorate


@functools.cache
def of_numpy(name: str, column: str) -> Evaluate:
    """Returns the rule of a column "kinds" or "kinds name": a function of numpy, by default with the primitive's name."""
    kinds, _, other_name = column.partition(" ")
    home, _, function = (other_name or name).rpartition(".")
    module = importlib.import_module(home or "numpy")  # scipy takes as long to load as JAX
    return of_kinds(_KINDS.get(kinds, kinds))(getattr(module, function))


# Elements ------------------------------------------------------------------------------------------------------------


def same(x: Array, **_: Any) -> Array:
    return x


def each(*operands: Array, **_: Any) -> Sequence[Array]:
    return operands


@of_kinds(FLOAT)
def one_minus_square(x: Array) -> Array:
    return 1 - x * x


@of_kinds(FLOAT)
def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@of_kinds(FLOAT)
def rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


@of_kinds("iufV")
def clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def integer_pow(x: Array, *, y: int) -> Array | None:
    return x**y if x.dtype.kind in FLOAT else None


def select_n(which: Array, *cases: Array) -> Array | None:
    return np.where(which, *cases[::-1]) if which.dtype == bool else None


def convert_element_type(x: Array, *, new_dtype: Any, **_: Any) -> Array | None:
    """XLA has rules of its own for numbers that do not fit, and for the imaginary part."""
    to = np.dtype(new_dtype).kind
    is_of_real = to in FLOAT and x.dtype.kind != "c"
    if to == "c" or is_of_real or x.dtype.kind == "b":
        return x.astype(new_dtype)
    return None


# Moves ---------------------------------------------------------------------------------------------------------------


def broadcast_in_dim(x: Array, *, shape: Axes, broadcast_dimensions: Axes, **_: Any) -> Array:
    inner = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        inner[axis] = size
    return np.broadcast_to(x.reshape(inner), shape)


def reshape(x: Array, *, new_sizes: Axes, dimensions: Axes | None, **_: Any) -> Array | None:
    return x.reshape(new_sizes) if dimensions is None else None


def with_parameter(function: Callable[[Array, Any], Array], name: str) -> Evaluate:
    """Returns the rule of a function of an array and a parameter of the primitive."""

    def rule(x: Array, **params: Any) -> Array:
        return function(x, params[name])

    return rule


def joined(function: Callable[[Sequence[Array], int], Array], name: str) -> Evaluate:
    """Returns the rule of a function of several arrays and of the axis in a parameter."""

    def rule(*operands: Array, **params: Any) -> Array:
        return function(operands, params[name])

    return rule


def unstack(x: Array, *, axis: int) -> Array:
    return np.moveaxis(x, axis, 0)


def split(x: Array, *, sizes: Sequence[int], axis: int) -> Sequence[Array]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def strided_slice(
    x: Array, *, start_indices: Axes, limit_indices: Axes, strides: Axes | None
) -> Array:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))]


def pad(x: Array, value: Array, *, padding_config: Sequence[tuple[int, int, int]]) -> Array | None:
    shape = []
    inner = []
    for size, (low, high, inside) in zip(x.shape, padding_config):
        if low < 0 or high < 0:
            return None
        end = low + size + max(0, size - 1) * inside
        shape.append(end + high)
        inner.append(slice(low, end, inside + 1))
    out = np.full(shape, value, x.dtype)
    out[tuple(inner)] = x
    return out


def iota(*, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> Array:
    others = tuple(other_axes(len(shape), [dimension]))
    return np.broadcast_to(np.expand_dims(np.arange(shape[dimension]), others), shape)


# Sums and products ---------------------------------------------------------------------------------------------------


def dot_general(
    a: Array,
    b: Array,
    *,
    dimension_numbers: Sequence[Sequence[Axes]],
    preferred_element_type: Any,
    **_: Any,
) -> Array:
    dtypes = [a.dtype, b.dtype]
    if preferred_element_type:
        dtypes.append(np.dtype(preferred_element_type))
    # Sums of int8 are computed in int32, and sums of 16-bit numbers in 32 bits.
    dtype = np.result_type(*(np.float32 if of.kind == "V" else of for of in dtypes))
    contracted, batch = dimension_numbers
    left, batch_sizes, rows = _as_matrices(a.astype(dtype), contracted[0], batch[0])
    right, _same, columns = _as_matrices(b.astype(dtype), contracted[1], batch[1])
    return np.reshape(left @ right.swapaxes(-1, -2), (*batch_sizes, *rows, *columns))


def rounded_product(a: Array, b: Array, **_: Any) -> Array:
    """Does not round: programs are compared in exact arithmetic."""
    return a @ np.swapaxes(b, 1, 2)


def _as_matrices(x: Array, over: Axes, batch: Axes) -> tuple[Array, list[int], list[int]]:
    """Returns a matrix [free, contracted] for each index of the batch axes; and the sizes of batch and free axes."""
    free = other_axes(x.ndim, (*over, *batch))
    batch_sizes = take(x.shape, batch)
    free_sizes = take(x.shape, free)
    depth = math.prod(take(x.shape, over))
    moved = x.transpose(*batch, *free, *over)
    return moved.reshape(*batch_sizes, math.prod(free_sizes), depth), batch_sizes, free_sizes


def reduction(function: Function, kinds: str = "biufcV") -> Evaluate:
    """Returns the rule of a reduction of arrays with elements. Those of 16-bit numbers are made in 32 bits."""

    def rule(x: Array, *, axes: Axes, **_: Any) -> Array | None:
        if not x.size or x.dtype.kind not in kinds:
            return None
        if x.dtype.kind == "V":
            x = x.astype(np.float32)
        return function(x, axis=tuple(axes))

    return rule


def cumsum(x: Array, *, axis: int, reverse: bool) -> Array | None:
    if x.dtype.kind == "V":
        return None
    if reverse:
        return np.flip(np.cumsum(np.flip(x, axis), axis), axis)
    return np.cumsum(x, axis)
