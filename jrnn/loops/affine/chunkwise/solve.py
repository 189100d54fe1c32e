"""The inverse of a triangular matrix with ones on its diagonal, by products of blocks.

The rows of a chunk solve `(I - N) R = E` (`row_equations.py`). Substitution is a loop over rows of vectors. XLA:CPU's
`triangular_solve` is many times slower than products for this size. Two neighboring diagonal blocks make the inverse of a
block twice as long (Bunch and Hopcroft, "Triangular Factorization and Inversion by Fast Matrix Multiplication", 1974):

    [ A  0 ]^-1   [  A^-1             0    ]
    [ B  D ]    = [ -D^-1 B A^-1     D^-1  ]

so that log2(n) doubling steps, each with two batched products, invert the matrix:

    1 . . .        1 . . .        1 . . .
    . 1 . .   ->   x 1 . .   ->   x 1 . .
    . . 1 .        . . 1 .        x x 1 .
    . . . 1        . . x 1        x x x 1

What was saved for the reverse pass is the inverse: its tangent is `-X dA X`, again two products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs.mesh_axes import like
from jrnn.loops.affine.chunkwise.guarded import Arrays
from jrnn.loops.affine.chunkwise.rounded_product import full, matmul

_SHORT = 16  # rows of the blocks that a loop inverts

ArrayFn = Callable[..., Array]


class SavedForBackward:
    """Values that the reverse pass takes from the forward pass, while it computes all others again."""

    def __init__(self, values: Arrays | None = None):
        self.values = list(values or [])
        self.growth: list[ArrayFn] = []  # return the largest products of decays
        self._replayed = None if values is None else iter(values)

    def __call__(self, make: ArrayFn) -> Array:
        if self._replayed is not None:
            return next(self._replayed)
        self.values.append(make())
        return self.values[-1]

    def result(
        self,
        fn: ArrayFn,
        *args: Array,
        tangent: ArrayFn | None = None,
    ) -> Array:
        """Returns `fn(*args)`, an array that is saved.

        Its derivative is `fn`'s, or `tangent(result, args, tangents)`. JAX 0.10 drops rules such as this one where it
        differentiates a scan twice, so what is saved has its derivative, too.
        """
        saved = self(functools.partial(fn, *args))
        if tangent is None:
            # JAX keeps the rule, which must not keep the tracers that `fn` closes over.
            fn, closed_over = jaxprs.without_closure(fn, *args)
            args = (closed_over, *args)

        @jax.custom_jvp
        def of(value: Array, *args: Array) -> Array:
            return value

        @of.defjvp
        def _(primals: Arrays, tangents: Arrays) -> tuple[Array, Array]:
            result = of(*primals)
            args = primals[1:]
            moved = tangents[1:]
            if tangent is not None:
                return result, tangent(result, args, moved)
            return result, jax.jvp(fn, args, moved)[1]

        return of(saved, *args)


def unit_lower_inverse(a: Array, precision: Any, saved: SavedForBackward) -> Array:
    """Inverts `I + a`.

    Args:
        a: [..., n, n], zero on and above the diagonal.
        precision: of the products.
        saved: saves the inverse.
    """
    times = functools.partial(jnp.matmul, precision=precision)

    def tangent(x: Array, _: Arrays, moved: Arrays) -> Array:
        return -times(times(x, moved[0]), x)

    return saved.result(functools.partial(_inverse, times=times), a, tangent=tangent)


def unit_lower_solve(
    a: Array,
    b: Array,
    precision: Any,
    saved: SavedForBackward,
) -> Array:
    """Solves `(I + a) x = b`.

    Args:
        a: [..., n, n], zero on and above the diagonal.
        b: [..., n, m].
        precision: of the products with b, as of `dot`; the inverse is never rounded.
        saved: saves the inverse, and x.

    >>> import jax.numpy as jnp
    >>> a = jnp.array([[0.0, 0.0], [2.0, 0.0]])
    >>> b = jnp.array([[1.0], [5.0]])
    >>> print(unit_lower_solve(a, b, None, SavedForBackward()).T)
    [[1. 3.]]
    """
    times = functools.partial(matmul, precision=precision)

    def tangent(x: Array, args: Arrays, moved: Arrays) -> Array:
        return times(args[0], moved[2] - times(moved[1], x))

    def solution(inverse: Array, _: Array, b: Array) -> Array:
        return times(inverse, b)

    inverse = unit_lower_inverse(a, full(precision), saved)
    return saved.result(solution, inverse, a, b, tangent=tangent)


def neighbors(steps: int) -> np.ndarray:
    """Returns for which t and s the blocks of 1, 2, 4, ... steps are neighbors in a block of twice the length, [N, T, S].

    Each pair s < t is in one level.
    """
    length = 1 << np.arange(steps.bit_length() - 1)[:, None, None]
    t_block = np.arange(steps)[:, None] // length
    s_block = np.arange(steps) // length
    return (t_block == s_block + 1) & (t_block % 2 == 1)


def _inverse(a: Array, times: ArrayFn) -> Array:
    """Inverts `I + a`.

    The doubling steps of short blocks are a loop over whole blocks of _SHORT rows, which takes less time to compile; the
    doubling steps of long blocks have fewer operations.
    """
    *lead, n, _ = a.shape
    size = 1 << (n - 1).bit_length()
    a = a.reshape(-1, n, n)  # a kernel of fewer axes compiles sooner
    if size != n:
        padding = (0, size - n)
        a = jnp.pad(a, [(0, 0), padding, padding])

    h = min(size, _SHORT)
    diagonal = _diagonal_blocks(a, h, 0, 0, 1)

    def doubling_step(blocks: Array, are_neighbors: Array) -> tuple[Array, None]:
        between = jnp.where(are_neighbors, diagonal, 0)
        return blocks - times(times(blocks, between), blocks), None

    ones = jnp.broadcast_to(jnp.eye(h, dtype=a.dtype), diagonal.shape)
    ones = like(ones, diagonal)
    blocks, _ = jax.lax.scan(doubling_step, ones, neighbors(h))
    while h < size:
        blocks = blocks.reshape(len(a), -1, 2, h, h)
        first = blocks[..., 0, :, :]
        second = blocks[..., 1, :, :]
        corner = -times(times(second, _diagonal_blocks(a, h, 1, 0, 2)), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        bottom = jnp.concatenate([corner, second], -1)
        blocks = jnp.concatenate([top, bottom], -2)
        blocks = jax.lax.optimization_barrier(blocks)  # or XLA:CPU fuses the doubling steps
        h *= 2
    inverse = blocks.reshape(len(a), size, size)
    return inverse[:, :n, :n].reshape(*lead, n, n)


def _diagonal_blocks(
    a: Array,
    h: int,
    row: int,
    column: int,
    count: int,
) -> Array:
    """Returns the block in a row and a column of each group of `count` by `count` blocks on the diagonal, [B, m, h, h]."""
    m = a.shape[-1] // (count * h)
    groups = a.reshape(-1, m, count, h, m, count, h)
    blocks = groups[:, :, row, :, :, column, :]
    is_diagonal = np.eye(m, dtype=bool)[:, None, :, None]
    return jnp.sum(jnp.where(is_diagonal, blocks, 0), -2)
