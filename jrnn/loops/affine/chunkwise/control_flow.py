"""A step in the form that is read for affine states: inner loops and conditions are expanded.

A short inner loop is unrolled. A condition whose branches are affine in what they read becomes a selection.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.jaxprs.jax_internals import jaxpr_as_fun
from jrnn.loops.affine.chunkwise.guarded import Arrays, ArraysFn
from jrnn.loops.ir import ScanParams

_LONGEST = 8  # steps of an inner loop that is unrolled, and branches of a condition


def expand_control(closed: Any) -> jaxprs.Program:
    """Returns the program of a closed jaxpr with calls, short inner loops and affine conditions expanded."""
    program = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    if not any(map(_expansion, program.eqns)):
        return program

    def rule(eqn: Eqn, *operands: Array) -> Arrays | None:
        expansion = _expansion(eqn)
        return expansion and expansion(*operands)

    run = functools.partial(program.run, rule=rule)
    types = [v.aval for v in program.invars]
    return expand_control(jax.make_jaxpr(run)(*types))


def _expansion(eqn: Eqn) -> ArraysFn | None:
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
        eqns: list[Eqn] = []
        for branch in params["branches"]:
            eqns += jaxprs.inlined(branch, jaxprs.CALLS_AND_CHECKPOINTS).eqns
        if all(map(_is_safe, eqns)):
            return functools.partial(_selected, params["branches"])
    return None


def _is_safe(eqn: Eqn) -> bool:
    """Returns True if finite operands make finite derivatives: a branch that is not taken adds 0 to a gradient, and no NaN.

    Lookups may fill with NaN.
    """
    if eqn.primitive.name == "convert_element_type":
        return True
    row = primitives.row_of(eqn)
    return row.linear != "" and row.kind not in ("lookup", "update")


def _selected(branches: Sequence[Any], which: Array, *operands: Array) -> Arrays:
    """Returns the results of one of several branches; all branches are computed."""
    *first, results = [jaxpr_as_fun(branch)(*operands) for branch in branches]
    for i, case in reversed(list(enumerate(first))):
        select = functools.partial(jax.lax.select_n, which == i)
        results = list(map(select, results, case))
    return results


def _unrolled(params: dict[str, Any], *args: Array) -> Arrays:
    scan = ScanParams.of(params)
    step = jaxpr_as_fun(scan.jaxpr)
    consts, carry, xs = scan.partition(args)
    steps = range(scan.length)
    outputs = []
    for t in reversed(steps) if scan.reverse else steps:
        inputs = [x[t] for x in xs]
        results = step(*consts, *carry, *inputs)
        carry = results[: scan.n_carry]
        outputs.append(results[scan.n_carry :])
    if scan.reverse:
        outputs.reverse()
    return [*carry, *map(jnp.stack, zip(*outputs))]


def _split(x: Array, sizes: Sequence[int], axis: int) -> Arrays:
    parts = []
    start = 0
    for size in map(int, sizes):
        parts.append(jax.lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return parts


def _unstack(x: Array, axis: int) -> Arrays:
    parts = _split(x, [1] * x.shape[axis], axis)
    return [jax.lax.squeeze(part, [axis]) for part in parts]


def _stack(*xs: Array, axis: int) -> Arrays:
    parts = [jax.lax.expand_dims(x, [axis]) for x in xs]
    return [jax.lax.concatenate(parts, axis)]


# They are slices and a concatenation to the rules of forms.
_PARTS: dict[str, ArraysFn] = {
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
}
