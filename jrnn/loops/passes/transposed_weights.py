"""Products with a constant matrix, laid out for XLA:CPU.

XLA:CPU's product of small matrices `x W^T` takes up to half as long again as `x W` (docs/notes/cpu_log.md), so the matrix
is transposed once, before the loop (`transpose_constant_rhs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn
from jrnn.loops.ir import Loop

_PART = 8  # adjacent columns of the result, which are read from as many rows at a time


def transpose_constant_rhs(loop: Loop) -> Loop:
    """Rewrites `x W^T` as `x (W^T)` where W is constant; the split transposes W before the loop.

    A product of all steps at once gains nothing from that, and costs nothing: XLA undoes it. Where a few steps run at a
    time, XLA would transpose W for each of these pieces.

    Invariant: every value is unchanged.
    """
    by_rows = {id(eqn) for eqn in reads_rows(loop)}
    if not by_rows:
        return loop

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if id(eqn) not in by_rows:
            return None
        (of_x, _), batch = eqn.params["dimension_numbers"]
        x, matrix = (env[v] for v in eqn.invars)
        numbers = ((of_x, (0,)), batch)
        with jaxprs.in_scope(eqn):
            return jaxprs.bind(eqn, x, jnp.transpose(matrix), dimension_numbers=numbers)

    return loop.rewrite(rule)


def transposed(matrix: Any) -> Any:
    """Returns `matrix.T`, written over three axes: XLA:CPU since jaxlib 0.12 copies a transposition over two axes twice."""
    rows, columns = matrix.shape
    part = math.gcd(rows, _PART) if jaxprs.is_known(rows) else 1
    return matrix.reshape(rows // part, part, columns).transpose(2, 0, 1).reshape(columns, rows)


def reads_rows(loop: Loop) -> list[Eqn]:
    """Returns the products `x W^T` with a constant matrix."""
    products = []
    for eqn in loop.eqns:
        if eqn.primitive.name == "dot_general" and jaxprs.is_by_rows(eqn):
            x, matrix = eqn.invars
            if jaxprs.is_in(matrix, loop.consts) and jaxprs.is_in(x, loop.varying):
                products.append(eqn)
    return products
