"""Values of a step as tiles: arrays of two axes, rows and columns, with which a TPU computes.

A value may have at most two axes longer than 1. With two of them it is a matrix, and its tile is [first, second]. With one
it is a vector, and its tile is flat, [1, n], or upright, [n, 1]: what it meets decides. With none its tile is [1, 1].

Booleans are int32 where a kernel reads and writes them, because a TPU's memory does not hold single bits.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.executor import jaxprs

FLAT, UPRIGHT, WHOLE = "flat", "upright", "whole"  # a vector as [1, n] or as [n, 1]; anything else


@dataclass(frozen=True)
class Factor:
    """The form of a constant matrix that is a factor of a product: transposed or not, of a data type."""

    transposed: bool
    dtype: Any


Form = Any  # FLAT, UPRIGHT, WHOLE or a Factor


class Refused(Exception):
    """Why a step cannot be computed with tiles."""


def long_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """The axes that are longer than 1."""
    return tuple(a for a, n in enumerate(shape) if n != 1)


def tile_shape(shape: Sequence[int], form: Form) -> tuple[int, int]:
    """The tile of a value of this shape, in one of its forms."""
    if not all(map(jaxprs.is_known, shape)) or 0 in shape:
        raise Refused(f"a value of the step has the shape {list(shape)}")
    dims = [shape[a] for a in long_axes(shape)]
    if len(dims) > 2:
        raise Refused(f"a value of the step is {list(shape)}, which has more than two axes")
    if len(dims) == 2:
        return (dims[1], dims[0]) if isinstance(form, Factor) and form.transposed else (dims[0], dims[1])
    n = dims[0] if dims else 1
    return (n, 1) if form == UPRIGHT else (1, n)


def memory_dtype(dtype: Any) -> Any:
    """The data type in a kernel's memory."""
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else jnp.dtype(dtype)


def to_memory(value: Any, shape: Sequence[int], form: Form) -> Any:
    """What a kernel is given for a value, or a stack of it, [..., *shape]: [..., R, C]."""
    value = jnp.asarray(value)
    lead = value.shape[: value.ndim - len(shape)]
    if isinstance(form, Factor):
        tile = jnp.reshape(value, (*lead, *tile_shape(shape, WHOLE))).astype(form.dtype)
        return jnp.swapaxes(tile, -1, -2) if form.transposed else tile
    return jnp.reshape(value, (*lead, *tile_shape(shape, form))).astype(memory_dtype(value.dtype))


def from_memory(tiles: Any, aval: Any) -> Any:
    """The value, or the stack of it, that a kernel wrote as [..., R, C]."""
    made = jnp.reshape(tiles, (*tiles.shape[:-2], *aval.shape))
    return made != 0 if aval.dtype == jnp.bool_ else made


def encoded(tile: Any) -> Any:
    """A tile as it is in memory."""
    return lax.select(tile, *(lax.full(tile.shape, n, jnp.int32) for n in (1, 0))) if tile.dtype == jnp.bool_ else tile


def decoded(tile: Any, dtype: Any) -> Any:
    """A tile of memory as a value of this data type."""
    return tile != 0 if dtype == jnp.bool_ else tile


def spread(tile: Any, shape: tuple[int, int]) -> Any:
    """A tile repeated along rows or columns of which it has one."""
    if tile.shape == shape:
        return tile
    return decoded(lax.broadcast_in_dim(encoded(tile), shape, (0, 1)), tile.dtype)


def turned(tile: Any) -> Any:
    """A vector in its other form: spread to a square, of which the diagonal is taken."""
    n = max(tile.shape)
    rows, columns = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    square = widened(spread(encoded(tile), (n, n)))
    kept = lax.select(rows == columns, square, jnp.zeros_like(square))
    made = jnp.sum(kept, axis=0 if tile.shape[1] == 1 else 1, keepdims=True, dtype=kept.dtype)
    return decoded(made, jnp.bool_) if tile.dtype == jnp.bool_ else made.astype(tile.dtype)


def widened(tile: Any) -> Any:
    """Narrow floating-point numbers as float32, because not every TPU computes with others."""
    narrow = jnp.issubdtype(tile.dtype, jnp.floating) and tile.dtype.itemsize < 4
    return tile.astype(jnp.float32) if narrow else tile
