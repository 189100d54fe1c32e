"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError
from jrnn.executor import recompute as recomputation
from jrnn.executor.executors import Request, choose

# `with as_written(True):` traces scans as `jax.lax.scan`s of the steps as they are: for what reads a jaxpr, not runs it.
as_written = jax.make_user_context(False)


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

    Contractions that need no carry are done for all steps before or after the loop, the gradients of weights are one
    contraction after the reverse loop, and the reverse loop stores little; `explain_scan` tells what was done.

    Args:
        step: `(carry, x) -> (carry, y)`; any function that `jax.lax.scan` accepts.
        carry: the initial carry, a pytree.
        xs: a pytree whose leaves are [T, ...], or None with `length`.
        length: T, needed only when xs is None.
        reverse: run from the last step to the first.
        unroll: as in `jax.lax.scan`.
        lengths: integers; a sequence past its length holds its carry and puts out zeros. Every leaf of the carry
            and of the outputs must begin with the shape of `lengths`.
        recompute: what the reverse pass computes again instead of storing it. None: what is cheap to compute and dear
            to store. "contractions": everything but the results of contractions. A list of names: also the values that
            the step names so with `jax.ad_checkpoint.checkpoint_name`, what leads to them, and what follows from them
            cheaply. A number: everything, from so many checkpoints of the carry; "sqrt": from sqrt(T) of them.
        executor: "scan", "associative" (steps that are affine in the carry with a diagonal Jacobian, and whose carries stay
            finite), "cudnn" (an `LstmStep` in float32 on CUDA), or "auto".

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    Raises:
        ScanError: lengths that do not fit, an unknown or refusing executor, an impossible `recompute`.

    >>> import jax.numpy as jnp
    >>> total, sums = scan(lambda c, x: (c + x, c + x), jnp.float32(0), jnp.arange(4.0))
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    request = request_of(step, carry, xs, length, reverse, unroll, lengths, recompute)
    if as_written.value:
        step, xs = request.masked
        return jax.lax.scan(step, carry, xs, length=length, reverse=reverse)
    return choose(request, executor)[0].run(request)


def request_of(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
    lengths: Any,
    recompute: Any,
) -> Request:
    """Checks what `scan` is given."""
    recomputation.check(recompute)
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ScanError(f"scan: lengths must be integers, but are {lengths.dtype}")
    return Request(step, carry, xs, length, reverse, unroll, lengths, recompute, jax.default_backend())
