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

from jrnn import jaxprs
from jrnn.jaxprs.mesh_axes import like

_SHORT = 16  # rows of the blocks that a loop inverts


class SavedForBackward:
    """Values that the reverse pass takes from the forward pass, while it computes all others again."""

    def __init__(self, values: Sequence[Any] | None = None):
        self.values = list(values or [])
        self.growth: list[Callable[[], Any]] = []  # return the largest products of decays
        self._replayed = None if values is None else iter(values)

    def __call__(self, make: Callable[[], Any]) -> Any:
        if self._replayed is not None:
            return next(self._replayed)
        self.values.append(make())
        return self.values[-1]

    def result(
        self, fn: Callable[..., Any], *args: Any, tangent: Callable[..., Any] | None = None
    ) -> Any:
        """Returns `fn(*args)`, an array that is saved.

        Its derivative is that of `fn`, or `tangent(result, args, tangents)`. JAX 0.10 drops rules such as this one where it
        differentiates a scan twice, so what is saved has its derivative, too.
        """
        saved = self(lambda: fn(*args))
        if tangent is None:
            # JAX keeps the rule, which must not keep the tracers that `fn` closes over.
            fn, closed_over = jaxprs.without_closure(fn, *args)
            args = (closed_over, *args)

        @jax.custom_jvp
        def of(value: Any, *args: Any) -> Any:
            return value

        @of.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            result = of(*primals)
            args = primals[1:]
            moved = tangents[1:]
            return result, tangent(result, args, moved) if tangent else jax.jvp(fn, args, moved)[1]

        return of(saved, *args)


def unit_lower_inverse(a: Any, precision: Any, saved: SavedForBackward) -> Any:
    """Inverts `I + a`.

    Args:
        a: [..., n, n], zero on and above the diagonal.
        precision: of the products.
        saved: saves the inverse.
    """
    times = functools.partial(jnp.matmul, precision=precision)

    def tangent(x: Any, _: Any, moved: Any) -> Any:
        return -times(times(x, moved[0]), x)

    return saved.result(functools.partial(_inverse, times=times), a, tangent=tangent)


def unit_lower_solve(a: Any, b: Any, precision: Any, saved: SavedForBackward) -> Any:
    """Solves `(I + a) x = b`.

    Args:
        a: [..., n, n], zero on and above the diagonal.
        b: [..., n, m].
        precision: of the products.
        saved: saves the inverse, and x.

    >>> import jax.numpy as jnp
    >>> print(unit_lower_solve(jnp.array([[0.0, 0.0], [2.0, 0.0]]), jnp.array([[1.0], [5.0]]), None, SavedForBackward()).T)
    [[1. 3.]]
    """
    times = functools.partial(jnp.matmul, precision=precision)

    def tangent(x: Any, args: Any, moved: Any) -> Any:
        return times(args[0], moved[2] - times(moved[1], x))

    inverse = unit_lower_inverse(a, precision, saved)
    return saved.result(lambda inverse, a, b: times(inverse, b), inverse, a, b, tangent=tangent)


def neighbors(steps: int) -> Any:
    """Returns for which t and s the blocks of 1, 2, 4, ... steps are neighbors in a block of twice the length, [N, T, S].

    Each pair s < t is in one level.
    """
    h = 1 << np.arange(steps.bit_length() - 1)[:, None, None]
    t = np.arange(steps)[:, None] // h
    s = np.arange(steps) // h
    return (t == s + 1) & (t % 2 == 1)


def _inverse(a: Any, times: Any) -> Any:
    """Inverts `I + a` in rounds: the inverses of neighboring diagonal blocks make the inverse of a block twice as long.

    The rounds of short blocks are a loop, which takes less time to compile; those of long blocks have fewer operations.
    """
    *lead, n, _ = a.shape
    size = 1 << (n - 1).bit_length()
    a = a.reshape(-1, n, n)  # a kernel of fewer axes compiles sooner
    if size != n:
        a = jnp.pad(a, [(0, 0)] + [(0, size - n)] * 2)

    def below(h: int, row: int, column: int, of: int) -> Any:
        """Of each group of `of` blocks of h rows on the diagonal, the block in this row and column, [B, m, h, h]."""
        m = size // (of * h)
        groups = a.reshape(-1, m, of, h, m, of, h)[:, :, row, :, :, column, :]
        return jnp.sum(jnp.where(np.eye(m, dtype=bool)[:, None, :, None], groups, 0), -2)

    h = min(size, _SHORT)
    diagonal = below(h, 0, 0, 1)

    def round_of(blocks: Any, apart: Any) -> tuple[Any, None]:
        return blocks - times(times(blocks, jnp.where(apart, diagonal, 0)), blocks), None

    ones = like(jnp.broadcast_to(jnp.eye(h, dtype=a.dtype), diagonal.shape), diagonal)
    blocks, _ = jax.lax.scan(round_of, ones, neighbors(h))
    while h < size:
        blocks = blocks.reshape(len(a), -1, 2, h, h)
        first = blocks[..., 0, :, :]
        second = blocks[..., 1, :, :]
        corner = -times(times(second, below(h, 1, 0, 2)), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        blocks = jax.lax.optimization_barrier(blocks)  # or XLA:CPU fuses the rounds
        h *= 2
    return blocks.reshape(len(a), size, size)[:, :n, :n].reshape(*lead, n, n)
