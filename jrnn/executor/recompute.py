"""What the reverse pass computes again instead of storing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ScanError, near
from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Var

Forbidden = Callable[[Sequence[Any], Collection[Var]], set[Var]]


def check(recompute: Any) -> None:
    """Raises a ScanError for what `recompute` cannot be."""
    if recompute is None or recompute in ("contractions", "sqrt"):
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


def forbidden(recompute: Any, known: Collection[str]) -> Forbidden | None:
    """The rule of what must not be stored, for a step that gives values the names `known`: a function of the equations
    that a gradient knows the step by, and of what is at hand anyway."""
    if recompute == "contractions":
        return lambda step, had: {v for e in step if e.primitive.name in jaxprs.CHEAP for v in e.outvars}
    if not isinstance(recompute, (list, tuple, set, frozenset)):
        return None
    for name in recompute:
        if name not in known:
            given = f"only {', '.join(map(repr, sorted(known)))}" if known else "none has a name"
            raise ScanError(
                f"scan: recompute names {name!r}, but the step gives no value that name ({given}){near(name, known)}; "
                f"give it one outside of inner loops with jax.ad_checkpoint.checkpoint_name"
            )
    return lambda step, had: _about(frozenset(recompute), step, had)


def _about(names: Collection[str], step: Sequence[Any], had: Collection[Var]) -> set[Var]:
    """The named values, what leads to them from what is at hand, and what follows from them cheaply.

    Storing a neighbour of a named value, such as a gate for its pre-activation, would take the memory that it was to free.
    """
    marks = [e for e in step if e.primitive.name == "name" and e.params["name"] in names]
    found = {v for e in marks for v in (*e.outvars, *jaxprs.inputs(e))}
    for eqn in reversed(step):
        if any(v in found for v in eqn.outvars):
            found.update(v for v in jaxprs.inputs(eqn) if v not in had)
    for eqn in step:
        if eqn.primitive.name in jaxprs.CHEAP and any(v in found for v in jaxprs.inputs(eqn)):
            found.update(v for v in eqn.outvars if v not in had)
    return found


def chunk_length(recompute: Any, steps: int) -> int | None:
    """Steps between checkpoints, or None when there are none."""
    if recompute != "sqrt" and not isinstance(recompute, (int, np.integer)):
        return None
    if not jaxprs.is_known(steps):
        raise ScanError(
            f"scan: recompute={recompute!r} divides the steps, but how many there are ({steps}) is left open; "
            "give recompute='contractions' or None, or export with a fixed number"
        )
    pieces = math.isqrt(steps) if recompute == "sqrt" else recompute
    if steps < 2:
        return None
    return math.ceil(steps / min(int(pieces), steps))


def in_chunks(
    run: Callable[[Any, Any, int], tuple[Any, Any]], carry: Any, xs: Any, steps: int, size: int, reverse: bool
) -> Any:
    """Runs a scan in chunks of `size` steps, of which only the carries in between are kept for the reverse pass.

    Args:
        run: `(carry, xs, steps) -> (carry, ys)` over some of the steps.
        carry, xs: what the whole scan was given.
        steps: T.
        size: steps a chunk; the last may have fewer.
        reverse: whether time runs backwards.
    """
    whole = steps // size
    head = jax.tree.map(lambda x: jnp.reshape(x[: whole * size], (whole, size, *x.shape[1:])), xs)
    tail = jax.tree.map(lambda x: x[whole * size :], xs)

    def body(carry: Any, chunk: Any) -> tuple[Any, Any]:
        return run(carry, chunk, size)

    def run_head(carry: Any) -> tuple[Any, Any]:
        # Inside a loop nothing can be merged with the first computation, so the guard against it is not needed.
        carry, ys = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, head, length=whole, reverse=reverse)
        return carry, jax.tree.map(lambda y: jnp.reshape(y, (whole * size, *y.shape[2:])), ys)

    rest = steps - whole * size
    if not rest:
        return run_head(carry)
    run_tail = jax.checkpoint(lambda carry, chunk: run(carry, chunk, rest))
    if reverse:
        carry, late = run_tail(carry, tail)
        carry, early = run_head(carry)
    else:
        carry, early = run_head(carry)
        carry, late = run_tail(carry, tail)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
