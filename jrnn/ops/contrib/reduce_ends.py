"""Reductions over the first or the last dimensions, or over the first `lengths` elements of them.

The input is seen as a matrix: the `num_reduce_dim` dimensions that are reduced, and the others.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.reduce import max_of
from jrnn.ops.values import as_float, check_integers, check_rank, describe, flat_at, is_concrete
from jrnn.registry import op


class _Matrix:
    """An input as a matrix of which `axis` is reduced; `counted` masks the elements inside their lengths, if any."""

    def __init__(self, x: Any, count: int, front: bool, lengths: Any):
        if not 0 <= count <= x.ndim:
            raise OpError(f"argument 'num_reduce_dim' is {count}; x is {describe(x)}, so it must be in [0, {x.ndim}]")
        split = count if front else x.ndim - count
        self.axis = 0 if front else 1
        self.kept = x.shape[split:] if front else x.shape[:split]
        self.values = flat_at(jnp.asarray(x), split)
        self.size = self.values.shape[self.axis]
        self.lengths = self.counted = None
        if lengths is not None:
            self._count(lengths, count)

    def _count(self, lengths: Any, count: int) -> None:
        kept = self.values.shape[1 - self.axis]
        if count != 1:
            raise OpError(f"argument 'num_reduce_dim' is {count}; with lengths it must be 1")
        check_integers(lengths, "lengths")
        if lengths.size != kept:
            raise OpError(
                f"lengths is {describe(lengths)}; it must hold {kept} numbers, one for each element of the result"
            )
        if is_concrete(lengths) and (np.any(np.asarray(lengths) < 1) or np.any(np.asarray(lengths) > self.size)):
            raise OpError(f"lengths are {np.asarray(lengths).tolist()[:8]}; each must be in [1, {self.size}]")
        self.lengths = self.beside(lengths)
        position = jnp.arange(self.size, dtype=lengths.dtype)
        self.counted = jnp.expand_dims(position, 1 - self.axis) < self.lengths

    def beside(self, y: Any) -> Any:
        """A reduced value in a shape that lies beside the matrix."""
        return jnp.expand_dims(jnp.reshape(y, (-1,)), self.axis)

    def sum(self) -> Any:
        values = self.values if self.counted is None else jnp.where(self.counted, self.values, 0)
        return jnp.sum(values, self.axis, dtype=values.dtype).reshape(self.kept)

    def spread(self, dy: Any) -> Any:
        """The gradient of a sum: each result's gradient at every element that is counted."""
        if dy.size != np.prod(self.kept):
            raise OpError(f"the gradient is {describe(dy)}; it must have the elements of shape {list(self.kept)}")
        dx = jnp.broadcast_to(self.beside(dy), self.values.shape)
        return dx if self.counted is None else jnp.where(self.counted, dx, 0)


def _sum(m: _Matrix) -> Any:
    return m.sum()


def _mean(m: _Matrix) -> Any:
    total = m.sum()
    count = m.size if m.lengths is None else m.lengths.reshape(m.kept)
    if total.dtype.kind in "iu":
        return lax.div(total, jnp.broadcast_to(jnp.asarray(count, total.dtype), total.shape))
    return total / jnp.maximum(count, 1)


def _max(m: _Matrix) -> Any:
    values = as_float(m.values)
    if m.counted is not None:
        values = jnp.where(m.counted, values, -jnp.inf)
    return max_of(values, (m.axis,)).reshape(m.kept)


def _shaped(like: Any) -> Any:
    """What has the shape of the input: the input, or a vector of its dimensions."""
    if like.ndim == 1 and like.dtype.kind == "i":
        return np.broadcast_to(np.float32(0), tuple(np.asarray(like).tolist()))
    return like


def _register_sum(type: str, reduced: Callable, front: bool, divided: bool) -> None:
    """A sum or a mean over one end, with its gradient."""

    @op(type, gradient=f"{type}Gradient(dy, x, lengths)")
    def forward(x, lengths=None, *, num_reduce_dim: int = 1):
        return reduced(_Matrix(x, num_reduce_dim, front, lengths))

    @op(type + "Gradient")
    def backward(dy, like, lengths=None, *, num_reduce_dim: int = 1):
        like = _shaped(like)
        m = _Matrix(like, num_reduce_dim, front, lengths)
        dx = m.spread(dy)
        if divided:
            dx = dx / (max(m.size, 1) if m.lengths is None else m.lengths.astype(dy.dtype))
        return dx.reshape(like.shape)


_register_sum("ReduceFrontSum", _sum, front=True, divided=False)
_register_sum("ReduceBackSum", _sum, front=False, divided=False)
_register_sum("ReduceFrontMean", _mean, front=True, divided=True)
_register_sum("ReduceBackMean", _mean, front=False, divided=True)


def _register_max(type: str, front: bool) -> None:
    """A maximum over one end; every element that attains it gets the whole gradient."""

    @op(type, gradient=f"{type}Gradient(dy, x, y, lengths)")
    def forward(x, lengths=None, *, num_reduce_dim: int = 1):
        return _max(_Matrix(x, num_reduce_dim, front, lengths))

    @op(type + "Gradient")
    def backward(dy, x, y, lengths=None, *, num_reduce_dim: int = 1):
        m = _Matrix(x, num_reduce_dim, front, lengths)
        return jnp.where(m.values == m.beside(y), m.spread(dy), 0).reshape(x.shape)


_register_max("ReduceFrontMax", front=True)
_register_max("ReduceBackMax", front=False)


def _register_matrix_max(type: str, axis: int) -> None:
    """The maximum of each row (axis 2) or column (axis 1) of a stack of matrices: [B, M, N] -> [B, M] or [B, N]."""

    @op(type, gradient=f"{type}Gradient(x, y, dy)")
    def forward(x):
        check_rank(x, 3, "x")
        return jnp.squeeze(max_of(as_float(x), (axis,)), axis)

    @op(type + "Gradient")
    def backward(x, y, dy):
        check_rank(x, 3, "x")
        return jnp.where(x == jnp.expand_dims(y, axis), jnp.expand_dims(dy, axis), 0)


_register_matrix_max("RowwiseMax", 2)
_register_matrix_max("ColwiseMax", 1)
