"""How long XLA:CPU compiles a program, estimated from its equations.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.jaxprs.jax_internals import ShapedArray
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.costs.constants import COMPILATION
from jrnn.loops.ir import Loop, Results, RunLoop

_FUSED = primitives.with_kind(
    "elementwise",
    "special",
    "view",
    "placement",
    "reduction",
    "key",
)
_NOTHING = frozenset(jaxprs.LOWERED_CALLS) | primitives.with_kind("barrier")  # calls are inlined


def seconds(eqns: Iterable[Any], inside: dict[int, float] | None = None) -> float:
    """Returns how long equations compile, with the equations inside of them.

    Args:
        eqns: the equations.
        inside: the result for each jaxpr inside of others, which may be called several times.
    """
    inside = {} if inside is None else inside
    total = 0.0
    for eqn in eqns:
        total += _own_seconds(eqn)
        for jaxpr in jaxprs.run_jaxprs(eqn):
            if id(jaxpr) not in inside:
                inside[id(jaxpr)] = seconds(jaxpr.eqns, inside)
            total += inside[id(jaxpr)]
    return total


def _own_seconds(eqn: Eqn) -> float:
    """Returns how long an equation compiles, without the equations inside of it."""
    name = eqn.primitive.name
    if name in _NOTHING:
        return 0.0
    if name not in _FUSED:
        return COMPILATION.call
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    is_tiny = all(jaxprs.elements(shape) <= COMPILATION.tiny_elements for shape in shapes)
    return COMPILATION.tiny_elementwise if is_tiny else COMPILATION.elementwise


def added_seconds(run: RunLoop, loop: Loop, differentiated: bool) -> float:
    """Returns how much longer the program that runs a loop compiles than `jax.lax.scan`.

    Args:
        run: `(consts, carry, xs, length) -> (carry, ys)`.
        loop: the loop.
        differentiated: JAX differentiates the program, or the loop.
    """
    steps = jaxprs.extent(loop.length)
    n_consts = len(loop.consts)
    n_carry = n_consts + len(loop.carry)
    avals = [v.aval for v in loop.inputs]
    avals[n_carry:] = [ShapedArray((steps, *a.shape), a.dtype) for a in avals[n_carry:]]
    smooth = [i for i, aval in enumerate(avals) if is_smooth(aval)]

    def program(*args: Array) -> Results:
        return run(args[:n_consts], args[n_consts:n_carry], args[n_carry:], steps)

    def train(*args: Array) -> tuple[Array, ...]:
        def smooth_results(*values: Array) -> list[Array]:
            results = program(*jaxprs.replaced(args, smooth, values))
            return list(filter(is_smooth, jax.tree.leaves(results)))

        outs, pull = jax.vjp(smooth_results, *(args[i] for i in smooth))
        gradients: tuple[Array, ...] = pull(outs)
        return gradients

    traced = train if differentiated else program
    ours = jax.make_jaxpr(traced)(*avals).jaxpr.eqns
    by_steps = COMPILATION.call + seconds(loop.eqns)
    if differentiated:
        by_steps *= COMPILATION.equations_by_steps
    return seconds(ours) - by_steps
