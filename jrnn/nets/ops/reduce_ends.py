"""Reductions over the first or the last dimensions, or over the first `lengths` elements of them.

The input is seen as a matrix: the `num_reduce_dim` dimensions that are reduced, and the others.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ops.reduce import max_of
from jrnn.nets.ops.values import (
    as_float,
    check_integers,
    check_rank,
    describe,
    flat_at,
    is_concrete,
    raise_if,
)
from jrnn.nets.ops.vjp import op_with_vjp, pulled_back
from jrnn.nets.registry import op


def _within(lengths: Any, values: Any, axis: int) -> Any:
    """Whether each element of a matrix is among the first `lengths` elements along an axis."""
    check_integers(lengths, "lengths")
    size = values.shape[axis]
    results = values.shape[1 - axis]
    raise_if(
        lengths.size != results, f"it must hold {results} numbers, one per result", lengths=lengths
    )
    if is_concrete(lengths) and (
        np.any(np.asarray(lengths) < 1) or np.any(np.asarray(lengths) > size)
    ):
        raise OpError(
            f"lengths are {np.asarray(lengths).tolist()[:8]}; each must be in [1, {size}]"
        )
    position = jnp.arange(size, dtype=lengths.dtype)
    return jnp.expand_dims(position, 1 - axis) < jnp.expand_dims(jnp.reshape(lengths, (-1,)), axis)


def _reduced(kind: str, front: bool, x: Any, lengths: Any, count: int) -> Any:
    if not 0 <= count <= x.ndim:
        raise OpError(
            f"argument 'num_reduce_dim' is {count}; x is {describe(x)}, so it must be in [0, {x.ndim}]"
        )
    raise_if(
        lengths is not None and count != 1,
        f"argument 'num_reduce_dim' is {count}; with lengths it must be 1",
    )
    split = count if front else x.ndim - count
    axis, shape = (0, x.shape[split:]) if front else (1, x.shape[:split])
    values = flat_at(jnp.asarray(x), split)
    within = True if lengths is None else _within(lengths, values, axis)
    if kind == "Max":
        return max_of(jnp.where(within, as_float(values), -jnp.inf), (axis,)).reshape(shape)
    total = jnp.sum(jnp.where(within, values, 0), axis, dtype=values.dtype).reshape(shape)
    if kind == "Sum":
        return total
    number = values.shape[axis] if lengths is None else lengths.reshape(shape)
    if total.dtype.kind in "iu":
        return lax.div(total, jnp.broadcast_to(jnp.asarray(number, total.dtype), shape))
    return total / jnp.maximum(number, 1)


def _register(kind: str, end: str) -> None:
    """Registers a reduction over one end. Of elements that attain a maximum, each gets the whole gradient."""
    type = f"Reduce{end}{kind}"
    is_max = kind == "Max"
    front = end == "Front"

    @op(
        type,
        gradient=f"{type}Gradient(dy, x, {'y, ' if is_max else ''}lengths)",
    )
    def forward(x, lengths=None, *, num_reduce_dim: int = 1):
        return _reduced(kind, front, x, lengths, num_reduce_dim)

    def backward(dy, x, lengths=None, *, num_reduce_dim: int = 1):
        if x.ndim == 1 and x.dtype.kind == "i":  # compat: old nets give the shape of x
            x = jnp.zeros(np.asarray(x).tolist(), dy.dtype)
        return pulled_back(lambda x: _reduced(kind, front, x, lengths, num_reduce_dim), x, dy)

    def of_maximum(dy, x, y, lengths=None, *, num_reduce_dim: int = 1):
        return backward(dy, x, lengths, num_reduce_dim=num_reduce_dim)

    op(type + "Gradient")(of_maximum if is_max else backward)


for _kind in ("Sum", "Mean", "Max"):
    _register(_kind, "Front")
    _register(_kind, "Back")


def _register_matrix_max(type: str, axis: int) -> None:
    """The maximum of each row (axis 2) or column (axis 1) of a stack of matrices: [B, M, N] -> [B, M] or [B, N]."""

    @op_with_vjp(type, gradient=f"{type}Gradient(x, y, dy)")
    def forward(x):
        check_rank(x, 3, "x")
        return jnp.squeeze(max_of(as_float(x), (axis,)), axis)


_register_matrix_max("RowwiseMax", 2)
_register_matrix_max("ColwiseMax", 1)
