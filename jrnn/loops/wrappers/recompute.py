"""The option `recompute`: what the reverse pass computes again instead of storing it.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jrnn import jaxprs
from jrnn.errors import ScanError, near
from jrnn.jaxprs import Eqn, Var, primitives

# None, "contractions", "sqrt", a number of checkpoints, or the names of values.
Recompute = Literal["contractions", "sqrt"] | int | Collection[str] | None
_COLLECTIONS = (list, tuple, set, frozenset)


def check(recompute: object) -> None:
    """Raises a ScanError if `recompute` is not a `Recompute`."""
    is_integer = isinstance(recompute, (int, np.integer)) and not isinstance(recompute, bool)
    if recompute is None or (is_integer and recompute >= 1):
        return
    if isinstance(recompute, _COLLECTIONS) and all(isinstance(name, str) for name in recompute):
        return
    hint = ""
    if isinstance(recompute, str):
        if recompute in ("contractions", "sqrt"):
            return
        hint = near(recompute, ("contractions", "sqrt"))
    raise ScanError(
        f"scan: recompute must be None, 'contractions', 'sqrt', a number of checkpoints, or a list of names given "
        f"with jax.ad_checkpoint.checkpoint_name, but is {recompute!r}{hint}"
    )


def hashable(recompute: Recompute) -> Any:
    """Returns names as a tuple, and other values as they are."""
    return tuple(sorted(recompute)) if isinstance(recompute, _COLLECTIONS) else recompute


def check_memory(memory: object) -> None:
    """Raises a ScanError if `memory` is not None or a positive factor."""
    number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
    if memory is not None and not (number and memory > 0):
        raise ScanError(
            f"scan: memory must be None or a positive factor of what jax.lax.scan needs, such as 2.0, but is {memory!r}"
        )


def check_names(names: Collection[str], eqns: Sequence[Eqn]) -> None:
    """Raises a ScanError if the equations of a step give no value one of the names."""
    known_names = set()
    for eqn in jaxprs.nested_equations(eqns, jaxprs.sub_jaxprs):
        if eqn.primitive.name == "name":
            known_names.add(eqn.params["name"])
    known = sorted(known_names)
    for name in names:
        if name not in known:
            names_known = f"only {', '.join(map(repr, known))}" if known else "none has a name"
            raise ScanError(
                f"scan: recompute names {name!r}, but the step gives no value that name ({names_known}){near(name, known)}; "
                f"give it one with jax.ad_checkpoint.checkpoint_name"
            )


def segment_size(recompute: Any, steps: Any) -> int | None:
    """Returns the most steps of a segment for "sqrt" or a number of checkpoints, or None if the loop is not divided."""
    if steps is not None and not jaxprs.is_known(steps):
        raise ScanError(
            f"scan: recompute={recompute!r} divides the steps, but their number ({steps}) is symbolic; "
            "give recompute='contractions' or None, or export with a fixed number"
        )
    if steps is None or steps < 2 or jax.config.jax_disable_jit:
        return None
    count = math.isqrt(steps) if recompute == "sqrt" else int(recompute)
    return math.ceil(steps / min(count, steps))


def not_stored(
    recompute: str | tuple[str, ...] | None, step: Sequence[Eqn], available: Collection[Var]
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
        return set(jaxprs.producers(filter(primitives.is_cheap, step)))
    unstored: set[Var] = set()
    for eqn in step:
        if eqn.primitive.name == "name" and eqn.params["name"] in recompute:
            unstored.update(eqn.outvars, jaxprs.inputs(eqn))
    for eqn in reversed(step):
        if not unstored.isdisjoint(eqn.outvars):
            unstored.update(v for v in jaxprs.inputs(eqn) if v not in available)
    for eqn in step:
        if primitives.is_cheap(eqn) and not unstored.isdisjoint(jaxprs.inputs(eqn)):
            unstored.update(v for v in eqn.outvars if v not in available)
    return unstored
