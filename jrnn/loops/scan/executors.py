"""The option `executor`: its names, what cannot be combined with them, and steps that they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jrnn.errors import ScanError, near
from jrnn.loops.compile import AUTO, ON_CPU, REFUSALS, SCAN
from jrnn.loops.ir import traced_loops
from jrnn.loops.newton import Newton
from jrnn.loops.wrappers.recompute import check_names

ASSOCIATIVE = "associative"
NATIVE = "native"
CHUNKS = "chunks"  # decided when a loop is differentiated (`strategies/try_chunks.py`)
NEWTON = "newton"  # decided when a loop is traced
# Why an option cannot be given with an executor.
_STORES_STATES = "keeps all states, which recompute forbids"
_ALL_AT_ONCE = "computes all steps at once, and until stops between them"
_EXCLUDES_RECOMPUTE = {ASSOCIATIVE: _STORES_STATES, NEWTON: _STORES_STATES}
_EXCLUDES_UNTIL = {ASSOCIATIVE: _ALL_AT_ONCE, NATIVE: _ALL_AT_ONCE, NEWTON: _ALL_AT_ONCE}
# The executors that tests and benchmarks compare by default: each runs a loop as it is asked to, or raises.
COMPARED_EXECUTORS = (AUTO, SCAN, ASSOCIATIVE, NATIVE, NEWTON)


def name_of(executor: Any) -> str:
    """Returns the name of what a caller asks for; raises a ScanError if there is none."""
    if isinstance(executor, Newton):
        return NEWTON
    every_name = (AUTO, CHUNKS, *ON_CPU, NEWTON)
    if isinstance(executor, str) and executor in every_name:
        return executor
    names = ", ".join(every_name)
    hint = near(str(executor), every_name)
    raise ScanError(f"scan: there is no executor {executor!r}; there are {names}{hint}")


def check_options(executor: str, recompute: Any, until: Any) -> None:
    """Raises a ScanError if an option is given that cannot be combined with an executor."""
    why = None
    if recompute is not None:
        why = _EXCLUDES_RECOMPUTE.get(executor)
    if until is not None:
        why = why or _EXCLUDES_UNTIL.get(executor)
    if why is not None:
        raise ScanError(f"scan: executor {executor!r} {why}; use 'auto' or 'scan'")


def check_step(
    executor: str, names: Any, loop: Callable[[Any, Any], Any], init: Any, xs: Any
) -> None:
    """Raises a ScanError if an executor cannot run the step of a loop, or if no value of the step has a name.

    Args:
        executor: the name of the executor.
        names: the option `recompute`, which may be a tuple of names.
        loop: runs `jax.lax.scan` from an initial carry and inputs.
        init, xs: these.
    """
    refusal = REFUSALS.get(executor)
    has_names = isinstance(names, tuple)
    if refusal is None and not has_names:
        return
    for traced in traced_loops(loop, init, xs):
        if has_names:
            check_names(names, traced.eqns)
        why = None if refusal is None else refusal(traced)
        if why is not None:
            raise ScanError(
                f"scan: executor {executor!r} cannot run this step ({why}); use 'auto' or 'scan'"
            )
