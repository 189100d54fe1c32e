"""The pass: small products, factorizations, sorts and scatters of a step as arithmetic.

A rule is traced once for each primitive, its parameters and its types. The pass puts the equations that it gave in the place
of an equation, and traces nothing again, since lowering takes as long as what it traces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import (
    LOWERED_CALLS,
    Atom,
    Eqn,
    Names,
    Program,
    Var,
    inlined,
    named,
    placed,
    with_operands,
)
from jrnn.jaxprs.jax_internals import cached, context_of, in_context
from jrnn.loops.ir import Loop, tag
from jrnn.loops.passes.arithmetic import draws, factors, orders, products

RULES: dict[str, Callable[..., Sequence[Any] | None]] = {
    **products.RULES,
    **factors.RULES,
    **orders.RULES,
    **draws.RULES,
}
_INNER = {"cond": ("branches",), "scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}
_SOLVE = "custom_linear_solve"
Fits = Callable[[Eqn], bool]


def as_arithmetic(loop: Loop, fits: Fits) -> Loop:
    """Returns the loop with what `fits` written as arithmetic, in its branches and inner loops too.

    Invariant: every value is the same but for rounding, and NaN where it was NaN.
    """
    if not any(_applies(eqn, fits) for eqn in equations(loop.eqns)):
        return loop
    names: Names = {}
    eqns = [*_rewritten(loop.eqns, loop.outputs, names, fits)]
    changed = loop.with_eqns(eqns, [named(names, a) for a in loop.outputs])
    same = [e.primitive for e in equations(changed.eqns)] == [
        e.primitive for e in equations(loop.eqns)
    ]
    return loop if same else changed  # perhaps no rule applied


def equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Yields equations and those that they run."""
    return jaxprs.nested_equations(eqns, jaxprs.run_jaxprs)


def rewritten(closed: Any, fits: Fits) -> Any:
    """Returns a closed jaxpr with what `fits` written as arithmetic."""
    return _with_rules(inlined(closed, LOWERED_CALLS), fits).closed()


def _with_rules(program: Program, fits: Fits) -> Program:
    names: Names = {}
    eqns = tuple(_rewritten(program.eqns, program.outvars, names, fits))
    return replace(program, eqns=eqns, outvars=tuple(named(names, a) for a in program.outvars))


def _applies(eqn: Eqn, fits: Fits) -> bool:
    return eqn.primitive.name == _SOLVE or (eqn.primitive.name in RULES and fits(eqn))


def _rewritten(
    eqns: Sequence[Eqn], outs: Sequence[Atom], names: Names, fits: Fits
) -> Iterator[Eqn]:
    """Yields the equations in the place of others, and adds to `names` what stands for their results."""
    read = {*jaxprs.variables(outs), *(v for eqn in eqns for v in jaxprs.inputs(eqn))}
    for eqn in eqns:
        operands = [named(names, a) for a in eqn.invars]
        name = eqn.primitive.name
        program = _rule_of(eqn, read) if name in RULES and fits(eqn) else None
        if program is not None:
            yield from placed(program, operands, eqn, names)
        elif name == _SOLVE:  # the functions other than its solver are for its gradient
            counts = eqn.params["const_lengths"]
            first = counts.matvec + counts.vecmat
            solver_operands = operands[first : first + counts.solve] + operands[sum(counts) :]
            solver = _with_rules(inlined(eqn.params["jaxprs"].solve, LOWERED_CALLS), fits)
            yield from placed(solver, solver_operands, eqn, names)
        elif name in _INNER and any(_applies(e, fits) for e in equations([eqn]) if e is not eqn):
            inner = {
                key: jax.tree.map(lambda c: rewritten(c, fits), eqn.params[key])
                for key in _INNER[name]
            }
            yield eqn.replace(invars=operands, params={**eqn.params, **inner})
        else:
            yield with_operands(eqn, operands)


@dataclass(frozen=True)
class _Traced:
    """An equation with a rule; equal for all that the rule does the same for."""

    key: Any
    eqn: Eqn = field(compare=False)


def _rule_of(eqn: Eqn, read: Collection[Var]) -> Program | None:
    """Returns what the rule for an equation computes, or None if it does not apply where `read` is read."""
    is_read = tuple(v in read for v in eqn.outvars)
    avals = tuple(a.aval for a in (*eqn.invars, *eqn.outvars))
    key = (
        is_read,
        avals,
        eqn.primitive,
        tuple(sorted(eqn.params.items())),
        context_of(eqn),
        jax.config.jax_enable_x64,
    )
    try:
        return _traced(_Traced(key, eqn))
    except TypeError:  # a parameter without a hash
        return _traced.__wrapped__(_Traced(key, eqn))


@cached(1024)
def _traced(call: _Traced) -> Program | None:
    eqn, (is_read, *_), applies = call.eqn, call.key, True

    def run(*operands: Any) -> Sequence[Any]:
        nonlocal applies
        values = RULES[eqn.primitive.name](eqn, *operands)
        applies = values is not None and not any(v is None and w for v, w in zip(values, is_read))
        return [operands[0] if v is None else v for v in values] if applies else []

    with in_context(eqn), tag.untagged():
        program = jaxprs.trace(run, [a.aval for a in eqn.invars], LOWERED_CALLS)
    if not applies or program.constvars:  # such as the counters of JAX's older way to draw
        return None
    return _with_rules(program, lambda e: e.primitive.name in draws.ROUNDS)
