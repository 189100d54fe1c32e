"""A step in the form that is read for affine states: inner loops and conditions are expanded.

A short inner loop is unrolled. A condition whose branches are affine in what they read becomes a selection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.jaxprs.jax_internals import jaxpr_as_fun
from jrnn.loops.ir import ScanParams

_LONGEST = 8  # steps of an inner loop that is unrolled, and branches of a condition


def expand_control(closed: Any) -> jaxprs.Program:
    """Returns the program of a closed jaxpr with calls, short inner loops and affine conditions expanded."""
    program = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    if not any(map(_expansion, program.eqns)):
        return program

    def rule(eqn: Eqn, *operands: Any) -> list[Any] | None:
        expansion = _expansion(eqn)
        return expansion and expansion(*operands)

    return expand_control(
        jax.make_jaxpr(functools.partial(program.run, rule=rule))(*(v.aval for v in program.invars))
    )


def _expansion(eqn: Eqn) -> Callable[..., list[Any]] | None:
    """Returns a function that computes the results of an equation that is expanded; None for other equations."""
    name = eqn.primitive.name
    params = eqn.params
    if name in _PARTS:
        return functools.partial(_PARTS[name], **params)
    if eqn.effects:
        return None
    if name == "scan" and jaxprs.is_known(params["length"]) and params["length"] <= _LONGEST:
        return functools.partial(_unrolled, params)
    if name == "cond" and len(params["branches"]) <= _LONGEST:
        bodies = [jaxprs.inlined(b, jaxprs.CALLS_AND_CHECKPOINTS) for b in params["branches"]]
        if all(_is_safe(e) for body in bodies for e in body.eqns):
            return functools.partial(_selected, params["branches"])
    return None


def _is_safe(eqn: Eqn) -> bool:
    """Returns True if finite operands make finite derivatives: a branch that is not taken adds 0 to a gradient, and no NaN.

    Lookups may fill with NaN.
    """
    row = primitives.row_of(eqn)
    return eqn.primitive.name == "convert_element_type" or (
        row.linear != "" and row.kind not in ("lookup", "update")
    )


def _selected(branches: Sequence[Any], which: Any, *operands: Any) -> list[Any]:
    *first, results = [jaxpr_as_fun(b)(*operands) for b in branches]
    for i, case in reversed(list(enumerate(first))):
        results = [jax.lax.select_n(which == i, other, here) for here, other in zip(case, results)]
    return results


def _unrolled(params: dict[str, Any], *args: Any) -> list[Any]:
    scan = ScanParams.of(params)
    stacks = []
    consts, carry, xs = scan.partition(args)
    count = range(scan.length)
    for t in reversed(count) if scan.reverse else count:
        results = jaxpr_as_fun(scan.jaxpr)(*consts, *carry, *(x[t] for x in xs))
        carry = results[: scan.n_carry]
        stacks.append(results[scan.n_carry :])
    stacks = stacks[::-1] if scan.reverse else stacks
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacks))]


def _split(x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [
        jax.lax.slice_in_dim(x, end - n, end, axis=axis) for n, end in zip(map(int, sizes), ends)
    ]


def _unstack(x: Any, axis: int) -> list[Any]:
    return [jax.lax.squeeze(part, [axis]) for part in _split(x, [1] * x.shape[axis], axis)]


def _stack(*xs: Any, axis: int) -> list[Any]:
    return [jax.lax.concatenate([jax.lax.expand_dims(x, [axis]) for x in xs], axis)]


# They are slices and a concatenation to the rules of forms.
_PARTS: dict[str, Callable[..., list[Any]]] = {
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
}
