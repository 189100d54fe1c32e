"""Programs with their tangents, as equations of values and equations of tangents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jrnn.jaxprs import primitives
from jrnn.jaxprs.jax_internals import Jaxpr, scan_counts, without_outer_scope
from jrnn.jaxprs.programs import (
    LOWERED_CALLS,
    Atom,
    Eqn,
    Program,
    Value,
    Values,
    Var,
    called,
    is_in,
    jaxpr_of,
    replaced,
    take,
    trace,
    variables,
)
from jrnn.jaxprs.queries import (
    any_in,
    depends,
    free_variables,
    is_zero,
    needed,
    producers,
)

Function = Callable[..., Values]


def is_smooth(value: jax.typing.ArrayLike) -> bool:
    """Returns True for a value or a type of floating-point or complex numbers, which has tangents."""
    return jnp.issubdtype(
        value.dtype if hasattr(value, "dtype") else jnp.result_type(value), jnp.inexact
    )


def with_derivative(run: Function, rule: Callable[..., tuple[Values, Values]]) -> Function:
    """Returns a function of arrays with a rule for its derivative.

    The rule takes the arrays, the argnums of arrays with tangents, and these tangents. It returns the results and their
    tangents, where None is zero.
    """

    def differentiated(primals: Values, tangents: Values) -> tuple[Values, Values]:
        moves = [
            is_smooth(p) and not isinstance(t, SymbolicZero) for p, t in zip(primals, tangents)
        ]
        argnums = tuple(i for i, m in enumerate(moves) if m)
        results, moved = rule(primals, argnums, take(tangents, argnums))
        zeros = [SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results]
        return results, [z if t is None else t for z, t in zip(zeros, moved)]

    smooth = jax.custom_jvp(run)
    smooth.defjvp(differentiated, symbolic_zeros=True)
    return smooth


@dataclass(frozen=True)
class Linearized:
    """A function with its tangents.

    Attributes:
        program: from arguments and tangents to results and the tangents of the floating-point ones.
        n_in, n_out: the numbers of arguments and results.
        step: the equations of values.
        linear: the equations of tangents that the results' tangents need.
        later: the variables that depend on tangents.
        outs: the tangent of each result; None if it is zero.
        primals_read: the values that `linear` and the tangents read.
    """

    program: Program
    n_in: int
    n_out: int
    step: list[Eqn]
    linear: list[Eqn]
    later: Collection[Var]
    outs: list[Atom | None]
    primals_read: list[Var]

    @property
    def moved(self) -> list[Atom]:
        return [a for a in self.outs if a is not None]

    @staticmethod
    def of(run: Function, avals: Values, argnums: Sequence[int]) -> Linearized:
        """Returns a function whose arguments at some argnums have tangents."""
        n_in = len(avals)
        smooth = list[bool]()

        def both(*args: Value) -> Values:
            outs, tangents = pushed(run, args[:n_in], argnums, args[n_in:])
            smooth[:] = map(is_smooth, outs)
            return [*outs, *(t for s, t in zip(smooth, tangents) if s)]

        program = trace(both, [*avals, *(avals[i].to_tangent_aval() for i in argnums)])
        # Without the `jax.jvp` of `pushed`, the scopes are the step's.
        program = replace(program, eqns=tuple(map(without_outer_scope, program.eqns)))
        later = depends(program.eqns, program.invars[n_in:])
        eqn_of = producers(program.eqns)
        tangents = iter(program.outvars[len(smooth) :])
        all_tangents = (next(tangents) if s else None for s in smooth)
        outs = [None if a is None or is_zero(a, eqn_of) else a for a in all_tangents]
        moved = [a for a in outs if a is not None]
        step = [e for e in program.eqns if not any_in(e.outvars, later)]
        linear, _ = needed(program.eqns, moved, set(program.invars[:n_in]))
        linear = [e for e in linear if any_in(e.outvars, later)]
        primals_read = [v for v in free_variables(linear) if v not in later]
        # The tangents that do not depend on tangents, from unusual custom rules.
        primals_read += [a for a in variables(moved) if a not in later]
        return Linearized(program, n_in, len(smooth), step, linear, later, outs, primals_read)


def pushed(
    fn: Function, args: Values, argnums: Sequence[int], tangents: Values
) -> tuple[Values, Values]:
    """Returns the results of a function and their tangents, from tangents of the arguments at some argnums."""
    return jax.jvp(
        lambda *moving: fn(*replaced(args, argnums, moving)),
        take(args, argnums),
        list(tangents),
    )


def arguments_that_move(params: Mapping[str, Any], moving: Sequence[bool]) -> list[bool]:
    """Returns which arguments of a loop's step have tangents at some step, from those that have tangents at the first one.

    A carry gets tangents from weights, for example. JAX differentiates the step again each time that it finds such
    carries. With this answer it differentiates the step once. Carries that only might get tangents, as from control flow,
    are left to JAX. A function with a rule of its own is taken to have tangents where its equations have some.

    Args:
        params: the parameters of the loop's equation.
        moving: whether each of its arguments has a tangent.
    """
    n_consts, n_carry = scan_counts(params)
    step = jaxpr_of(params["jaxpr"])
    arguments = [bool(moves) for moves in moving]
    while True:
        before = list(arguments)
        results = _results_that_move(step, arguments)
        for i, moves in enumerate(results[:n_carry], n_consts):
            arguments[i] = arguments[i] or moves
        if arguments == before:
            return arguments


def _results_that_move(jaxpr: Jaxpr, arguments: Sequence[bool]) -> list[bool]:
    """Returns which results of a jaxpr surely have tangents, from which of its arguments do."""
    moving = {v for v, moves in zip(jaxpr.invars, arguments) if moves}
    for eqn in jaxpr.eqns:
        operands = [is_in(a, moving) for a in eqn.invars]
        body = called(eqn, LOWERED_CALLS)
        if not any(operands):
            continue
        if body is not None:
            results = _results_that_move(jaxpr_of(body), operands)
        elif eqn.primitive.name == "scan":
            operands = arguments_that_move(eqn.params, operands)
            results = _results_that_move(jaxpr_of(eqn.params["jaxpr"]), operands)
        elif eqn.primitive.name == "cond":
            branches = [jaxpr_of(branch) for branch in eqn.params["branches"]]
            by_branch = [_results_that_move(branch, operands[1:]) for branch in branches]
            results = [any(moves) for moves in zip(*by_branch)]
        else:
            results = [primitives.keeps_tangents(eqn)] * len(eqn.outvars)
        moving.update(v for v, moves in zip(eqn.outvars, results) if moves and is_smooth(v.aval))
    return [is_in(a, moving) for a in jaxpr.outvars]
