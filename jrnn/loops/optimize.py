"""`optimize_scans` and `plain_scans`: contexts that mark every loop that is traced in them, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.extend import source_info_util

from jrnn.errors import ScanError
from jrnn.loops import executors, mark, recompute
from jrnn.loops.mark import Options

source_info_util.register_exclusion(__file__)  # plans show the user's lines instead


def optimize_scans(
    fn: Callable | None = None, *, executor: str = "auto", strict: bool = False, memory: int | float | None = None
) -> Any:
    """Marks every `jax.lax.scan` that is traced in this context, so that it is lowered as `scan` is.

    With it, loops of other libraries (flax, Haiku, Equinox) train faster unchanged. It is also a decorator, with or
    without arguments. The context must be active while JAX traces: put it inside `jax.jit`, or around the first call.
    `plain_scans` excludes single loops.

    Args:
        fn: a function to decorate, or None for a context.
        executor: as in `scan`; a loop that it cannot run stays a loop. "cudnn" and "newton" are for `scan` alone.
        strict: raise if a loop would fall back to `jax.lax.scan`, or if the chosen executor cannot run it.
        memory: as in `scan`, for each loop.

    Returns:
        A context that is a decorator too; or the decorated function, if `fn` is given.

    Raises:
        ScanError: if the executor is unknown or for `scan` alone, or memory is not positive.
        TypeError: if `fn` is not callable.

    >>> import jax, jax.numpy as jnp
    >>> @jax.jit
    ... @optimize_scans
    ... def total(xs):
    ...     return jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    >>> print(total(jnp.arange(4.0)))
    6.0
    >>> with optimize_scans(executor="scan"):
    ...     print(jax.lax.scan(lambda c, x: (c + x, None), 0.0, jnp.arange(4.0))[0])
    6.0
    """
    if fn is not None and not callable(fn):
        raise TypeError(
            f"optimize_scans: the positional argument must be the function to decorate, but is {fn!r}; "
            "give options by name, as in optimize_scans(executor='scan')"
        )
    if not executors.find(executor).on_marked_loops:
        raise ScanError(f"optimize_scans: executor {executor!r} is for jrnn.scan alone; use 'auto'")
    recompute.check_memory(memory)
    options = Options(executor, None, bool(strict), memory)

    @contextmanager
    def marking() -> Iterator[None]:
        with mark.marked(options), mark.plain(False):
            yield

    context = marking()
    return context if fn is None else context(fn)


def plain_scans(fn: Callable | None = None) -> Any:
    """Leaves every loop that is traced in this context to JAX: those of `jrnn.scan` too, and inside `optimize_scans`.

    Use it to exclude one loop, or to find out whether a result depends on what jrnn does. Of `optimize_scans` and
    `plain_scans`, the innermost holds.

    Args:
        fn: a function to decorate, or None for a context.

    Returns:
        A context that is a decorator too; or the decorated function, if `fn` is given.

    Raises:
        TypeError: if `fn` is not callable.

    >>> import jax, jrnn, jax.numpy as jnp
    >>> def total(xs):
    ...     with plain_scans():
    ...         return jrnn.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    >>> jrnn.explain(total, jnp.arange(4.0)).loops
    ()
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"plain_scans: the argument must be the function to decorate, but is {fn!r}")

    @contextmanager
    def unmarking() -> Iterator[None]:
        with mark.unmarked(), mark.plain(True):
            yield

    context = unmarking()
    return context if fn is None else context(fn)
