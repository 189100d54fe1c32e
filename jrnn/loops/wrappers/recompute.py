"""The option `recompute`: what the reverse pass computes again instead of storing it.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from jrnn import jaxprs
from jrnn.errors import ScanError, near
from jrnn.jaxprs import Eqn, Var, primitives

# None, "contractions", "sqrt", a number of checkpoints, or the names of values.
Recompute = Literal["contractions", "sqrt"] | int | Collection[str] | None


def check(recompute: Any) -> None:
    """Raises a ScanError if `recompute` is not a `Recompute`."""
    if recompute is None or (isinstance(recompute, str) and recompute in ("contractions", "sqrt")):
        return
    if (
        isinstance(recompute, (int, np.integer))
        and not isinstance(recompute, bool)
        and recompute >= 1
    ):
        return
    if isinstance(recompute, (list, tuple, set, frozenset)) and all(
        isinstance(n, str) for n in recompute
    ):
        return
    hint = near(recompute, ("contractions", "sqrt")) if isinstance(recompute, str) else ""
    raise ScanError(
        f"scan: recompute must be None, 'contractions', 'sqrt', a number of checkpoints, or a list of names given "
        f"with jax.ad_checkpoint.checkpoint_name, but is {recompute!r}{hint}"
    )


def hashable(recompute: Any) -> Any:
    """Returns names as a tuple, and other values as they are."""
    return (
        tuple(sorted(recompute))
        if isinstance(recompute, (list, tuple, set, frozenset))
        else recompute
    )


def check_memory(memory: Any) -> None:
    """Raises a ScanError if `memory` is not None or a positive factor."""
    number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
    if memory is not None and not (number and memory > 0):
        raise ScanError(
            f"scan: memory must be None or a positive factor of what jax.lax.scan needs, such as 2.0, but is {memory!r}"
        )


def check_names(names: Collection[str], eqns: Sequence[Eqn]) -> None:
    """Raises a ScanError if the equations of a step give no value one of the names."""
    inner = (
        e for eqn in eqns for jaxpr in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(jaxpr)
    )
    known = sorted({e.params["name"] for e in (*eqns, *inner) if e.primitive.name == "name"})
    for name in names:
        if name not in known:
            names_known = f"only {', '.join(map(repr, known))}" if known else "none has a name"
            raise ScanError(
                f"scan: recompute names {name!r}, but the step gives no value that name ({names_known}){near(name, known)}; "
                f"give it one with jax.ad_checkpoint.checkpoint_name"
            )


def not_stored(
    recompute: str | tuple[str, ...] | None, step: Sequence[Any], available: Collection[Var]
) -> set[Var]:
    """Returns the values of a step that may not be residuals.

    For names, these are the named values, the values that lead to them, and the values that follow from them cheaply.
    Storing a neighbor of a named value, such as a gate for its pre-activation, would take the memory that is to be freed.

    Args:
        recompute: "contractions", names, or None.
        step: the step's equations.
        available: the values that are available without being stored.
    """
    if recompute is None:
        return set()
    if recompute == "contractions":
        return {v for e in step if primitives.is_cheap(e) for v in e.outvars}
    named = [e for e in step if e.primitive.name == "name" and e.params["name"] in recompute]
    unstored = {v for e in named for v in (*e.outvars, *jaxprs.inputs(e))}
    for eqn in reversed(step):
        if any(v in unstored for v in eqn.outvars):
            unstored.update(v for v in jaxprs.inputs(eqn) if v not in available)
    for eqn in step:
        if primitives.is_cheap(eqn) and any(v in unstored for v in jaxprs.inputs(eqn)):
            unstored.update(v for v in eqn.outvars if v not in available)
    return unstored
