"""A contraction of all steps' values with a constant, whose gradient is one `contraction.over_time`.

JAX's own gradient of the constant always contracts the stacked cotangents with the stacked values, in this order.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jrnn.executor.contraction import over_time
from jrnn.executor.linear import Linear, tangent_p


def fits(eqn: Any, moving: Sequence[bool]) -> bool:
    """Whether an equation is a contraction of a moving left operand with a constant right one."""
    if eqn.primitive.name != "dot_general" or list(moving) != [True, False]:
        return False
    types = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    return eqn.params["dimension_numbers"][1] == ((), ()) and len(types) == 1


def project(eqn: Any, x: Any, w: Any) -> Any:
    """The contraction for all steps: x is [T, ...], w constant."""
    (lhs, rhs), _ = eqn.params["dimension_numbers"]
    lhs = tuple(a + 1 for a in lhs)
    rest = tuple(a for a in range(x.ndim) if a not in lhs)
    settings = dict(precision=eqn.params["precision"], preferred_element_type=eqn.params["preferred_element_type"])

    def forward(x: Any, w: Any) -> Any:
        return jax.lax.dot_general(x, w, ((lhs, rhs), ((), ())), **settings)

    def for_w(x: Any, ct: Any) -> Any:
        of_x, of_ct = [r for _, r in sorted(zip(lhs, rhs))], [a for a in range(w.ndim) if a not in rhs]
        rows, columns = rest, tuple(range(len(rest)))
        if 0 in of_ct:  # the axes of w begin with the cotangents'
            made, of_w = over_time(ct, x, (columns, rows), **settings), of_ct + of_x
        else:
            made, of_w = over_time(x, ct, (rows, columns), **settings), of_x + of_ct
        return jnp.transpose(made, [of_w.index(a) for a in range(w.ndim)])

    linear = Linear(lambda known, moved: [forward(known[0], moved[0])], lambda known, cts: [for_w(known[0], cts[0])])

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (x, w), (dx, dw) = primals, tangents
        parts = []
        if not isinstance(dx, SymbolicZero):
            parts.append(forward(dx, w))
        if not isinstance(dw, SymbolicZero):
            parts += tangent_p.bind(x, dw, linear=linear, n_known=1)
        return forward(x, w), sum(parts[1:], parts[0])

    contraction = jax.custom_jvp(forward)
    contraction.defjvp(rule, symbolic_zeros=True)
    return contraction(x, w)
