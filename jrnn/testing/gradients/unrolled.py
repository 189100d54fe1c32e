"""Scans whose steps hold while loops, unrolled: a net takes back such a loop only where its trips run one by one.

In a net, the gradient of a While needs the values of every trip. A RecurrentNetwork is one compiled loop, which cannot hold
them if data decides the number of trips. So a check converts the steps of such a scan one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.jaxprs import Eqn, all_equations, bind, interpreted, jaxpr_of, scan_counts
from jrnn.jaxprs.flat import body_of

MOST_STEPS = 64  # a longer scan stays one operator


def unrolled(run: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function of a sequence of arrays whose scans over while loops are unrolled."""

    def steps(values: Sequence[Any]) -> Any:
        closed, out = jax.make_jaxpr(run, return_shape=True)(list(values))
        if not any(map(_is_scan_of_loops, all_equations(closed.jaxpr))):
            return run(values)
        return jax.tree.unflatten(jax.tree.structure(out), _evaluated(closed, jax.tree.leaves(list(values))))

    return steps


def _is_scan_of_loops(eqn: Eqn) -> bool:
    if eqn.primitive.name != "scan" or eqn.params["length"] > MOST_STEPS:
        return False
    return any(inner.primitive.name == "while" for inner in all_equations(jaxpr_of(eqn.params["jaxpr"])))


def _evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
    return interpreted(closed, args, _results)


def _results(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
    if _is_scan_of_loops(eqn):
        return _step_by_step(eqn, values)
    body = body_of(eqn)
    if body is not None and any(map(_is_scan_of_loops, all_equations(jaxpr_of(body)))):
        return _evaluated(body, values)
    return bind(eqn, *values)


def _step_by_step(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    p = eqn.params
    fixed, count = scan_counts(p)
    consts, carry, stacks = values[:fixed], list(values[fixed : fixed + count]), values[fixed + count :]
    order = range(p["length"])[::-1] if p["reverse"] else range(p["length"])
    rows: dict[int, list[Any]] = {}
    for t in order:
        outs = _evaluated(p["jaxpr"], [*consts, *carry, *(stack[t] for stack in stacks)])
        carry, rows[t] = outs[:count], outs[count:]
    return [*carry, *(jnp.stack(parts) for parts in zip(*(rows[t] for t in range(p["length"]))))]
