"""Reductions over chosen axes, sums over all elements, ArgMax, ArgMin and TopK.

`axes` are the dimensions to reduce (default: all); with `keepdims` they stay, with size 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.ops.values import as_float, canonical_axis, describe, int64, known_integer, magnitude, raise_if
from jrnn.nets.registry import op


def reduced_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The axes to reduce, counted from the front; all of them if none is given."""
    return tuple(dict.fromkeys(canonical_axis(a, rank, "axes") for a in axes)) or tuple(range(rank))


def with_kept_dims(y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """A reduced value in the shape that it has with keepdims, so that it broadcasts with `x`."""
    shape = tuple(1 if k in axes else size for k, size in enumerate(x.shape))
    if y.size != np.prod(shape):
        raise OpError(f"a reduced input is {describe(y)}; it must have the elements of shape {list(shape)}")
    return jnp.reshape(y, shape)


def sum_of(x: Any, axes: tuple[int, ...]) -> Any:
    return jnp.sum(x, axes, keepdims=True, dtype=x.dtype)


def mean_of(x: Any, axes: tuple[int, ...]) -> Any:
    count = int(np.prod([x.shape[a] for a in axes]))
    return sum_of(as_float(x), axes) / max(count, 1)


def _extremum(pick: Callable) -> Callable:
    """max or min that gives the whole derivative to every element that attains it (jnp's splits it among them)."""

    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def extremum(x: Any, axes: tuple[int, ...]) -> Any:
        initial = None
        if not x.size:  # the result of a reduction over no elements is the largest or smallest finite number
            info = np.iinfo(x.dtype) if x.dtype.kind in "iu" else jnp.finfo(x.dtype)
            initial = info.max if pick is jnp.min else info.min
        return pick(x, axes, keepdims=True, initial=initial)

    @extremum.defjvp
    def _(axes, primals, tangents):
        (x,), (dx,) = primals, tangents
        y = extremum(x, axes)
        return y, jnp.sum(jnp.where(x == y, dx, 0), axes, keepdims=True)

    return extremum


max_of = _extremum(jnp.max)
min_of = _extremum(jnp.min)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def l2_of(x: Any, axes: tuple[int, ...]) -> Any:
    return jnp.sqrt(sum_of(jnp.square(as_float(x)), axes))


def _direction(x: Any, y: Any) -> Any:
    """The derivative x / |x| of a norm y = |x|."""
    return jnp.where(y == 0, 1, x / jnp.where(y == 0, 1, y))  # compat: 1 at zero


@l2_of.defjvp
def _(axes, primals, tangents):
    (x,), (dx,) = primals, tangents
    y = l2_of(x, axes)
    return y, sum_of(dx * _direction(x, y), axes)


def _register(type: str, reduced: Callable, derivative: Callable) -> None:
    """Registers a reduction, its gradient operator and its gradient maker.

    `reduced(x, axes)` keeps the dimensions. `derivative(dy, x, y)` is the gradient of x, before it is broadcast to x's
    shape; dy and y have the kept dimensions.
    """

    @op(type, gradient=f"{type}Gradient(dy, x, y)")
    def forward(x, *, axes: tuple[int, ...] = (), keepdims: bool = True):
        over = reduced_axes(axes, x.ndim)
        y = reduced(x, over)
        return y if keepdims else jnp.squeeze(y, over)

    @op(type + "Gradient")
    def backward(dy, x, y, *, axes: tuple[int, ...] = (), keepdims: bool = True):
        over = reduced_axes(axes, x.ndim)
        dy, y = with_kept_dims(dy, x, over), with_kept_dims(y, x, over)
        return jnp.broadcast_to(derivative(dy, x, y), x.shape)


def _tied(dy: Any, x: Any, y: Any) -> Any:
    return jnp.where(x == y, dy, 0)


_register("ReduceSum", sum_of, lambda dy, x, y: dy)
_register("ReduceMean", mean_of, lambda dy, x, y: dy * (y.size / max(x.size, 1)))
_register("ReduceMax", max_of, _tied)
_register("ReduceMin", min_of, _tied)
_register("ReduceL1", lambda x, axes: sum_of(magnitude(as_float(x)), axes), lambda dy, x, y: dy * jnp.sign(x))
_register("ReduceL2", l2_of, lambda dy, x, y: dy * _direction(x, y))


@op("SumElements", gradient="SumElementsGradient(x, dy)")
def sum_elements(x, *, average: bool = False):
    return jnp.sum(as_float(x)) / (max(x.size, 1) if average else 1)


@op("SumElementsGradient")
def sum_elements_gradient(x, dy, *, average: bool = False):
    each = jnp.reshape(dy, (-1,))[0] / (max(x.size, 1) if average else 1)
    return jnp.full(x.shape, each, x.dtype)


@op("SumElementsInt", gradient="forbidden")
def sum_elements_int(x):
    raise_if(x.dtype != np.int32, "it must be int32", x=x)
    return jnp.sum(x, dtype=x.dtype)


op("SumSqrElements")(lambda x, *, average=False: jnp.sum(jnp.square(as_float(x))) / (max(x.size, 1) if average else 1))


def _arg_extremum(type: str, pick: Callable, worst: float) -> None:
    @op(type, gradient="forbidden")
    def arg_extremum(x, *, axis: int = -1, keepdims: bool = True):
        over = canonical_axis(axis, x.ndim)
        raise_if(x.shape[over] == 0, f"axis {over} must not be empty", x=x)
        x = jnp.asarray(x)
        if x.dtype.kind == "f":  # comparisons with NaN are false: a NaN at the front stays, others are never picked
            first = jnp.take(x, jnp.array([0]), axis=over)
            index = pick(jnp.where(jnp.isnan(x), worst, x), over, keepdims=True)
            index = jnp.where(jnp.isnan(first), 0, index)
        else:
            index = pick(x, over, keepdims=True)
        return (index if keepdims else jnp.squeeze(index, over)).astype(int64())


_arg_extremum("ArgMax", jnp.argmax, -np.inf)
_arg_extremum("ArgMin", jnp.argmin, np.inf)


@op("TopK", outputs=(2, 3), gradient="TopKGradient(dy, y1, x)")
def top_k(x, k_blob=None, *, k: int | None = None, axis: int = -1):
    """The k largest elements along an axis, largest first, their indices along it, and their indices in the flat input.

    Of equal elements the one with the lower index comes first. If the axis has fewer than k elements, zeros with index -1
    follow.
    """
    if k_blob is not None:
        k = known_integer(k_blob, "k")
    raise_if(k is None or k < 1, f"k is {k}; it must be at least 1, as argument 'k' or as the second input")
    over = canonical_axis(axis, as_float(x).ndim)
    size = x.shape[over]
    values, index = jax.lax.top_k(jnp.moveaxis(x, over, -1), min(k, size))
    flat = jnp.moveaxis(jnp.arange(x.size, dtype=int64()).reshape(x.shape), over, -1)
    place = jnp.take_along_axis(flat, index, axis=-1)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, max(k - size, 0))]
    values = jnp.pad(values, padding)
    index, place = (jnp.pad(v.astype(int64()), padding, constant_values=-1) for v in (index, place))
    return (
        jnp.moveaxis(values, -1, over),
        jnp.moveaxis(index, -1, over),
        jnp.reshape(jnp.moveaxis(place, -1, over), (-1,)),
    )


@op("TopKGradient")
def top_k_gradient(dy, index, x, *, axis: int = -1):
    over = canonical_axis(axis, x.ndim)
    dy, index = jnp.moveaxis(dy, over, -1), jnp.moveaxis(index, over, -1)
    rows = jnp.zeros((dy.size // max(dy.shape[-1], 1), x.shape[over]), dy.dtype)
    index = jnp.reshape(index, (rows.shape[0], -1))
    index = jnp.where(index < 0, rows.shape[1], index)  # the padding falls outside and is dropped
    row = jnp.arange(rows.shape[0])[:, None]
    dx = rows.at[row, index].set(jnp.reshape(dy, index.shape), mode="drop")
    return jnp.moveaxis(jnp.reshape(dx, (*dy.shape[:-1], rows.shape[1])), -1, over)
