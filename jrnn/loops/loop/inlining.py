"""Programs of loops that are lowered: calls are inlined and equations replaced by renaming variables, without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend.core.primitives import closed_call_p

from jrnn import jaxprs
from jrnn.jaxprs import LOWERED_CALLS, MARK, Atom, Eqn, Program, Var
from jrnn.loops.loop import mark

Names = dict[Var, Atom]  # what stands for a variable


def inlined(closed: Any) -> Program:
    """Returns the program of a closed jaxpr that is lowered, with the calls in it inlined. Only scans keep the mark."""
    jaxpr, names = jaxprs.jaxpr_of(closed), Names()
    consts = dict(zip(jaxpr.constvars, getattr(closed, "consts", ())))
    eqns = tuple(_without_calls(jaxpr.eqns, names, consts))
    outs = tuple(named(names, a) for a in jaxpr.outvars)
    return Program(tuple(consts), tuple(consts.values()), tuple(jaxpr.invars), eqns, outs)


def placed(program: Program, given: Sequence[Atom], eqn: Eqn, names: Names) -> Iterator[Eqn]:
    """Yields the equations of a program in the place of an equation, each time with other variables.

    Args:
        program: the program, without constants.
        given: what stands for its inputs.
        eqn: the equation.
        names: gets what stands for the results of the equation.
    """
    inside = dict(zip(program.invars, given, strict=True))
    yield from _without_calls(program.eqns, inside, {}, lambda _: eqn.source_info)
    names.update(zip(eqn.outvars, [named(inside, a) for a in program.outvars], strict=True))


def _without_calls(
    eqns: Iterable[Eqn], names: Names, consts: dict[Var, Any], source: Callable[[Eqn], Any] | None = None
) -> Iterator[Eqn]:
    """Yields equations with the calls in them inlined.

    Args:
        eqns: the equations.
        names: what stands for the variables that they read; gets what stands for their results.
        consts: gets the constants of the calls.
        source: returns the source information of equations that are in a call, and then have other variables.
    """
    for eqn in eqns:
        given, outs = [named(names, a) for a in eqn.invars], eqn.outvars
        body, name = jaxprs.called(eqn, LOWERED_CALLS), eqn.primitive.name
        info = eqn.source_info if source is None else source(eqn)
        if body is not None:
            jaxpr = jaxprs.jaxpr_of(body)
            inside, held = dict(zip(jaxpr.invars, given, strict=True)), {v: jex.Var(v.aval) for v in jaxpr.constvars}
            consts.update(zip(held.values(), getattr(body, "consts", ())))
            inside.update(held)
            yield from _without_calls(jaxpr.eqns, inside, consts, functools.partial(_within, info.name_stack))
            names.update(zip(outs, [named(inside, a) for a in jaxpr.outvars]))
        elif name in ("copy", "copy_p"):
            names.update(zip(outs, given))
        elif name == "convert_element_type" and jaxprs.is_literal(given[0]) and not given[0].aval.shape:
            names[outs[0]] = jex.Literal(np.asarray(given[0].val).astype(outs[0].aval.dtype), outs[0].aval)
        else:
            if source is not None:
                outs = [jex.Var(v.aval) for v in outs]
                names.update(zip(eqn.outvars, outs))
            is_marked = MARK in (eqn.ctx.xla_metadata or {}) and name != "scan"
            ctx = _unmarked(eqn.ctx) if is_marked else eqn.ctx
            yield eqn.replace(invars=given, outvars=outs, source_info=info, ctx=ctx)


def named(names: Names, atom: Atom) -> Atom:
    """Returns what stands for an atom."""
    return atom if jaxprs.is_literal(atom) else names.get(atom, atom)


def closed(program: Program) -> Any:
    """Returns a program as a closed jaxpr."""
    effects = {effect for eqn in program.eqns for effect in eqn.effects}
    info = jex.DebugInfo("scan", "step", ("",) * len(program.invars), ("",) * len(program.outvars))
    parts = program.constvars, program.invars, program.outvars, program.eqns
    return jex.ClosedJaxpr(jex.Jaxpr(*map(list, parts), effects, info), program.consts)


def called(closed: Any) -> Callable[..., list[Any]]:
    """Returns a function that calls a closed jaxpr; before JAX 0.12, one that evaluates it."""
    if getattr(closed_call_p, "call_primitive", False):
        return jex.jaxpr_as_fun(closed)
    return functools.partial(closed_call_p.bind, call_jaxpr=closed)


def _within(scope: Any, eqn: Eqn) -> Any:
    """Returns the source information of an equation that is called in a scope."""
    return eqn.source_info.replace(name_stack=scope + eqn.source_info.name_stack)


@functools.lru_cache(maxsize=256)
def _unmarked(ctx: Any) -> Any:
    """Returns the context of an equation without the mark."""
    with ctx.manager, mark.unmarked():
        return jax.make_jaxpr(jax.lax.neg)(0.0).jaxpr.eqns[0].ctx
