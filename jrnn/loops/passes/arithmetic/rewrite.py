"""The pass: small products, factorizations, sorts and scatters of a step as arithmetic.

XLA:CPU calls a library for each of them, and a call takes longer than a small matrix needs. Arithmetic becomes a part of the
kernel of the loop.

A rule is traced once for each primitive, its parameters and its types. The pass replaces an equation by the equations of its
rule, and traces nothing again, since lowering takes as long as what it traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import jax
from jax import Array

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
_INNER = {
    "cond": ("branches",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}
_SOLVE = "custom_linear_solve"
Fits = Callable[[Eqn], bool]


def as_arithmetic(loop: Loop, fits: Fits) -> Loop:
    """Returns the loop with what `fits` written as arithmetic, in its branches and inner loops too.

    Invariant: every value is the same up to rounding, and NaN where it was NaN.
    """
    if not any(map(_applies, equations(loop.eqns), repeat(fits))):
        return loop
    changed = loop.with_eqns(*_rewritten(loop.eqns, loop.outputs, fits))
    if _primitives(changed) == _primitives(loop):  # no rule applied
        return loop
    return changed


def _primitives(loop: Loop) -> list[Any]:
    """The primitives of a loop, in its branches and inner loops too."""
    return [e.primitive for e in equations(loop.eqns)]


def equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Yields equations and the equations that they run."""
    return jaxprs.nested_equations(eqns, jaxprs.run_jaxprs)


def rewritten(closed: Any, fits: Fits) -> Any:
    """Returns a closed jaxpr with what `fits` written as arithmetic."""
    return _with_rules(inlined(closed, LOWERED_CALLS), fits).closed()


def _with_rules(program: Program, fits: Fits) -> Program:
    """Returns a program with what `fits` written as arithmetic."""
    eqns, outs = _rewritten(program.eqns, program.outvars, fits)
    return replace(program, eqns=tuple(eqns), outvars=tuple(outs))


def _applies(eqn: Eqn, fits: Fits) -> bool:
    """Whether an equation is rewritten: a linear solve always, because its solver may be, and others if they fit."""
    return eqn.primitive.name == _SOLVE or (eqn.primitive.name in RULES and fits(eqn))


def _rewritten(
    eqns: Sequence[Eqn], outs: Sequence[Atom], fits: Fits
) -> tuple[list[Eqn], list[Atom]]:
    """Returns equations and outputs with what `fits` written as arithmetic."""
    names: Names = {}  # what stands for results of rewritten equations
    new: list[Eqn] = []
    read = jaxprs.uses(eqns, outs)
    for eqn in eqns:
        operands = [named(names, a) for a in eqn.invars]
        name = eqn.primitive.name
        program = _rule_of(eqn, read) if name in RULES and fits(eqn) else None
        if program is not None:
            new += placed(program, operands, eqn, names)
        elif name == _SOLVE:  # the functions other than its solver are for its gradient
            counts = eqn.params["const_lengths"]
            first = counts.matvec + counts.vecmat
            solver_operands = operands[first : first + counts.solve] + operands[sum(counts) :]
            solver = _with_rules(inlined(eqn.params["jaxprs"].solve, LOWERED_CALLS), fits)
            new += placed(solver, solver_operands, eqn, names)
        elif name in _INNER and any(_applies(e, fits) for e in equations([eqn]) if e is not eqn):
            rewrite = functools.partial(rewritten, fits=fits)
            params = dict(eqn.params)
            for key in _INNER[name]:
                params[key] = jax.tree.map(rewrite, params[key])
            new.append(eqn.replace(invars=operands, params=params))
        else:
            new.append(with_operands(eqn, operands))
    return new, [named(names, a) for a in outs]


@dataclass(frozen=True)
class _Traced:
    """An equation with a rule: equal to others for which the rule does the same.

    Attributes:
        key: the types, the primitive, its parameters and the context.
        is_read: whether each result is read.
        eqn: the equation.
    """

    key: Any
    is_read: tuple[bool, ...]
    eqn: Eqn = field(compare=False)


def _rule_of(eqn: Eqn, read: Collection[Var]) -> Program | None:
    """Returns what the rule for an equation computes, or None if it does not apply where `read` is read."""
    is_read = tuple(v in read for v in eqn.outvars)
    avals = tuple(a.aval for a in (*eqn.invars, *eqn.outvars))
    key = (
        avals,
        eqn.primitive,
        tuple(sorted(eqn.params.items())),
        context_of(eqn),
        jax.config.jax_enable_x64,
    )
    call = _Traced(key, is_read, eqn)
    try:
        return _traced(call)
    except TypeError:  # a parameter without a hash
        return _traced.__wrapped__(call)


@cached(1024)
def _traced(call: _Traced) -> Program | None:
    """Returns what the rule for an equation computes, or None if it does not apply. Equal equations are traced once."""
    eqn = call.eqn
    applies = True

    def run(*operands: Array) -> list[Array]:
        nonlocal applies
        values = RULES[eqn.primitive.name](eqn, *operands)
        if values is None:
            applies = False
            return []
        results = []
        for value, is_read in zip(values, call.is_read):
            applies = applies and not (value is None and is_read)
            results.append(operands[0] if value is None else value)
        return results if applies else []

    with in_context(eqn), tag.untagged():
        program = jaxprs.trace(run, [a.aval for a in eqn.invars], LOWERED_CALLS)
    if not applies or program.constvars:  # such as the counters of JAX's older way to draw
        return None
    return _with_rules(program, _is_round)


def _is_round(eqn: Eqn) -> bool:
    """Whether an equation is a primitive that the rules for draws consist of."""
    return eqn.primitive.name in draws.ROUNDS
