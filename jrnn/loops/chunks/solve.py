"""The inverse of a triangular matrix with ones on its diagonal, by products of blocks.

XLA:CPU's `triangular_solve` is many times slower for matrices of this size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Kept:
    """Values that the reverse pass takes from the forward pass, while it computes all others again."""

    def __init__(self, values: Sequence[Any] | None = None):
        self.values = list(values or [])
        self._left = None if values is None else iter(values)

    def __call__(self, make: Callable[[], Any]) -> Any:
        if self._left is not None:
            return next(self._left)
        self.values.append(make())
        return self.values[-1]

    def result(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns `fn(*args)`, an array that is kept; its derivative is that of `fn`."""

        @jax.custom_jvp
        def of(kept: Any, *args: Any) -> Any:
            return kept

        @of.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return of(*primals), jax.jvp(fn, primals[1:], tangents[1:])[1]

        return of(self(lambda: fn(*args)), *args)


def unit_lower_solve(a: Any, b: Any, precision: Any, keep: Kept) -> Any:
    """Solves `(I + a) x = b`.

    Args:
        a: [..., n, n], zero on and above the diagonal.
        b: [..., n, m].
        precision: of the products.
        keep: keeps the inverse, and x.

    >>> import jax.numpy as jnp
    >>> print(unit_lower_solve(jnp.array([[0.0, 0.0], [2.0, 0.0]]), jnp.array([[1.0], [5.0]]), None, Kept()).T)
    [[1. 3.]]
    """
    times = functools.partial(jnp.matmul, precision=precision)

    @jax.custom_jvp
    def invert(a: Any) -> Any:
        return _inverse(a, times)

    @invert.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        made = invert(*primals)
        return made, -times(times(made, *tangents), made)

    @jax.custom_jvp
    def solve(x: Any, inverse: Any, a: Any, b: Any) -> Any:
        return x

    @solve.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (_, inverse, *_), (_, _, da, db) = primals, tangents
        x = solve(*primals)
        return x, times(inverse, db - times(da, x))

    inverse = keep(lambda: invert(a))
    return solve(keep(lambda: times(inverse, b)), inverse, a, b)


def _inverse(a: Any, times: Any) -> Any:
    """Inverts `I + a` in rounds: the inverses of neighboring diagonal blocks make the inverse of a block twice as long."""
    *lead, n, _ = a.shape
    size = 1 << (n - 1).bit_length()
    if size != n:
        a = jnp.pad(a, [(0, 0)] * len(lead) + [(0, size - n)] * 2)
    blocks = jnp.ones((*lead, size, 1, 1), a.dtype)
    h = 1
    while h < size:
        m = size // (2 * h)
        below = a.reshape(*lead, m, 2, h, m, 2, h)[..., :, 1, :, :, 0, :]
        below = jnp.sum(jnp.where(np.eye(m, dtype=bool)[:, None, :, None], below, 0), -2)  # [..., m, h, h]
        blocks = blocks.reshape(*lead, m, 2, h, h)
        first, second = blocks[..., 0, :, :], blocks[..., 1, :, :]
        corner = -times(times(second, below), first) if h > 1 else -below
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        blocks = jax.lax.optimization_barrier(blocks)  # or XLA:CPU fuses the rounds
        h *= 2
    return blocks.reshape(*lead, size, size)[..., :n, :n]
