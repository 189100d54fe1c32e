"""Linear recurrences `d[t] = J[t] d[t-1] + b[t]`, solved by a parallel prefix, with exact derivatives in both modes.

Two neighboring steps are one step of the same form: `(J', b')` after `(J, b)` is `(J' J, J' b + b')`. This composition is
associative, so that log2 T doubling steps return all prefixes (Blelloch, "Prefix Sums and Their Applications", 1990):

    t:        0     1     2     3     4     5     6     7
    step 1:   0    0-1   1-2   2-3   3-4   4-5   5-6   6-7
    step 2:   0    0-1   0-2   0-3   1-4   2-5   3-6   4-7
    step 3:   0    0-1   0-2   0-3   0-4   0-5   0-6   0-7

`jax.lax.associative_scan` does so with about 2 T compositions. Its derivative would store all doubling steps; the derivative
here is the same recurrence, from the last step to the first.

Shapes: T time, A batch axes, M the size of a block. d and b are [T, A, M], J is [T, A, M, M]. d before the first step is 0.
Where few carries read each other elementwise, d and b may be lists of M arrays [T, A], and J M lists of them: accelerators
compute arrays without short axes faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add, mul
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_ELEMENTWISE = 4  # products of blocks up to this size are sums of elementwise products


@jax.custom_batching.custom_vmap
def all_finite(arrays: Sequence[Any]) -> Any:
    """Returns True if all elements of all arrays are finite: 0 times a number that is not finite is NaN."""
    zeros: dict[
        Any, Any
    ] = {}  # of each type: one sum for arrays of equal shapes is fewer kernels to compile
    for a in arrays:
        kind = jnp.shape(a), jnp.result_type(a)
        zero = a * 0
        zeros[kind] = zero + zeros[kind] if kind in zeros else zero
    return reduce(jnp.logical_and, [jnp.sum(z) == 0 for z in zeros.values()])


@all_finite.def_vmap
def _(
    size: int,
    batched: Any,
    arrays: Sequence[Any],
) -> tuple[Any, bool]:
    return all_finite(
        arrays
    ), False  # one condition for the whole batch: `vmap` of a condition runs both branches


def _dot(row: Any, column: Any) -> Any:
    return reduce(add, list(map(mul, row, column)))


def matvec(j: Any, d: Any) -> Any:
    """Returns the products of blocks and vectors."""
    if isinstance(j, list):
        return [_dot(row, d) for row in j]
    size = j.shape[-1]
    if size <= _ELEMENTWISE:
        return reduce(add, [j[..., k] * d[..., k, None] for k in range(size)])
    return jnp.einsum("...ij,...j->...i", j, d, precision="highest")


def _composed(r: Any, p: Any) -> Any:
    if isinstance(r, list):
        columns = list(zip(*p))
        rows = []
        for row in r:
            rows.append([_dot(row, column) for column in columns])
        return rows
    size = r.shape[-1]
    if size <= _ELEMENTWISE:
        return reduce(add, [r[..., :, k, None] * p[..., None, k, :] for k in range(size)])
    return jnp.einsum("...ij,...jk->...ik", r, p, precision="highest")


def associative_solve(j: Any, b: Any) -> Any:
    """Solves a recurrence in about 2 log2 T doubling steps. Products of blocks may overflow where the solution does not."""

    def compose(first: Any, second: Any) -> Any:
        p, q = first
        r, s = second
        return _composed(r, p), jax.tree.map(add, matvec(r, q), s)

    return lax.associative_scan(compose, (j, b))[1]


def associative_max(j: Array, b: Array) -> Array:
    """Solves `w[t] = max(b[t], j[t] w[t-1])`, with the largest products in place of sums; all numbers are at least 0."""

    def compose(first: Any, second: Any) -> Any:
        p, q = first
        r, s = second
        pairs = jnp.max(r[..., :, :, None] * p[..., None, :, :], -2)
        return pairs, jnp.maximum(jnp.max(r * q[..., None, :], -1), s)

    return lax.associative_scan(compose, (j, b))[1]


def shift_one_step(d: Array) -> Array:
    """Returns d shifted by a step: d[t-1], and 0 at the first step."""
    return jnp.concatenate([jnp.zeros_like(d[:1]), d[:-1]])


def solve(j: Array, b: Array) -> Array:
    """Solves a recurrence. If the doubling steps overflow, it is solved step by step. Differentiable in `j` and `b`."""

    def operator(d: Array) -> Array:
        return d - matvec(j, shift_one_step(d))

    def forward(_: Any, b: Array) -> Array:
        return _finite(j, b)

    def transpose_solve(_: Any, g: Array) -> Array:
        # The adjoint: a[t] = J[t+1]^T a[t+1] + g[t], the same recurrence from the last step to the first.
        later = jnp.concatenate([j[1:], jnp.zeros_like(j[:1])])
        return _finite(jnp.swapaxes(later, -1, -2)[::-1], g[::-1])[::-1]

    return lax.custom_linear_solve(operator, b, forward, transpose_solve)


def _finite(j: Array, b: Array) -> Array:
    d = associative_solve(j, b)
    steps = b.shape[0]
    start = jnp.where(jnp.all(jnp.isfinite(d)), steps, 0)

    def step(state: Any) -> Any:
        t, last, d = state
        now = matvec(j[t], last) + b[t]
        return t + 1, now, lax.dynamic_update_index_in_dim(d, now, t, 0)

    return lax.while_loop(lambda state: state[0] < steps, step, (start, jnp.zeros_like(b[0]), d))[2]
