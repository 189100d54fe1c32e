"""What the reverse pass computes again instead of storing it: checks of the option, and checkpoints of the carry."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jrnn.errors import ScanError, near
from jrnn.executor import jaxprs, primitives
from jrnn.executor.chunks import RunSome, in_chunks
from jrnn.executor.jaxprs import Var

# What may be asked for: nothing, "contractions" or "sqrt", a number of checkpoints, or the names of values.
Recompute = Literal["contractions", "sqrt"] | int | Collection[str] | None


def check(recompute: Any) -> None:
    """Raises a ScanError for what `recompute` cannot be."""
    if recompute is None or (isinstance(recompute, str) and recompute in ("contractions", "sqrt")):
        return
    if isinstance(recompute, (int, np.integer)) and not isinstance(recompute, bool) and recompute >= 1:
        return
    names = isinstance(recompute, (list, tuple, set, frozenset)) and all(isinstance(n, str) for n in recompute)
    if not names:
        hint = near(recompute, ("contractions", "sqrt")) if isinstance(recompute, str) else ""
        raise ScanError(
            f"scan: recompute must be None, 'contractions', 'sqrt', a number of checkpoints, or a list of names given "
            f"with jax.ad_checkpoint.checkpoint_name, but is {recompute!r}{hint}"
        )


def check_names(names: Collection[str], eqns: Sequence[Any]) -> None:
    """Raises a ScanError where a step's equations do not give a value one of the names."""
    known = sorted(_names(eqns))
    for name in names:
        if name not in known:
            given = f"only {', '.join(map(repr, known))}" if known else "none has a name"
            raise ScanError(
                f"scan: recompute names {name!r}, but the step gives no value that name ({given}){near(name, known)}; "
                f"give it one with jax.ad_checkpoint.checkpoint_name"
            )


def _names(eqns: Sequence[Any]) -> set[str]:
    inner = (e for eqn in eqns for jaxpr in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(jaxpr))
    return {e.params["name"] for e in (*eqns, *inner) if e.primitive.name == "name"}


def is_checkpoints(recompute: Any) -> bool:
    """Whether the option asks for checkpoints of the carry."""
    return recompute == "sqrt" or isinstance(recompute, (int, np.integer))


def not_stored(recompute: str | tuple[str, ...] | None, step: Sequence[Any], had: Collection[Var]) -> set[Var]:
    """The values of a step that may not be residuals.

    Args:
        recompute: "contractions", names, or None.
        step: the step's equations.
        had: values that are at hand anyway.
    """
    if recompute is None:
        return set()
    if recompute == "contractions":
        return {v for e in step if primitives.is_cheap(e) for v in e.outvars}
    return _about(recompute, step, had)


def _about(names: Collection[str], step: Sequence[Any], had: Collection[Var]) -> set[Var]:
    """The named values, what leads to them from what is at hand, and what follows from them cheaply.

    Storing a neighbor of a named value, such as a gate for its pre-activation, would take the memory that is to be freed.
    """
    marks = [e for e in step if e.primitive.name == "name" and e.params["name"] in names]
    found = {v for e in marks for v in (*e.outvars, *jaxprs.inputs(e))}
    for eqn in reversed(step):
        if any(v in found for v in eqn.outvars):
            found.update(v for v in jaxprs.inputs(eqn) if v not in had)
    for eqn in step:
        if primitives.is_cheap(eqn) and any(v in found for v in jaxprs.inputs(eqn)):
            found.update(v for v in eqn.outvars if v not in had)
    return found


def chunk_length(recompute: Any, steps: Any) -> int | None:
    """Steps between checkpoints, or None where there are too few steps for any."""
    if not jaxprs.is_known(steps):
        raise ScanError(
            f"scan: recompute={recompute!r} divides the steps, but how many there are ({steps}) is left open; "
            "give recompute='contractions' or None, or export with a fixed number"
        )
    if steps < 2:
        return None
    pieces = math.isqrt(steps) if recompute == "sqrt" else int(recompute)
    return math.ceil(steps / min(pieces, steps))


def with_checkpoints(run: RunSome, carry: Any, xs: Any, steps: int, size: int, reverse: bool) -> tuple[Any, Any]:
    """Runs a scan in chunks of `size` steps, of which only the carries in between are kept for the reverse pass."""
    # Inside a loop nothing can be merged with the first computation, so the guard against it is not needed.
    wrap: Callable = functools.partial(jax.checkpoint, prevent_cse=False)
    return in_chunks(run, carry, xs, steps, size, reverse, wrap)
