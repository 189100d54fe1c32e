"""Loops that are affine in the carry with a diagonal Jacobian, solved for all times at once.

Steps `h[t] = a[t] * h[t-1] + b[t]` compose associatively, so `jax.lax.associative_scan` solves the loop in log2 T doubling
steps (`rounds.py`). The reverse loop of such a loop has the same form.

If one carry reads another, as in a stack of layers, they are solved one after the other. Carries that read each other, such
as the parts of complex numbers, are solved together: their `a` is a small matrix for each element. So a complex recurrence
may be written with one complex carry or with two real ones.

Shapes: T time, K carries that are solved together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.ranges import largest_size
from jrnn.loops.affine import rounds
from jrnn.loops.affine.carries import (
    MOST_TOGETHER,
    Between,
    GroupFunction,
    check_diagonal,
    solve_in_order,
)
from jrnn.loops.ir import Loop, Results, Unsupported


def solve_loop(
    loop: Loop, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
) -> Results:
    """Solves a loop by a parallel prefix instead of running its steps."""

    def solve(number: int, part: GroupFunction, first: list[Any]) -> list[Any]:
        """Returns all states of `h[t] = a[t] h[t-1] + b[t]` from `h[-1] = first`: K arrays [T, ...]."""

        def coefficients(stack: Any) -> tuple[Any, Any]:
            return _coefficients(lambda old: part.fn(part.consts, stack, old), first)

        a, b = jax.vmap(coefficients, axis_size=length)(part.stacks)
        a, b = jax.tree.map(lambda v: v[::-1], (a, b)) if loop.reverse else (a, b)
        moved = rounds.matvec(jax.tree.map(lambda v: v[0], a), first)
        # b[0] becomes h[0], so that a[0] is not used.
        b = [jnp.concatenate([(x[0] + m)[None], x[1:]]) for x, m in zip(b, moved)]
        h = rounds.associative_solve(a, b)
        return [x[::-1] for x in h] if loop.reverse else h

    return solve_in_order(loop, _groups(loop), solve, consts, init, xs, length)[0]


def refusal(loop: Loop) -> str | None:
    """Returns the reason why a loop cannot be solved by a parallel prefix, or None."""
    if not loop.carry:
        return "nothing is carried"
    if any(map(primitives.draws_differently_under_vmap, loop.eqns)):
        return "only threefry keys draw the same numbers under vmap"
    if not all(map(primitives.is_movable, loop.eqns)):
        return "it has equations that cannot be evaluated for all steps at once"
    try:
        between = Between(loop)
        for group in sorted(_groups(loop), key=lambda group: len(group) <= MOST_TOGETHER):
            check_diagonal(loop, group, between)
    except Unsupported as why:
        return str(why)
    return None


def is_bounded(loop: Loop) -> bool:
    """Returns True if every factor of a carry is provably at most 1 in size, so that no product of factors can overflow.

    A select discards an infinite carry, but a factor of zero does not, so loops that select carries are not bounded.
    """
    selects = [eqn.invars[1:] for eqn in loop.eqns if eqn.primitive.name == "select_n"]
    between = Between(loop)
    if any(len(set(map(between.carries_of, cases))) > 1 for cases in selects):
        return False

    step, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))

    def factors(*values: Any) -> list[Any]:
        env = jaxprs.evaluate(step, dict(zip(loop.inputs, values)))
        rows = []
        for group in _groups(loop):
            body, read = between.of(group)
            alone = replace(loop, eqns=tuple(body))
            part = GroupFunction.of(alone, group, {v: env[v] for v in read}, {})
            new = functools.partial(part.fn, part.consts, [])
            rows += _coefficients(new, [env[loop.carry[i]] for i in group])[0]
        return [a for row in rows for a in row]

    return all(
        size <= 1 for size in largest_size(jax.make_jaxpr(factors)(*(v.aval for v in loop.inputs)))
    )


def why_not_automatic(loop: Loop, least_steps: int) -> str | None:
    """Returns the reason why a loop is not solved without being asked for, or None."""
    why = refusal(loop)
    if why is not None:
        return why
    if jaxprs.extent(loop.length) < least_steps:
        return f"fewer than {least_steps} steps"
    through = sum(map(jaxprs.nbytes, (*loop.carry, *loop.xs, *loop.outputs)))
    if any(jaxprs.nbytes(v) > through for eqn in loop.eqns for v in eqn.outvars):
        return "values of a step are larger than what goes in and out of it"  # the stacks would need much memory
    return None


def _groups(loop: Loop) -> list[tuple[int, ...]]:
    return jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out).groups


def _coefficients(
    new: Callable[[list[Any]], list[Any]], like: Sequence[Any]
) -> tuple[list[list[Any]], list[Any]]:
    """Returns `a` and `b` of a step that is affine in some carries with a diagonal Jacobian: K x K arrays, and K arrays.

    Args:
        new: from the carries to their new values.
        like: values with the types of the carries.
    """
    zeros = list(map(jnp.zeros_like, like))
    columns = []
    rest = []
    for k, zero in enumerate(zeros):

        def of_one(carry: Any, k: int = k) -> list[Any]:
            return new([*zeros[:k], carry, *zeros[k + 1 :]])

        rest, column = jax.jvp(of_one, [zero], [jnp.ones_like(zero)])
        columns.append(column)
    return [list(row) for row in zip(*columns)], rest
