"""Reductions over chosen axes, sums over all elements, ArgMax, ArgMin and TopK.

`axes` are the dimensions to reduce (default: all); with `keepdims` they stay, with size 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.nets.ir import Ints
from jrnn.nets.ops.values import as_float, canonical_axis, int64, known_integer, magnitude, raise_if
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import op


def reduced_axes(axes: Ints, rank: int) -> Ints:
    """The axes to reduce, counted from the front; all of them if none is given."""
    return tuple(dict.fromkeys(canonical_axis(a, rank, "axes") for a in axes)) or tuple(range(rank))


def sum_of(x: Any, axes: Ints) -> Any:
    return jnp.sum(x, axes, keepdims=True, dtype=x.dtype)


def mean_of(x: Any, axes: Ints) -> Any:
    count = int(np.prod([x.shape[a] for a in axes]))
    return sum_of(as_float(x), axes) / max(count, 1)


def _extremum(pick: Callable) -> Callable:
    """max or min that gives the whole derivative to every element that attains it (jnp's splits it among them)."""

    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def extremum(x: Any, axes: Ints) -> Any:
        initial = None
        if not x.size:
            # The result of a reduction over no elements is the largest or smallest finite number.
            info = np.iinfo(x.dtype) if x.dtype.kind in "iu" else jnp.finfo(x.dtype)
            initial = info.max if pick is jnp.min else info.min
        return pick(x, axes, keepdims=True, initial=initial)

    @extremum.defjvp
    def _(axes, primals, tangents):
        (x,) = primals
        (dx,) = tangents
        y = extremum(x, axes)
        return y, jnp.sum(jnp.where(x == y, dx, 0), axes, keepdims=True)

    return extremum


max_of = _extremum(jnp.max)
min_of = _extremum(jnp.min)


def l1_of(x: Any, axes: Ints) -> Any:
    return sum_of(magnitude(as_float(x)), axes)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def l2_of(x: Any, axes: Ints) -> Any:
    return jnp.sqrt(sum_of(jnp.square(as_float(x)), axes))


@l2_of.defjvp
def _(axes, primals, tangents):
    (x,) = primals
    (dx,) = tangents
    y = l2_of(x, axes)
    direction = jnp.where(y == 0, 1, x / jnp.where(y == 0, 1, y))  # compat: 1 at zero
    return y, sum_of(dx * direction, axes)


def _register(type: str, reduced: Callable) -> None:
    """Registers a reduction; `reduced(x, axes)` keeps the dimensions."""

    @op_with_vjp(type, gradient=f"{type}Gradient(dy, x, y)")
    def forward(x, *, axes: Ints = (), keepdims: bool = True):
        over = reduced_axes(axes, x.ndim)
        y = reduced(x, over)
        return y if keepdims else jnp.squeeze(y, over)


_register("ReduceSum", sum_of)
_register("ReduceMean", mean_of)
_register("ReduceMax", max_of)
_register("ReduceMin", min_of)
_register("ReduceL1", l1_of)
_register("ReduceL2", l2_of)


@op_with_vjp("SumElements", gradient="SumElementsGradient(x, dy)")
def sum_elements(x, *, average: bool = False):
    total = jnp.sum(as_float(x))
    return total / max(x.size, 1) if average else total


@op("SumElementsInt", gradient="forbidden")
def sum_elements_int(x):
    raise_if(x.dtype != np.int32, "it must be int32", x=x)
    return jnp.sum(x, dtype=x.dtype)


@op("SumSqrElements")
def sum_squared_elements(x, *, average: bool = False):
    return sum_elements(jnp.square(as_float(x)), average=average)


def _arg_extremum(type: str, pick: Callable, worst: float) -> None:
    @op(type, gradient="forbidden")
    def arg_extremum(x, *, axis: int = -1, keepdims: bool = True):
        over = canonical_axis(axis, x.ndim)
        raise_if(x.shape[over] == 0, f"axis {over} must not be empty", x=x)
        x = jnp.asarray(x)
        if x.dtype.kind == "f":
            # Comparisons with NaN are false: a NaN at the front stays, others are never picked.
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
    raise_if(
        k is None or k < 1,
        f"k is {k}; it must be at least 1, as argument 'k' or as the second input",
    )
    over = canonical_axis(axis, as_float(x).ndim)
    size = x.shape[over]
    values, index = jax.lax.top_k(jnp.moveaxis(x, over, -1), min(k, size))
    flat = jnp.moveaxis(jnp.arange(x.size, dtype=int64()).reshape(x.shape), over, -1)
    place = jnp.take_along_axis(flat, index, axis=-1)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, max(k - size, 0))]

    def filled(part: Any, fill: int) -> Any:
        return jnp.moveaxis(jnp.pad(part, padding, constant_values=fill), -1, over)

    index = filled(index.astype(int64()), -1)
    place = filled(place.astype(int64()), -1)
    return filled(values, 0), index, jnp.reshape(place, (-1,))


@op("TopKGradient")
def top_k_gradient(dy, index, x, *, axis: int = -1):
    over = canonical_axis(axis, x.ndim)
    places = list(jnp.indices(index.shape, sparse=True))
    places[over] = jnp.where(index < 0, x.shape[over], index)  # the padding falls outside
    return jnp.zeros(x.shape, dy.dtype).at[tuple(places)].set(dy, mode="drop")
