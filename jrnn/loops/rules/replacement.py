"""Differentiation of another program in the place of a tagged loop.

Once a loop is differentiated, what its step reads is among the residuals. So a program that is cheaper to differentiate
has to replace the loop before that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import LINEARIZATION_PARTS, ad, current_metadata
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import ScanParams, Tag, observers, tag

# `(tag, loop, argnums that have tangents) -> the program`, which takes all arguments, or None.
Program = Callable[[Tag, ScanParams, Sequence[int]], Callable[..., Sequence[Any]] | None]


def jvp(rule: Callable, program: Program) -> Callable:
    """Wraps JAX's rule for the forward mode of a scan."""

    @functools.wraps(rule)
    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        argnums = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        moving = [tangents[i] for i in argnums]
        results = _replaced(program, params, primals, argnums, lambda f, at: jax.jvp(f, at, moving))
        if results is None:
            return rule(primals, tangents, **params)
        outs, moved = results
        return outs, [_tangent(o, t) for o, t in zip(outs, moved)]

    return differentiate


def linearize(rule: Callable, program: Program) -> Callable:
    """Wraps JAX's rule for the reverse mode of a scan."""

    @functools.wraps(rule)
    def differentiate(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> Any:
        argnums = [
            i for i, (p, nonzero) in enumerate(zip(primals, nonzeros)) if nonzero and is_smooth(p)
        ]
        results = _replaced(program, params, primals, argnums, lambda f, at: jax.linearize(f, *at))
        if results is None:
            return rule(is_vjp, nonzeros, *primals, **params)
        outs, linear = results

        def linearized(*args: Any) -> list[Any]:
            tangents = args[-len(primals) :]  # after the residuals, which `linear` holds
            moved = linear(*(ad.instantiate_zeros(tangents[i]) for i in argnums))
            return [_tangent(o, t) for o, t in zip(outs, moved)]

        others = [None] * (LINEARIZATION_PARTS - 4)
        return outs, list(map(is_smooth, outs)), jax.tree.leaves(linear), *others, linearized

    return differentiate


def _replaced(
    program: Program,
    params: dict[str, Any],
    primals: Sequence[Any],
    argnums: Sequence[int],
    transform: Callable,
) -> Any:
    """Returns what a transformation makes of a program, or None to leave the scan to JAX's rule.

    Args:
        program: returns the program.
        params: those of the equation.
        primals: its arguments.
        argnums: the positions of the arguments that have tangents.
        transform: of a function of these arguments, and their values.
    """
    run = observers.attempt(" where a loop is differentiated", _program, program, params, argnums)
    if run is None:
        return None
    try:
        return transform(
            lambda *moving: run(*jaxprs.replaced(primals, argnums, moving)),
            [primals[i] for i in argnums],
        )
    except Exception as error:
        observers.notify(f"differentiated as it is: {observers.report_unexpected(error)}")
        return None


def _program(
    program: Program, params: dict[str, Any], argnums: Sequence[int]
) -> Callable[..., Sequence[Any]] | None:
    loop_tag = tag.tag_in(current_metadata())
    return (
        program(loop_tag, ScanParams.of(params), argnums)
        if argnums and loop_tag is not None
        else None
    )


def _tangent(out: Any, tangent: Any) -> Any:
    return tangent if is_smooth(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
