"""Operators on shapes: reshaping, transposing, slicing, concatenating and splitting, repeating and expanding."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ir import Ints, Shape
from jrnn.nets.memory import check_size
from jrnn.nets.ops.broadcast_arithmetic import collect
from jrnn.nets.ops.values import (
    STRINGS,
    canonical_axis,
    check_integers,
    check_rank,
    describe,
    flat_at,
    raise_if,
)
from jrnn.nets.registry import gradient, op


@op("Reshape", outputs=2, inplace={0: 0})
def reshape(x, new_shape=None, *, shape: Shape | None = None):
    """x in another shape, in which 0 keeps a dimension and one -1 is inferred; and the old shape."""
    if (new_shape is None) == (shape is None):
        raise OpError(
            "takes the new shape either as input 1 or as argument 'shape'; give one of them"
        )
    wanted = shape or ()
    if new_shape is not None:
        wanted = tuple(map(int, np.asarray(new_shape).reshape(-1)))
    size = math.prod(x.shape)
    # In an empty array 0 is an ordinary size, so that a gradient can get its old shape back.
    sizes = [x.shape[k] if d == 0 and size and k < x.ndim else d for k, d in enumerate(wanted)]
    if sizes.count(-1) == 1:
        rest = math.prod(d for d in sizes if d != -1)
        sizes[sizes.index(-1)] = size // rest if rest > 0 else 0
    if min(sizes, default=0) < 0 or math.prod(sizes) != size:
        raise OpError(
            f"x is {describe(x)}, {size} elements, which do not take shape {list(wanted)}; its product must be {size}, and "
            "one dimension may be -1"
        )
    is_int32 = new_shape is not None and new_shape.dtype == np.int32
    old = np.array(x.shape, np.int32 if is_int32 else np.int64)
    return jnp.reshape(x, sizes), old


@gradient("Reshape")
def _(g):
    g.emit(
        "Reshape",
        [g.grad_output(0), g.output(1)],
        [g.grad_input(0), f"_{g.op.inputs[0]}_grad_dims"],
        copy_args=False,
    )


def _dims(dims):
    raise_if(
        not dims or min(dims) < 0,
        f"argument 'dims' is {list(dims)}; it must list dimensions, counted from 0",
    )
    return sorted(set(dims))


@op("Squeeze", inplace={0: 0}, gradient="ExpandDims(dy)")
def squeeze(x, *, dims: Shape):
    axes = _dims(dims)
    if axes[-1] >= x.ndim or any(x.shape[d] != 1 for d in axes):
        raise OpError(f"x is {describe(x)}; it must have size 1 in each of the dimensions {axes}")
    return jnp.squeeze(x, tuple(axes))


@op("ExpandDims", inplace={0: 0}, gradient="Squeeze(dy)")
def expand_dims(x, *, dims: Shape):
    """x with dimensions of size 1 inserted at `dims` of the result."""
    axes = _dims(dims)
    if axes[-1] >= x.ndim + len(axes):
        raise OpError(
            f"x is {describe(x)}; with {len(axes)} more dimensions it has no dimension {axes[-1]}"
        )
    return jnp.expand_dims(x, tuple(axes))


@op("Transpose")
def transpose(x, *, axes: Ints = ()):
    """Dimension k of the result is dimension axes[k] of x; without `axes`, all are reversed."""
    axes = axes or tuple(reversed(range(x.ndim)))
    raise_if(
        sorted(axes) != list(range(x.ndim)),
        f"axes {list(axes)} must be a permutation of 0..{x.ndim - 1}",
        x=x,
    )
    return jnp.transpose(x, axes)


@gradient("Transpose")
def _(g):
    axes = g.arg("axes", ())
    inverse = np.argsort(axes) if len(axes) else None
    g.emit("Transpose", [g.grad_output(0)], [g.grad_input(0)], axes=inverse)


def _bounds(x, starts, ends, starts_blob, ends_blob):
    """(start, end) of every dimension. A negative number n means size + 1 + n, so that -1 is the end."""
    if (starts_blob is None) == (starts is None) or (ends_blob is None) == (ends is None):
        raise OpError(
            "takes starts and ends as inputs 1 and 2, or as arguments 'starts' and 'ends'; give one of them"
        )
    if starts_blob is not None:
        starts = np.asarray(starts_blob).reshape(-1).tolist()
        ends = np.asarray(ends_blob).reshape(-1).tolist()
    if len(starts) != len(ends) or len(starts) > x.ndim:
        raise OpError(
            f"x is {describe(x)}; starts {list(starts)} and ends {list(ends)} must pair, at most {x.ndim}"
        )
    bounds = [(0, size) for size in x.shape]
    for k, (start, end) in enumerate(zip(starts, ends)):
        size = x.shape[k]
        start = _bound(start, size)
        end = _bound(end, size)
        if size and not 0 <= start <= end:
            raise OpError(
                f"x is {describe(x)}: {list(starts)} to {list(ends)} leave nothing of dimension {k}"
            )
        bounds[k] = (start, end) if size else (0, 0)
    return bounds


def _bound(number: int, size: int) -> int:
    """A bound within a dimension, counted from the end if it is negative."""
    if number < 0:
        number += size + 1
    return min(number, size)


@op("Slice", gradient="SliceGradient(*, dy)")
def slice_(
    x,
    starts_blob=None,
    ends_blob=None,
    *,
    starts: Ints | None = None,
    ends: Ints | None = None,
):
    bounds = _bounds(x, starts, ends, starts_blob, ends_blob)
    return jnp.asarray(x)[tuple(slice(start, end) for start, end in bounds)]


@op("SliceGradient")
def slice_gradient(x, *more, starts: Ints | None = None, ends: Ints | None = None):
    """dy among zeros. Reads (x, dy), or (x, starts, ends, dy)."""
    *blobs, dy = more
    bounds = _bounds(x, starts, ends, *(blobs or (None, None)))
    pads = [(start, size - end, 0) for (start, end), size in zip(bounds, x.shape)]
    return lax.pad(dy, jnp.zeros((), dy.dtype), pads)


@op("Shape", gradient="forbidden")
def shape(x, *, axes: Ints = ()):
    """The shape of x, or the sizes of some of its dimensions, as int64."""
    for axis in axes:
        raise_if(
            not 0 <= axis < x.ndim, f"axes {list(axes)} must be dimensions 0..{x.ndim - 1}", x=x
        )
    return np.array([x.shape[k] for k in axes] if axes else x.shape, np.int64)


@op("ResizeLike", gradient="forbidden")
def resize_like(x, like):
    if math.prod(x.shape) != math.prod(like.shape):
        raise OpError(
            f"x is {describe(x)} and the other {describe(like)}; they must have the same number of elements"
        )
    return jnp.reshape(x, like.shape)


def _axis(axis, order, rank):
    """`axis`, or the axis of channels in `order`; by default the channels of NCHW."""
    if axis is not None and order is not None:
        raise OpError(f"was given both axis {axis} and order {order!r}; give one of them")
    if axis is None:
        raise_if(
            order not in (None, "NCHW", "NHWC"),
            f"argument 'order' is {order!r}; it must be 'NCHW' or 'NHWC'",
        )
        axis = 3 if order == "NHWC" else 1
    return canonical_axis(axis, rank)


@op("Concat", outputs=2, gradient="Split(dy, y1) -> *")
def concat(x, *xs, axis: int | None = None, order: str | None = None, add_axis: bool = False):
    """Concatenates along `axis`, or stacks along a new axis; also returns the size of each input along it."""
    xs = (x, *xs)
    axis = _axis(axis, order, x.ndim + add_axis)
    for k, other in enumerate(xs):
        same = [d for d in range(other.ndim) if add_axis or d != axis]
        if other.ndim != x.ndim or any(other.shape[d] != x.shape[d] for d in same):
            where = "" if add_axis else f" except along axis {axis}"
            raise OpError(
                f"input {k} is {describe(other)} and input 0 is {describe(x)}; shapes must be equal{where}"
            )
        if other.dtype.kind != x.dtype.kind:
            raise OpError(
                f"input {k} is {describe(other)} and input 0 is {describe(x)}; data types must be equal"
            )
    if add_axis:
        return jnp.stack(xs, axis), np.ones(len(xs), np.int32)
    return jnp.concatenate(xs, axis), np.array([other.shape[axis] for other in xs], np.int32)


@op("Split", outputs=(1, None))
def split(
    x,
    sizes=None,
    *,
    op,
    axis: int | None = None,
    order: str | None = None,
    split: Ints = (),
    add_axis: bool = False,
):
    """Splits x along `axis` into parts of the given sizes, by default equal ones; with `add_axis`, drops that axis."""
    axis = _axis(axis, order, x.ndim)
    count = len(op.outputs)
    length = x.shape[axis]
    if sizes is not None:
        raise_if(split, "was given both an input and an argument 'split'; give one of them")
        split = tuple(int(s) for s in np.asarray(sizes))
    if add_axis:
        split = (1,) * count
    elif not split:
        if length % count:
            raise OpError(
                f"x is {describe(x)}: {length} along axis {axis} do not split into {count} equal outputs"
            )
        split = (length // count,) * count
    if len(split) != count or sum(split) != length or min(split) < 0:
        raise OpError(
            f"x is {describe(x)}; the sizes {list(split)} must be {count}, one an output, and add up to {length}, the size "
            f"of axis {axis}"
        )
    parts = jnp.split(x, np.cumsum(split)[:-1].tolist(), axis)
    if add_axis:
        parts = [jnp.squeeze(part, axis) for part in parts]
    return tuple(parts)


@gradient("Split")
def make_split_gradient(g):
    inputs = list(map(g.grad_output, range(len(g.op.outputs))))
    g.emit("Concat", inputs, [g.grad_input(0), f"_{g.op.inputs[0]}_grad_dims"])


def _scalar(blob: Any, argument: int | None, name: str) -> int:
    """A number from an input blob, or from the argument where there is none."""
    if blob is not None:
        check_integers(blob, name)
        if blob.shape != (1,):
            raise OpError(f"{name} is {describe(blob)}; it must be a vector with 1 element")
        return int(np.asarray(blob)[0])
    raise_if(argument is None, f"{name} is missing; give it as an argument or as an input")
    return argument


def _repeats(
    x: Any, tiles: int | None, axis: int | None, tiles_blob: Any, axis_blob: Any
) -> tuple[int, int]:
    """The number of repeats, and the axis."""
    count = _scalar(tiles_blob, tiles, "tiles")
    raise_if(count < 0, f"tiles is {count}; it must not be negative")
    return count, canonical_axis(_scalar(axis_blob, axis, "axis"), x.ndim)


def _tiled(x: Any, repeats: Ints) -> Any:
    check_size([size * times for size, times in zip(x.shape, repeats)], x.dtype)
    return np.tile(x, repeats) if x.dtype.kind in STRINGS else jnp.tile(x, repeats)


@op("Tile", gradient="TileGradient(dy, tiles_blob, axis_blob)")
def tile(x, tiles_blob=None, axis_blob=None, *, tiles: int | None = None, axis: int | None = None):
    count, over = _repeats(x, tiles, axis, tiles_blob, axis_blob)
    repeats = [1] * x.ndim
    repeats[over] = count
    return _tiled(x, tuple(repeats))


@op("TileGradient")
def tile_gradient(
    dy, tiles_blob=None, axis_blob=None, *, tiles: int | None = None, axis: int | None = None
):
    count, over = _repeats(dy, tiles, axis, tiles_blob, axis_blob)
    if count == 0 or dy.shape[over] % count:
        raise OpError(
            f"the gradient is {describe(dy)}; axis {over} is no multiple of tiles {count}"
        )
    shape = list(dy.shape)
    shape[over : over + 1] = [count, dy.shape[over] // count]
    return jnp.sum(jnp.reshape(dy, shape), over, dtype=dy.dtype)


@op("NumpyTile")
def numpy_tile(x, repeats):
    check_integers(repeats, "repeats")
    raise_if(repeats.size != x.ndim, "each dimension needs one number", repeats=repeats, x=x)
    counts = tuple(np.ravel(np.asarray(repeats)).tolist())
    raise_if(min(counts, default=0) < 0, f"repeats are {list(counts)}; they must not be negative")
    return _tiled(x, counts)


@op("Expand", gradient="ExpandGradient(dy, x)")
def expand(x, shape):
    """Broadcasts `x` against the given shape; -1 is the dimension of x."""
    check_integers(shape, "shape")
    check_rank(shape, 1, "shape")
    wanted = np.asarray(shape).tolist()
    rank = max(x.ndim, len(wanted))
    old = (1,) * (rank - x.ndim) + x.shape
    new = [1] * (rank - len(wanted)) + wanted
    for k, size in enumerate(old):
        if new[k] in (-1, 1):
            new[k] = size
    if any(size not in (1, asked) for asked, size in zip(new, old)):
        raise OpError(
            f"x is {describe(x)} and shape is {wanted}; dimensions must be equal, or one of them 1"
        )
    return jnp.broadcast_to(x, check_size(new, x.dtype))


op("ExpandGradient")(lambda dy, x: collect(dy, (1,) * (dy.ndim - x.ndim) + x.shape, x.shape))


@op("Flatten", gradient="ResizeLike(dy, x)")
def flatten(x, *, axis: int = 1):
    if not 0 <= axis <= x.ndim:
        raise OpError(
            f"argument 'axis' is {axis} and x is {describe(x)}; it must be in [0, {x.ndim}]"
        )
    if x.dtype.kind in STRINGS:
        return np.reshape(x, (math.prod(x.shape[:axis]), -1))
    return flat_at(x, axis)


@op("FlattenToVec", gradient="ResizeLike(dy, x)")
def flatten_to_vec(x):
    raise_if(x.ndim == 0, "x is a scalar; it must have at least 1 dimension")
    return x.reshape(x.size)


@op("PrependDim", inplace={0: 0})
def prepend_dim(x, *, dim_size: int):
    """[K * N, ...] -> [K, N, ...] for dim_size K."""
    if x.ndim == 0 or dim_size <= 0 or x.shape[0] % dim_size:
        raise OpError(
            f"x is {describe(x)}; argument 'dim_size', {dim_size}, must divide its first dimension"
        )
    return x.reshape(dim_size, x.shape[0] // dim_size, *x.shape[1:])


@gradient("PrependDim")
def _(g):
    g.emit("MergeDim", [g.grad_output(0)], [g.grad_input(0)], copy_args=False)


@op("MergeDim", inplace={0: 0})
def merge_dim(x):
    """[K, N, ...] -> [K * N, ...]."""
    raise_if(x.ndim < 2, "it must have at least 2 dimensions", x=x)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


@op("Size", gradient="stops")
def size(x):
    return np.asarray(x.size, np.int64)


op("IsEmpty", gradient="forbidden")(lambda x: np.asarray(x.size == 0))
op("HasElements", gradient="forbidden")(lambda *xs: np.asarray(any(x.size > 0 for x in xs)))
