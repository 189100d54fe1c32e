"""`optimize_scans` and `plain_scans`: contexts that tag every loop that is traced in them, or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext
from typing import Any

from jrnn.errors import ScanError
from jrnn.loops.ir import Options, Tag, self_check, tag
from jrnn.loops.scan import executors
from jrnn.loops.wrappers import recompute, tracing


class _Context(ContextDecorator):
    """A context that is a decorator too. It holds no generator, which Python would close at exit where it was never left.

    Args:
        parts: make the contexts that it enters.
    """

    def __init__(self, *parts: Callable[[], AbstractContextManager[Any]]):
        self._parts = parts
        self._entered: list[ExitStack] = []

    def _recreate_cm(self) -> _Context:
        return _Context(*self._parts)

    def __enter__(self) -> None:
        self._entered.append(ExitStack())
        for part in self._parts:
            self._entered[-1].enter_context(part())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def optimize_scans(
    fn: Callable[..., Any] | None = None,
    *,
    executor: str = "auto",
    strict: bool = False,
    memory: float | None = None,
    compile_budget: float | None = None,
    everywhere: bool = False,
) -> Any:
    """Tags every `jax.lax.scan` that is traced in this context, so that it is lowered as `scan` is.

    With it, loops of other libraries (flax, Haiku, Equinox) train faster unchanged. It is also a decorator, with or
    without arguments. The context must be active while JAX traces: put it inside `jax.jit`, or around the first call.
    `plain_scans` excludes single loops.

    Args:
        fn: a function to decorate, or None for a context.
        executor: as in `scan`; a loop that it cannot run stays a loop. "newton" is for `scan` alone.
        strict: raise if a loop would fall back to `jax.lax.scan`, or if the chosen executor cannot run it.
        memory: as in `scan`, for each loop.
        compile_budget: on a CPU, how many seconds longer than with `jax.lax.scan` the program of a loop may take to compile,
            by an estimate that may be wrong by a factor of three. A strategy beyond it is refused for this loop, and the
            next best one runs, or `jax.lax.scan`; `explain` prints the reason. 0 allows no longer compilation. Loops of
            `scan` in the context are not bounded. None: no bound. `explain` prints from how many calls on a strategy pays.
        everywhere: tag the loops of the whole process, in all threads, from this call on. A `with` block around it ends
            that; without one it holds until the process ends. Of several, the last one that began holds, whichever ends
            first. A thread inside of `jax.experimental.xla_metadata.set_xla_metadata` is not reached.

    Returns:
        A context that is a decorator too; or the decorated function, if `fn` is given. With `everywhere`, a context only.

    Raises:
        ScanError: if the executor is unknown or for `scan` alone, memory is not positive, or compile_budget is not a number
            of at least 0.
        TypeError: if `fn` is not callable, or is given with `everywhere`.

    >>> import jax, jrnn, jax.numpy as jnp
    >>> @jax.jit
    ... @optimize_scans
    ... def total(xs):
    ...     return jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    >>> print(total(jnp.arange(4.0)))
    6.0
    >>> with optimize_scans(executor="scan"):
    ...     print(jax.lax.scan(lambda c, x: (c + x, None), 0.0, jnp.arange(4.0))[0])
    6.0
    >>> growth = lambda n, x: (3.4 * n * (1 - n) * (1 - 0.01 * x), n)
    >>> with optimize_scans(compile_budget=0):
    ...     print(jrnn.explain(lambda xs: jax.lax.scan(growth, 0.3, xs), jnp.ones(16_000)).loops[0].strategy)
    lax.scan
    >>> with optimize_scans(everywhere=True):  # or, at the start of a program: optimize_scans(everywhere=True)
    ...     print(jax.lax.scan(lambda c, x: (c + x, None), 0.0, jnp.arange(4.0))[0])
    6.0
    """
    if fn is not None and not callable(fn):
        raise TypeError(
            f"optimize_scans: the positional argument must be the function to decorate, but is {fn!r}; "
            "give options by name, as in optimize_scans(executor='scan')"
        )
    if executors.name_of(executor) == executors.NEWTON:
        raise ScanError(f"optimize_scans: executor {executor!r} is for jrnn.scan alone; use 'auto'")
    recompute.check_memory(memory)
    _check_compile_budget(compile_budget)
    of_loops = Tag(Options(executor, None, bool(strict), memory, compile_budget=compile_budget))
    if everywhere:
        if fn is not None:
            raise TypeError(
                "optimize_scans: everywhere=True is for a process, not for a function; call it without one"
            )
        process = ExitStack()
        process.callback(tracing.tag_everywhere(tag.metadata(of_loops)))
        return process
    context = _Context(
        lambda: nullcontext(self_check.check()),
        lambda: tag.tagged(of_loops),
        lambda: tag.plain(False),
    )
    return context if fn is None else context(fn)


def _check_compile_budget(budget: Any) -> None:
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (number and budget >= 0):
        raise ScanError(
            f"optimize_scans: compile_budget must be None or seconds, such as 2.0, but is {budget!r}"
        )


def plain_scans(fn: Callable[..., Any] | None = None) -> Any:
    """Leaves every loop that is traced in this context to JAX: also loops of `jrnn.scan`, and inside `optimize_scans`.

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
        raise TypeError(
            f"plain_scans: the argument must be the function to decorate, but is {fn!r}"
        )
    context = _Context(tag.plain_loops, lambda: tag.plain(True))
    return context if fn is None else context(fn)


def unverified() -> AbstractContextManager[None]:
    """Uses derived programs in this context without comparing them with their loops.

    Chunks, solutions in rounds and the like are derived by reading the equations of a step. Before its first use, such a
    program and the loop run on small random numbers; one that disagrees is not used. That takes up to 0.3 s for each
    structure of a step. The context must be active while JAX traces.

    >>> import jax.numpy as jnp
    >>> from jrnn.loops import scan
    >>> with unverified():
    ...     print(scan(lambda c, x: (c + x, None), 0.0, jnp.arange(4.0), executor="associative")[0])
    6.0
    """
    context: AbstractContextManager[None] = tag.verified(False)
    return context
