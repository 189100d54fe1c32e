"""The stage that computes what does not change before the loop, such as a matrix that is transposed in the step.

Only a loop that is differentiated needs it. Splits of a loop do the same (`split_loop.py`), but the derivative of what a
step computes from constants is computed at each step, where once suffices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import Adapter, Length, Loop, Results, RunLoop, Values


def hoist_invariants(loop: Loop) -> tuple[Loop, Adapter | None]:
    """Returns the loop with invariant equations hoisted, and its adapter; None if nothing is hoisted.

    Its constants are some of the original one's, and values that are computed from them.

    The reverse loop adds up a gradient of each constant. So a loop without products stays as it is if it would read more of
    them, as one that reads both a and 1 - a would.

    Invariant: every value is unchanged.
    """
    repeated_eqns = [e for e in loop.eqns if not _is_computed_once(e)]
    repeated = jaxprs.depends(loop.eqns, jaxprs.results(repeated_eqns))
    of_constants = jaxprs.depends(loop.eqns, loop.consts).difference(loop.varying, repeated)
    computed = [e for e in loop.eqns if not of_constants.isdisjoint(e.outvars)]
    if all(map(primitives.is_view, computed)):
        return loop, None
    rest = [e for e in loop.eqns if of_constants.isdisjoint(e.outvars)]
    read = dict.fromkeys([*jaxprs.free_variables(rest), *jaxprs.variables(loop.outputs)])
    consts = tuple(v for v in read if v in of_constants)
    before = {*loop.consts}.intersection(jaxprs.free_variables(loop.eqns))
    has_products = any(map(primitives.is_contraction, rest))
    if not has_products and _summed_bytes(consts) > _summed_bytes(before):
        return loop, None
    eqns, _ = jaxprs.needed(loop.eqns, consts, {*loop.consts})

    def adapter(run: RunLoop, values: Values, init: Values, xs: Values, length: Length) -> Results:
        env = jaxprs.evaluate(eqns, dict(zip(loop.consts, values)))
        return run(jaxprs.take(env, consts), init, xs, length)

    return replace(loop, consts=consts).with_eqns(rest, loop.outputs), adapter


def _summed_bytes(constants: Iterable[Var]) -> int:
    """Returns the bytes of the gradients of constants."""
    return sum(jaxprs.nbytes(v) for v in constants if is_smooth(v.aval))


def _is_computed_once(eqn: Eqn) -> bool:
    """Returns False for an equation whose derivative must be computed at each step, and for one that only spreads a value.

    A rule of `jax.custom_vjp` may not be linear. Gradients of what is cast to fewer bits would be added up in these.
    """
    if eqn.primitive.name == "convert_element_type" and is_smooth(eqn.outvars[0].aval):
        return jaxprs.nbytes(eqn.outvars[0]) >= jaxprs.nbytes(eqn.invars[0])
    spreads = eqn.primitive.name == "broadcast_in_dim"
    return eqn.primitive.name == "custom_jvp_call" or (primitives.is_movable(eqn) and not spreads)
