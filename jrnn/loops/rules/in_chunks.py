"""Differentiation of a tagged loop with matrix states: the chunk program (`loops/chunks/`) is differentiated in its place.

JAX's rules would store the state at every step. This has to happen before them: once a loop is differentiated, its states
are among the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax

with suppress(ImportError):  # `installation` reports missing names
    from jax._src.interpreters import ad

from jrnn import jaxprs
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import ScanParams, observers, tag
from jrnn.loops.strategies import Target


def jvp(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for the forward mode of a scan."""

    @functools.wraps(rule)
    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        moving = [tangents[i] for i in places]
        results = _in_chunks(current_metadata(), params, primals, places, lambda of, at: jax.jvp(of, at, moving))
        if results is None:
            return rule(primals, tangents, **params)
        outs, moved = results
        return outs, [_tangent(o, t) for o, t in zip(outs, moved)]

    return differentiate


def linearize(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for the reverse mode of a scan."""

    @functools.wraps(rule)
    def differentiate(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> Any:
        places = [i for i, (p, nonzero) in enumerate(zip(primals, nonzeros)) if nonzero and is_smooth(p)]
        results = _in_chunks(current_metadata(), params, primals, places, lambda of, at: jax.linearize(of, *at))
        if results is None:
            return rule(is_vjp, nonzeros, *primals, **params)
        outs, linear = results

        def linearized(*args: Any) -> list[Any]:
            tangents = args[-len(primals) :]  # after the residuals, which `linear` holds
            moved = linear(*(ad.instantiate_zeros(tangents[i]) for i in places))
            return [_tangent(o, t) for o, t in zip(outs, moved)]

        structured = () if jax.__version_info__ < (0, 11, 1) else (None,)
        return outs, list(map(is_smooth, outs)), jax.tree.leaves(linear), *structured, linearized

    return differentiate


def _in_chunks(
    metadata: Any, params: dict[str, Any], primals: Sequence[Any], places: Sequence[int], transform: Callable
) -> Any:
    """Returns what a transformation makes of the program in chunks, or None to leave the scan to JAX's rule.

    Args:
        metadata: the tag.
        params: those of the equation.
        primals: its arguments.
        places: of the arguments that have tangents.
        transform: of a function of these arguments, and their values.
    """
    options = tag.options_in(metadata)
    if not places or options is None or options.executor != "auto" or isinstance(options.recompute, tuple):
        return None
    from jrnn.loops.strategies import chunks as choice

    scan, moves = ScanParams.of(params), tuple(i in places for i in range(len(primals)))
    planned = choice.plan(scan, Target.here(), options, moves)
    if planned is None:
        return None
    plan, values = planned
    if plan.node is None:
        observers.note(f"not in chunks: {plan.notes[0]}")
        return None
    observers.notify(plan)
    whole = scan.flat(plan.node.run, values)

    def run(*moving: Any) -> list[Any]:
        with tag.untagged():
            return whole(*jaxprs.replaced(primals, places, moving))

    try:
        return transform(run, [primals[i] for i in places])
    except Exception as error:
        observers.note(f"not in chunks: {observers.unexpected(error)}")
        return None


def _tangent(out: Any, tangent: Any) -> Any:
    return tangent if is_smooth(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
