"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError
from jrnn.executor.fission import split
from jrnn.executor.gradient import differentiable
from jrnn.executor.masking import masked
from jrnn.executor.step import trace_step


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    lengths: Any = None,
    recompute: Any = None,
    executor: str = "auto",
) -> tuple[Any, Any]:
    """Runs `step` over the leading axis of `xs`, as `jax.lax.scan` does.

    Args:
        step: `(carry, x) -> (carry, y)`; any function that `jax.lax.scan` accepts.
        carry: the initial carry, a pytree.
        xs: a pytree whose leaves are [T, ...], or None with `length`.
        length: T, needed only when xs is None.
        reverse: run from the last step to the first.
        unroll: as in `jax.lax.scan`.
        lengths: integers; a sequence past its length holds its carry and puts out zeros. Every leaf of the carry
            and of the outputs must begin with the shape of `lengths`.

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    >>> import jax.numpy as jnp
    >>> total, sums = scan(lambda c, x: (c + x, c + x), jnp.float32(0), jnp.arange(4.0))
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ScanError(f"scan: lengths must be integers, but are {lengths.dtype}")
        step = masked(step, lengths)
        leaves = jax.tree.leaves(xs)
        steps = length if not leaves else jnp.shape(leaves[0])[0]
        xs = (jnp.arange(steps), xs)
    traced = trace_step(step, carry, xs, length, reverse, unroll)
    if traced is None:
        return jax.lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)
    fission = split(traced.loop)
    core = differentiable(fission.core)
    carry_out, ys = fission.run(traced.consts, traced.init, traced.xs, core)
    return jax.tree.unflatten(traced.carry_tree, carry_out), jax.tree.unflatten(traced.ys_tree, ys)
