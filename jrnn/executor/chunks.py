"""A loop over chunks of steps, which needs memory for one chunk at a time.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# `(carry, xs, steps) -> (carry, ys)` over some of the steps.
RunSome = Callable[[Any, Any, int], tuple[Any, Any]]


def in_chunks(
    run: RunSome, carry: Any, xs: Any, steps: int, size: int, reverse: bool, wrap: Callable = lambda f: f
) -> tuple[Any, Any]:
    """`(last carry, stacked ys)` of a loop that is run by a loop over chunks of steps.

    Args:
        run: runs some of the steps.
        carry, xs: what the whole loop is given, pytrees.
        steps: T.
        size: steps a chunk; the last may have fewer.
        reverse: whether time runs backwards.
        wrap: put around the function that runs one chunk, such as `jax.checkpoint`.
    """
    whole = steps // size
    head = jax.tree.map(lambda x: jnp.reshape(x[: whole * size], (whole, size, *x.shape[1:])), xs)
    tail = jax.tree.map(lambda x: x[whole * size :], xs)

    def run_head(carry: Any) -> tuple[Any, Any]:
        body = wrap(lambda carry, chunk: run(carry, chunk, size))
        carry, ys = jax.lax.scan(body, carry, head, length=whole, reverse=reverse)
        return carry, jax.tree.map(lambda y: jnp.reshape(y, (whole * size, *y.shape[2:])), ys)

    rest = steps - whole * size
    if not rest:
        return run_head(carry)
    run_tail = wrap(lambda carry, chunk: run(carry, chunk, rest))
    if reverse:
        carry, late = run_tail(carry, tail)
        carry, early = run_head(carry)
    else:
        carry, early = run_head(carry)
        carry, late = run_tail(carry, tail)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
