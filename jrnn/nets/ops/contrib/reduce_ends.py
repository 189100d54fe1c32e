"""Reductions over the first or the last dimensions, or over the first `lengths` elements of them.

The input is seen as a matrix: the `num_reduce_dim` dimensions that are reduced, and the others.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ops.reduce import max_of
from jrnn.nets.ops.values import as_float, check_integers, check_rank, describe, flat_at, is_concrete, raise_if
from jrnn.nets.registry import op


class _Matrix:
    """An input as a matrix of which `axis` is reduced; `counted` masks the elements within their lengths, if any."""

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
            raise_if(count != 1, f"argument 'num_reduce_dim' is {count}; with lengths it must be 1")
            check_integers(lengths, "lengths")
            kept = self.values.shape[1 - self.axis]
            raise_if(lengths.size != kept, f"it must hold {kept} numbers, one per result", lengths=lengths)
            if is_concrete(lengths) and (np.any(np.asarray(lengths) < 1) or np.any(np.asarray(lengths) > self.size)):
                raise OpError(f"lengths are {np.asarray(lengths).tolist()[:8]}; each must be in [1, {self.size}]")
            self.lengths = self.expanded(lengths)
            position = jnp.arange(self.size, dtype=lengths.dtype)
            self.counted = jnp.expand_dims(position, 1 - self.axis) < self.lengths

    def expanded(self, y: Any) -> Any:
        """A reduced value in a shape that broadcasts with the matrix."""
        return jnp.expand_dims(jnp.reshape(y, (-1,)), self.axis)

    def sum(self) -> Any:
        values = self.values if self.counted is None else jnp.where(self.counted, self.values, 0)
        return jnp.sum(values, self.axis, dtype=values.dtype).reshape(self.kept)

    def mean(self) -> Any:
        total = self.sum()
        count = self.size if self.lengths is None else self.lengths.reshape(self.kept)
        if total.dtype.kind in "iu":
            return lax.div(total, jnp.broadcast_to(jnp.asarray(count, total.dtype), total.shape))
        return total / jnp.maximum(count, 1)

    def max(self) -> Any:
        values = as_float(self.values)
        if self.counted is not None:
            values = jnp.where(self.counted, values, -jnp.inf)
        return max_of(values, (self.axis,)).reshape(self.kept)

    def spread(self, dy: Any) -> Any:
        """The gradient of a sum: each result's gradient at every element that is counted."""
        if dy.size != np.prod(self.kept):
            raise OpError(f"the gradient is {describe(dy)}; it must have the elements of shape {list(self.kept)}")
        dx = jnp.broadcast_to(self.expanded(dy), self.values.shape)
        return dx if self.counted is None else jnp.where(self.counted, dx, 0)


def _register(type: str, front: bool, mean: bool) -> None:
    """A sum or a mean over one end, with its gradient."""

    @op(type, gradient=f"{type}Gradient(dy, x, lengths)")
    def forward(x, lengths=None, *, num_reduce_dim: int = 1):
        m = _Matrix(x, num_reduce_dim, front, lengths)
        return m.mean() if mean else m.sum()

    @op(type + "Gradient")
    def backward(dy, like, lengths=None, *, num_reduce_dim: int = 1):
        if like.ndim == 1 and like.dtype.kind == "i":  # the shape of the input, else the input itself
            like = np.broadcast_to(np.float32(0), tuple(np.asarray(like).tolist()))
        m = _Matrix(like, num_reduce_dim, front, lengths)
        dx = m.spread(dy)
        if mean:
            dx = dx / (max(m.size, 1) if m.lengths is None else m.lengths.astype(dy.dtype))
        return dx.reshape(like.shape)


def _register_max(type: str, front: bool) -> None:
    """A maximum over one end; every element that attains it gets the whole gradient."""

    @op(type, gradient=f"{type}Gradient(dy, x, y, lengths)")
    def forward(x, lengths=None, *, num_reduce_dim: int = 1):
        return _Matrix(x, num_reduce_dim, front, lengths).max()

    @op(type + "Gradient")
    def backward(dy, x, y, lengths=None, *, num_reduce_dim: int = 1):
        m = _Matrix(x, num_reduce_dim, front, lengths)
        return jnp.where(m.values == m.expanded(y), m.spread(dy), 0).reshape(x.shape)


for _end, _front in (("Front", True), ("Back", False)):
    _register(f"Reduce{_end}Sum", _front, mean=False)
    _register(f"Reduce{_end}Mean", _front, mean=True)
    _register_max(f"Reduce{_end}Max", _front)


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
