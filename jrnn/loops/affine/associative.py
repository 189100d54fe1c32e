"""Loops that are affine in the carry with a diagonal Jacobian, solved for all times at once.

Steps `h[t] = a[t] * h[t-1] + b[t]` compose associatively, so `jax.lax.associative_scan` solves the loop in log2 T doubling
steps (`rounds.py`). The reverse loop of such a loop has the same form.

If one carry reads another, as in a stack of layers, they are solved one after the other. Carries that read each other, such
as the parts of complex numbers, are solved together: their `a` is a small matrix for each element. So a complex recurrence
may be written with one complex carry or with two real ones.

Shapes: T time, K carries that are solved together.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.ranges import largest_size
from jrnn.loops.affine import rounds
from jrnn.loops.affine.carries import Between, Group, GroupFunction, Values, solve_in_order
from jrnn.loops.affine.reader import MOST_TOGETHER, read_diagonal
from jrnn.loops.ir import Loop, Results, Unsupported


def solve_loop(
    loop: Loop,
    consts: Values,
    init: Values,
    xs: Values,
    length: Any,
) -> Results:
    """Solves a loop by a parallel prefix instead of running its steps."""
    groups = _groups(loop)

    def solve(
        number: int,
        part: GroupFunction,
        first: Values,
    ) -> Values:
        """Returns all states of `h[t] = a[t] h[t-1] + b[t]` from `h[-1] = first`: K arrays [T, ...]."""
        step = read_diagonal(loop, groups[number], part.eqns)

        def coefficients(stack: Any) -> tuple[Any, Any]:
            return step.values(part.inputs(part.consts, stack), first[0])

        a, b = jax.vmap(coefficients, axis_size=length)(part.stacks)
        if loop.reverse:
            a, b = jax.tree.map(_reversed, (a, b))
        moved = rounds.matvec(jax.tree.map(operator.itemgetter(0), a), first)
        for k, (offsets, at_start) in enumerate(zip(b, moved)):
            # The first offset becomes the first state, so that the first coefficient is not used.
            state = offsets[0] + at_start
            b[k] = jnp.concatenate([state[None], offsets[1:]])
        h = rounds.associative_solve(a, b)
        return list(map(_reversed, h)) if loop.reverse else h

    return solve_in_order(loop, groups, solve, consts, init, xs, length)[0]


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
        # The reason that there are too many carries comes first.
        for group in sorted(_groups(loop), key=lambda group: len(group) <= MOST_TOGETHER):
            eqns, _ = between.of(group)
            read_diagonal(loop, group, eqns)
    except Unsupported as why:
        return str(why)
    return None


def is_bounded(loop: Loop) -> bool:
    """Returns True if every factor of a carry is provably at most 1 in size, so that no product of factors can overflow.

    A select discards an infinite carry, but a factor of zero does not, so loops that select carries are not bounded.
    """
    between = Between(loop)
    for eqn in loop.eqns:
        if eqn.primitive.name == "select_n":
            carries = set(map(between.carries_of, eqn.invars[1:]))
            if len(carries) > 1:
                return False

    step, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))

    def factors(*values: Any) -> Values:
        env = jaxprs.evaluate(step, dict(zip(loop.inputs, values)))
        of_all = []
        for group in _groups(loop):
            eqns, _ = between.of(group)
            like = env[loop.carry[group[0]]]
            rows, _ = read_diagonal(loop, group, eqns).values(env, like)
            of_all += itertools.chain(*rows)
        return of_all

    types = [v.aval for v in loop.inputs]
    closed = jax.make_jaxpr(factors)(*types)
    return max(largest_size(closed)) <= 1


def why_not_automatic(loop: Loop, least_steps: int) -> str | None:
    """Returns the reason why a loop is not solved without being asked for, or None."""
    why = refusal(loop)
    if why is not None:
        return why
    if jaxprs.extent(loop.length) < least_steps:
        return f"fewer than {least_steps} steps"
    in_and_out = [*loop.carry, *loop.xs, *loop.outputs]
    of_values = map(jaxprs.nbytes, jaxprs.results(loop.eqns))
    if max(of_values, default=0) > sum(map(jaxprs.nbytes, in_and_out)):
        return "values of a step are larger than what goes in and out of it"  # the stacks would need much memory
    return None


def _reversed(value: Array) -> Array:
    return value[::-1]


def _groups(loop: Loop) -> list[Group]:
    return jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out).groups
