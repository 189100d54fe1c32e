"""How long XLA:CPU compiles a program, estimated from its equations.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.jax_internals import ShapedArray
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import Loop

# Seconds of processor time of XLA:CPU for an equation, with jax 0.12 on an Intel Xeon: the first two by least squares over
# 86 programs of the suites "first-call", "tiny" and "small states" and of layers, the last rounded from the tiny loops. That
# fit meets the difference between a loop and its plan within a third for matrix states in chunks, 0.2 to 3.6 s, and within a
# factor of three for tiny loops, 0.01 to 0.7 s.
_CALL = 18e-3  # a product, a solver, an inner loop, or an equation that reads or writes at indices: a kernel of its own
_ELEMENTWISE = 0.9e-3  # another equation, which is fused with its neighbors
_TINY_ELEMENTWISE = 0.3e-3  # the same of at most 8 elements, which is an instruction or a few
_TINY_ELEMENTS = 8
# Equations of a step with its derivative: of the forward loop, and about twice as many of the reverse one.
_BY_STEPS = 3

_FUSED = primitives.with_kind("elementwise", "special", "view", "placement", "reduction", "key")
_NOTHING = frozenset(jaxprs.LOWERED_CALLS) | primitives.with_kind("barrier")  # calls are inlined


def seconds(eqns: Iterable[Any], inside: dict[int, float] | None = None) -> float:
    """Returns how long equations compile, with those of the jaxprs in them.

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


def _own_seconds(eqn: Any) -> float:
    name = eqn.primitive.name
    if name in _NOTHING:
        return 0.0
    is_tiny = all(
        jaxprs.elements(getattr(v.aval, "shape", ())) <= _TINY_ELEMENTS for v in eqn.outvars
    )
    return (_TINY_ELEMENTWISE if is_tiny else _ELEMENTWISE) if name in _FUSED else _CALL


def added_seconds(run: Callable[..., Any], loop: Loop, differentiated: bool) -> float:
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
    places = [i for i, aval in enumerate(avals) if is_smooth(aval)]

    def program(*args: Any) -> Any:
        return run(args[:n_consts], args[n_consts:n_carry], args[n_carry:], steps)

    def train(*args: Any) -> Any:
        def results(*moving: Any) -> list[Any]:
            return list(
                filter(is_smooth, jax.tree.leaves(program(*jaxprs.replaced(args, places, moving))))
            )

        outs, transposed = jax.vjp(results, *(args[i] for i in places))
        return transposed(outs)

    ours = jax.make_jaxpr(train if differentiated else program)(*avals).jaxpr.eqns
    return seconds(ours) - (_BY_STEPS if differentiated else 1) * (_CALL + seconds(loop.eqns))
