"""Operators on shapes: Reshape, Squeeze, ExpandDims, Transpose, Slice, Shape, ResizeLike; Concat and Split."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.values import canonical_axis, describe
from jrnn.registry import gradient, op


@op("Reshape", outputs=2, inplace={0: 0})
def reshape(x, new_shape=None, *, shape: tuple[int, ...] | None = None):
    """x with another shape, in which 0 keeps a dimension and one -1 is worked out; and the shape that x had."""
    if (new_shape is None) == (shape is None):
        raise OpError("takes the new shape either as input 1 or as argument 'shape'; give one of them")
    wanted = shape or () if new_shape is None else tuple(int(d) for d in np.asarray(new_shape).reshape(-1))
    size = math.prod(x.shape)
    # in an empty array 0 is a size like others, so that a gradient can be given its old shape back
    made = [x.shape[k] if d == 0 and size and k < x.ndim else d for k, d in enumerate(wanted)]
    if made.count(-1) == 1:
        rest = math.prod(d for d in made if d != -1)
        made[made.index(-1)] = size // rest if rest > 0 else 0
    if min(made, default=0) < 0 or math.prod(made) != size:
        raise OpError(
            f"x is {describe(x)}, {size} elements, which do not take shape {list(wanted)}; its product must be {size}, and "
            "one dimension may be -1"
        )
    old = np.array(x.shape, np.int32 if new_shape is not None and new_shape.dtype == np.int32 else np.int64)
    return jnp.reshape(x, made), old


@gradient("Reshape")
def _(g):
    g.emit(
        "Reshape", [g.grad_output(0), g.output(1)], [g.grad_input(0), f"_{g.op.inputs[0]}_grad_dims"], copy_args=False
    )


def _dims(dims):
    if not dims or min(dims) < 0:
        raise OpError(f"argument 'dims' is {list(dims)}; it must list dimensions, counted from 0")
    return sorted(set(dims))


@op("Squeeze", inplace={0: 0}, gradient="ExpandDims(dy)")
def squeeze(x, *, dims: tuple[int, ...]):
    found = _dims(dims)
    if found[-1] >= x.ndim or any(x.shape[d] != 1 for d in found):
        raise OpError(f"x is {describe(x)}; it must have size 1 in each of the dimensions {found}")
    return jnp.squeeze(x, tuple(found))


@op("ExpandDims", inplace={0: 0}, gradient="Squeeze(dy)")
def expand_dims(x, *, dims: tuple[int, ...]):
    """x with dimensions of size 1 put in, so that they stand at `dims` of the result."""
    found = _dims(dims)
    if found[-1] >= x.ndim + len(found):
        raise OpError(f"x is {describe(x)}; with {len(found)} more dimensions it has no dimension {found[-1]}")
    return jnp.expand_dims(x, tuple(found))


@op("Transpose")
def transpose(x, *, axes: tuple[int, ...] = ()):
    """Dimension k of the result is dimension axes[k] of x; without `axes`, all are reversed."""
    axes = axes or tuple(reversed(range(x.ndim)))
    if sorted(axes) != list(range(x.ndim)):
        raise OpError(
            f"x is {describe(x)}; argument 'axes' is {list(axes)}, it must be a permutation of 0..{x.ndim - 1}"
        )
    return jnp.transpose(x, axes)


@gradient("Transpose")
def _(g):
    axes = g.arg("axes", ())
    inverse = np.argsort(axes) if len(axes) else None
    g.emit("Transpose", [g.grad_output(0)], [g.grad_input(0)], axes=inverse)


def _bounds(x, starts, ends, starts_blob, ends_blob):
    """(start, end) of every dimension. A negative number n counts as size + 1 + n, so that -1 is the end."""
    if (starts_blob is None) == (starts is None) or (ends_blob is None) == (ends is None):
        raise OpError(
            "takes starts and ends either as inputs 1 and 2 or as arguments 'starts' and 'ends'; give one of them"
        )
    if starts_blob is not None:
        starts, ends = np.asarray(starts_blob).reshape(-1).tolist(), np.asarray(ends_blob).reshape(-1).tolist()
    if len(starts) != len(ends) or len(starts) > x.ndim:
        raise OpError(
            f"x is {describe(x)}; starts {list(starts)} and ends {list(ends)} must be as many, and at most {x.ndim}"
        )
    bounds = [(0, size) for size in x.shape]
    for k, pair in enumerate(zip(starts, ends)):
        size = x.shape[k]
        start, end = (min(size + 1 + n if n < 0 else n, size) for n in pair)
        if size and not 0 <= start <= end:
            raise OpError(
                f"x is {describe(x)}: starts {list(starts)} and ends {list(ends)} leave nothing of dimension {k}"
            )
        bounds[k] = (start, end) if size else (0, 0)
    return bounds


@op("Slice", gradient="SliceGradient(*, dy)")
def slice_(
    x, starts_blob=None, ends_blob=None, *, starts: tuple[int, ...] | None = None, ends: tuple[int, ...] | None = None
):
    bounds = _bounds(x, starts, ends, starts_blob, ends_blob)
    return jnp.asarray(x)[tuple(slice(start, end) for start, end in bounds)]


@op("SliceGradient")
def slice_gradient(
    x, *more, starts: tuple[int, ...] | None = None, ends: tuple[int, ...] | None = None
):  # fmt: skip
    """dy among zeros. Reads (x, dy), or (x, starts, ends, dy)."""
    *blobs, dy = more
    bounds = _bounds(x, starts, ends, *(blobs or (None, None)))
    pads = [(start, size - end, 0) for (start, end), size in zip(bounds, x.shape)]
    return lax.pad(dy, jnp.zeros((), dy.dtype), pads)


@op("Shape", gradient="forbidden")
def shape(x, *, axes: tuple[int, ...] = ()):
    """The shape of x, or the sizes of some of its dimensions, as int64."""
    for axis in axes:
        if not 0 <= axis < x.ndim:
            raise OpError(
                f"x is {describe(x)}; argument 'axes' is {list(axes)}, it must list dimensions 0..{x.ndim - 1}"
            )
    return np.array([x.shape[k] for k in axes] if axes else x.shape, np.int64)


@op("ResizeLike", gradient="forbidden")
def resize_like(x, like):
    if math.prod(x.shape) != math.prod(like.shape):
        raise OpError(f"x is {describe(x)} and the other {describe(like)}; they must have the same number of elements")
    return jnp.reshape(x, like.shape)


def _axis(axis, order, rank):
    """The axis that the arguments name: `axis`, or the channels in `order`; by default the channels of NCHW."""
    if axis is not None and order is not None:
        raise OpError(f"was given both axis {axis} and order {order!r}; give one of them")
    if axis is None:
        if order not in (None, "NCHW", "NHWC"):
            raise OpError(f"argument 'order' is {order!r}; it must be 'NCHW' or 'NHWC'")
        axis = 3 if order == "NHWC" else 1
    return canonical_axis(axis, rank)


@op("Concat", outputs=2, gradient="Split(dy, y1) -> *")
def concat(x, *xs, axis: int | None = None, order: str | None = None, add_axis: bool = False):
    """The inputs one after the other along `axis`, or stacked on a new one; and the size that each has along it."""
    xs = (x, *xs)
    axis = _axis(axis, order, x.ndim + add_axis)
    for k, other in enumerate(xs):
        same = [d for d in range(other.ndim) if add_axis or d != axis]
        if other.ndim != x.ndim or any(other.shape[d] != x.shape[d] for d in same):
            where = "" if add_axis else f" but for axis {axis}"
            raise OpError(f"input {k} is {describe(other)} and input 0 is {describe(x)}; shapes must be equal{where}")
        if other.dtype.kind != x.dtype.kind:
            raise OpError(f"input {k} is {describe(other)} and input 0 is {describe(x)}; data types must be equal")
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
    split: tuple[int, ...] = (),
    add_axis: bool = False,
):
    """Parts of x along `axis`: of the given sizes, else equal ones; with `add_axis`, slices without that axis."""
    axis = _axis(axis, order, x.ndim)
    count, length = len(op.outputs), x.shape[axis]
    if sizes is not None:
        if split:
            raise OpError("was given both an input and an argument 'split'; give one of them")
        split = tuple(int(s) for s in np.asarray(sizes))
    if add_axis:
        split = (1,) * count
    elif not split:
        if length % count:
            raise OpError(f"x is {describe(x)}: {length} along axis {axis} do not split into {count} equal outputs")
        split = (length // count,) * count
    if len(split) != count or sum(split) != length or min(split) < 0:
        raise OpError(
            f"x is {describe(x)}; the sizes {list(split)} must be {count}, one an output, and add up to {length}, the size "
            f"of axis {axis}"
        )
    parts = jnp.split(x, np.cumsum(split)[:-1].tolist(), axis)
    return tuple(jnp.squeeze(part, axis) if add_axis else part for part in parts)


@gradient("Split")
def _(g):
    inputs = [g.grad_output(k) for k in range(len(g.op.outputs))]
    g.emit("Concat", inputs, [g.grad_input(0), f"_{g.op.inputs[0]}_grad_dims"])
