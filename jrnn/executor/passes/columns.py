"""Products with a constant matrix inside the loop, read by columns.

XLA:CPU's product of small matrices `x W^T` takes up to half as long again as `x W` (docs/notes/cpu_log.md), so the matrix
is transposed once, before the loop.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Env
from jrnn.executor.loop import Loop


def columns(loop: Loop) -> Loop:
    """Rewrites `x W^T` as `x (W^T)` where the carry needs it and W is constant; fission transposes W before the loop.

    Invariant: every value stays what it was.
    """
    constant = set(loop.consts)
    inside, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    moving = jaxprs.depends(loop.eqns, loop.carry)
    turned = {id(eqn) for eqn in inside if _reads_rows(eqn) and eqn.invars[1] in constant and eqn.invars[0] in moving}
    if not turned:
        return loop

    def evaluation(env: Env) -> Env:
        for eqn in loop.eqns:
            if id(eqn) in turned:
                with jaxprs.in_scope(eqn):
                    env[eqn.outvars[0]] = _by_columns(eqn, *(env[v] for v in eqn.invars))
            else:
                jaxprs.evaluate([eqn], env)
        return env

    return loop.rewritten(evaluation)


def _reads_rows(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    (_, of_matrix), (_, batch) = eqn.params["dimension_numbers"]
    return eqn.invars[1].aval.ndim == 2 and (tuple(of_matrix), tuple(batch)) == ((1,), ())


def _by_columns(eqn: Any, x: Any, matrix: Any) -> Any:
    (of_x, _), batch = eqn.params["dimension_numbers"]
    params = eqn.primitive.get_bind_params(eqn.params)
    numbers = ((of_x, (0,)), batch)
    return eqn.primitive.bind(x, jnp.transpose(matrix), **{**params, "dimension_numbers": numbers})
