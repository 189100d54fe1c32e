"""Repeating and expanding blobs, and reshapes that keep the order of elements."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.values import STRINGS, canonical_axis, check_integers, check_rank, check_size, describe, flat_at
from jrnn.registry import gradient, op


def _scalar(blob: Any, argument: int | None, name: str) -> int:
    """A number from an input blob, or from the argument where there is none."""
    if blob is not None:
        check_integers(blob, name)
        if blob.shape != (1,):
            raise OpError(f"{name} is {describe(blob)}; it must be a vector with 1 element")
        return int(np.asarray(blob)[0])
    if argument is None:
        raise OpError(f"{name} is missing; give it as an argument or as an input")
    return argument


def _repeats(x: Any, tiles: int | None, axis: int | None, tiles_blob: Any, axis_blob: Any) -> tuple[int, int]:
    """How often to repeat, and along which axis."""
    count = _scalar(tiles_blob, tiles, "tiles")
    if count < 0:
        raise OpError(f"tiles is {count}; it must not be negative")
    return count, canonical_axis(_scalar(axis_blob, axis, "axis"), x.ndim)


def _tiled(x: Any, repeats: tuple[int, ...]) -> Any:
    check_size([size * times for size, times in zip(x.shape, repeats)], x.dtype)
    return np.tile(x, repeats) if x.dtype.kind in STRINGS else jnp.tile(x, repeats)


@op("Tile", gradient="TileGradient(dy, tiles_blob, axis_blob)")
def tile(x, tiles_blob=None, axis_blob=None, *, tiles: int | None = None, axis: int | None = None):
    count, over = _repeats(x, tiles, axis, tiles_blob, axis_blob)
    return _tiled(x, tuple(count if k == over else 1 for k in range(x.ndim)))


@op("TileGradient")
def tile_gradient(dy, tiles_blob=None, axis_blob=None, *, tiles: int | None = None, axis: int | None = None):
    count, over = _repeats(dy, tiles, axis, tiles_blob, axis_blob)
    if count == 0 or dy.shape[over] % count:
        raise OpError(f"the gradient is {describe(dy)}; axis {over} is no multiple of tiles {count}")
    parts = jnp.reshape(dy, (*dy.shape[:over], count, dy.shape[over] // count, *dy.shape[over + 1 :]))
    return jnp.sum(parts, over, dtype=dy.dtype)


@op("NumpyTile")
def numpy_tile(x, repeats):
    check_integers(repeats, "repeats")
    if repeats.size != x.ndim:
        raise OpError(f"repeats is {describe(repeats)} and x is {describe(x)}; each dimension needs one number")
    counts = tuple(np.ravel(np.asarray(repeats)).tolist())
    if min(counts, default=0) < 0:
        raise OpError(f"repeats are {list(counts)}; they must not be negative")
    return _tiled(x, counts)


@op("Expand", gradient="ExpandGradient(dy, x)")
def expand(x, shape):
    """Broadcasts `x` and an array of the given shape to each other; -1 stands for the dimension of x."""
    check_integers(shape, "shape")
    check_rank(shape, 1, "shape")
    wanted = np.asarray(shape).tolist()
    rank = max(x.ndim, len(wanted))
    old = (1,) * (rank - x.ndim) + x.shape
    new = [size if asked in (-1, 1) else asked for asked, size in zip([1] * (rank - len(wanted)) + wanted, old)]
    if any(size not in (1, asked) for asked, size in zip(new, old)):
        raise OpError(f"x is {describe(x)} and shape is {wanted}; dimensions must be equal, or one of them 1")
    return jnp.broadcast_to(x, check_size(new, x.dtype))


@op("ExpandGradient")
def expand_gradient(dy, x):
    old = (1,) * (dy.ndim - x.ndim) + x.shape
    axes = tuple(k for k, (big, small) in enumerate(zip(dy.shape, old)) if small == 1 and big != 1)
    return jnp.reshape(jnp.sum(dy, axes, dtype=dy.dtype), x.shape)


@op("Flatten", gradient="ResizeLike(dy, x)")
def flatten(x, *, axis: int = 1):
    if not 0 <= axis <= x.ndim:
        raise OpError(f"argument 'axis' is {axis} and x is {describe(x)}; it must be in [0, {x.ndim}]")
    return np.reshape(x, (math.prod(x.shape[:axis]), -1)) if x.dtype.kind in STRINGS else flat_at(x, axis)


@op("FlattenToVec", gradient="ResizeLike(dy, x)")
def flatten_to_vec(x):
    if x.ndim == 0:
        raise OpError("x is a scalar; it must have at least 1 dimension")
    return x.reshape(x.size)


@op("PrependDim", inplace={0: 0})
def prepend_dim(x, *, dim_size: int):
    """[K * N, ...] -> [K, N, ...] for dim_size K."""
    if x.ndim == 0 or dim_size <= 0 or x.shape[0] % dim_size:
        raise OpError(f"x is {describe(x)}; argument 'dim_size', {dim_size}, must divide its first dimension")
    return x.reshape(dim_size, x.shape[0] // dim_size, *x.shape[1:])


@gradient("PrependDim")
def _(g):
    g.emit("MergeDim", [g.grad_output(0)], [g.grad_input(0)], copy_args=False)


@op("MergeDim", inplace={0: 0})
def merge_dim(x):
    """[K, N, ...] -> [K * N, ...]."""
    if x.ndim < 2:
        raise OpError(f"x is {describe(x)}; it must have at least 2 dimensions")
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


@op("Size", gradient="stops")
def size(x):
    return np.asarray(x.size, np.int64)


@op("IsEmpty", gradient="forbidden")
def is_empty(x):
    return np.asarray(x.size == 0)


@op("HasElements", gradient="forbidden")
def has_elements(*xs):
    return np.asarray(any(x.size > 0 for x in xs))
