"""Values of a step as tiles: arrays with two axes, rows and columns, as TPUs compute with them.

A value may have at most two axes longer than 1. With two, it is a matrix, and its tile is [first, second]. With one, it is a
vector, and its tile is flat, [1, n], or upright, [n, 1], depending on the operations that read it. With none, its tile is
[1, 1].

Kernels read and write booleans as int32, because a TPU's memory does not hold single bits.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.loops.kernels.refused import Refused

FLAT, UPRIGHT, WHOLE = "flat", "upright", "whole"  # a vector as [1, n] or as [n, 1]; anything else


@dataclass(frozen=True)
class MatrixForm:
    """The form of a constant matrix that is an operand of a product."""

    transposed: bool
    dtype: Any


Form = Any  # FLAT, UPRIGHT, WHOLE or a Factor


def long_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes that are longer than 1."""
    return tuple(a for a, n in enumerate(shape) if n != 1)


def tile_shape(shape: Sequence[int], form: Form) -> tuple[int, int]:
    """Returns the shape of the tile of a value in a form."""
    if not all(map(jaxprs.is_known, shape)) or 0 in shape:
        raise Refused(f"a value of the step has the shape {list(shape)}")
    dims = [shape[a] for a in long_axes(shape)]
    if len(dims) > 2:
        raise Refused(f"a value of the step is {list(shape)}, which has more than two axes")
    if len(dims) == 2:
        return (dims[1], dims[0]) if isinstance(form, MatrixForm) and form.transposed else (dims[0], dims[1])
    n = dims[0] if dims else 1
    return (n, 1) if form == UPRIGHT else (1, n)


def memory_dtype(dtype: Any) -> Any:
    """Returns the dtype of a value in a kernel's memory."""
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else jnp.dtype(dtype)


def to_memory(value: Any, shape: Sequence[int], form: Form) -> Any:
    """Converts a value, or a stack of it, [..., *shape], to the tiles that a kernel reads, [..., R, C]."""
    value = jnp.asarray(value)
    lead = value.shape[: value.ndim - len(shape)]
    if isinstance(form, MatrixForm):
        tile = jnp.reshape(value, (*lead, *tile_shape(shape, WHOLE))).astype(form.dtype)
        return jnp.swapaxes(tile, -1, -2) if form.transposed else tile
    return jnp.reshape(value, (*lead, *tile_shape(shape, form))).astype(memory_dtype(value.dtype))


def from_memory(tiles: Any, aval: Any) -> Any:
    """Converts tiles that a kernel wrote, [..., R, C], to the value or the stack of it."""
    value = jnp.reshape(tiles, (*tiles.shape[:-2], *aval.shape))
    return value != 0 if aval.dtype == jnp.bool_ else value


def encoded(tile: Any) -> Any:
    """Converts a tile to its dtype in memory."""
    return lax.select(tile, *(lax.full(tile.shape, n, jnp.int32) for n in (1, 0))) if tile.dtype == jnp.bool_ else tile


def decoded(tile: Any, dtype: Any) -> Any:
    """Converts a tile in memory to this dtype."""
    return tile != 0 if dtype == jnp.bool_ else tile


def spread(tile: Any, shape: tuple[int, int]) -> Any:
    """Broadcasts a tile along axes of length 1."""
    if tile.shape == shape:
        return tile
    return decoded(lax.broadcast_in_dim(encoded(tile), shape, (0, 1)), tile.dtype)


def turned(tile: Any) -> Any:
    """Converts a vector between flat and upright: broadcasts it to a square and takes the diagonal."""
    n = max(tile.shape)
    rows, columns = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    square = widened(spread(encoded(tile), (n, n)))
    kept = lax.select(rows == columns, square, jnp.zeros_like(square))
    sums = jnp.sum(kept, axis=0 if tile.shape[1] == 1 else 1, keepdims=True, dtype=kept.dtype)
    return decoded(sums, jnp.bool_) if tile.dtype == jnp.bool_ else sums.astype(tile.dtype)


def widened(tile: Any) -> Any:
    """Converts narrow floating-point numbers to float32, because not every TPU computes with them."""
    narrow = jnp.issubdtype(tile.dtype, jnp.floating) and tile.dtype.itemsize < 4
    return tile.astype(jnp.float32) if narrow else tile
