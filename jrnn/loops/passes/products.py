"""Products with a constant matrix, laid out for XLA:CPU.

Under `jax.vmap`, `W @ x` has the matrix on the left. Its results and cotangents are transposed in every step, and stacked
both ways. With the matrix on the right, the batch comes first throughout and the transpositions cancel (`batch_first`).

XLA:CPU's product of small matrices `x W^T` takes up to half as long again as `x W` (docs/notes/cpu_log.md), so the matrix
is transposed once, before the loop (`columns`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.loop import Loop

Order = tuple[int, ...]
Turned = dict[Var, tuple[Any, Order]]  # transpositions: the transposed value, and the order of its axes

# The parameter that holds the axis of primitives that join or cut arrays along one.
_AXES = {"concatenate": "dimension", "split": "axis"}
_PART = 8  # adjacent columns of the result, which are read from as many rows at a time


def batch_first(loop: Loop) -> Loop:
    """Rewrites `W x^T`, W constant, as `(x W^T)^T`, and removes transpositions from what reads the result.

    Invariant: every value is unchanged.
    """
    products = [eqn for eqn in loop.eqns if _is_plain_product(eqn)]
    swapped = {id(eqn) for eqn in products if _matrix_first(eqn, set(loop.consts))}
    read = {v for eqn in products for v in jaxprs.inputs(eqn)}
    turns = any(eqn.primitive.name == "transpose" and eqn.outvars[0] in read for eqn in loop.eqns)
    if not swapped and not turns:
        return loop
    turned: Turned = {}

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        with jaxprs.in_scope(eqn):
            moved = _turned(eqn, env, turned, id(eqn) in swapped)
        if moved is None:
            return None
        values, order = moved
        if order == tuple(range(len(order))):
            return values
        turned.update((out, (value, order)) for out, value in zip(eqn.outvars, values))
        return [jax.lax.transpose(value, order) for value in values]  # dead, and dropped, if nothing reads it

    return loop.replaced(rule)


def columns(loop: Loop) -> Loop:
    """Rewrites `x W^T` as `x (W^T)` where W is constant; fission transposes W before the loop.

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
        with jaxprs.in_scope(eqn):
            return jaxprs.bind(eqn, x, jnp.transpose(matrix), dimension_numbers=((of_x, (0,)), batch))

    return loop.replaced(rule)


def transposed(matrix: Any) -> Any:
    """Returns `matrix.T`, written over three axes: XLA:CPU since jaxlib 0.12 copies a transposition over two axes twice."""
    rows, columns = matrix.shape
    part = math.gcd(rows, _PART) if jaxprs.is_known(rows) else 1
    return matrix.reshape(rows // part, part, columns).transpose(2, 0, 1).reshape(columns, rows)


def reads_rows(loop: Loop) -> list[Eqn]:
    """Returns the products `x W^T` with a constant matrix."""
    products = [eqn for eqn in loop.eqns if eqn.primitive.name == "dot_general" and _reads_rows(eqn)]
    moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs)) if products else ()
    return [eqn for eqn in products if jaxprs.is_in(eqn.invars[1], loop.consts) and jaxprs.is_in(eqn.invars[0], moving)]


def _reads_rows(eqn: Eqn) -> bool:
    ((_, of_matrix), (_, batch)), matrix = eqn.params["dimension_numbers"], eqn.invars[1].aval
    return (matrix.ndim, tuple(of_matrix), tuple(batch)) == (2, (1,), ())


def _is_plain_product(eqn: Eqn) -> bool:
    """Returns True for a `dot_general` of two variables without batch axes."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    return not eqn.params["dimension_numbers"][1][0] and eqn.params.get("out_sharding") is None


def _matrix_first(eqn: Eqn, constant: set[Var]) -> bool:
    left, right = eqn.invars
    (axes, _), _ = eqn.params["dimension_numbers"]
    return left in constant and right not in constant and (left.aval.ndim, right.aval.ndim, len(axes)) == (2, 2, 1)


def _turned(eqn: Eqn, env: Env, turned: Turned, swap: bool) -> tuple[Sequence[Any], Order] | None:
    """Returns an equation's results as transpositions of other values, or None if that gains nothing."""
    if eqn.primitive.name == "transpose" and not jaxprs.is_literal(v := eqn.invars[0]):
        value, order = turned.get(v, (env[v], tuple(range(v.aval.ndim))))
        return [value], tuple(order[i] for i in eqn.params["permutation"])
    if _is_plain_product(eqn) and (swap or any(v in turned for v in eqn.invars)):
        return _product(eqn, env, turned, swap)
    return _alike(eqn, env, turned)


def _product(eqn: Eqn, env: Env, turned: Turned, swap: bool) -> tuple[Sequence[Any], Order]:
    """Multiplies the values that the operands are transpositions of, exchanged if `swap`."""
    operands, contracted = [], []
    for v, axes in zip(eqn.invars, eqn.params["dimension_numbers"][0]):
        value, order = turned.get(v, (env[v], tuple(range(v.aval.ndim))))
        if v.aval.ndim - len(axes) > 1:  # the order of the axes of the result would change
            value, order = env[v], tuple(range(v.aval.ndim))
        operands.append(value)
        contracted.append(tuple(order[a] for a in axes))
    precision = eqn.params["precision"]
    if swap:
        operands, contracted = operands[::-1], contracted[::-1]
        precision = precision[::-1] if isinstance(precision, tuple) else precision
    numbers = (tuple(contracted), ((), ()))
    (product,) = jaxprs.bind(eqn, *operands, dimension_numbers=numbers, precision=precision)
    return [product], (1, 0) if swap else tuple(range(product.ndim))


def _alike(eqn: Eqn, env: Env, turned: Turned) -> tuple[Sequence[Any], Order] | None:
    """Computes an elementwise equation, concatenation or split before the transposition that its operands share."""
    axis = _AXES.get(eqn.primitive.name)
    if axis is None and eqn.primitive.name not in primitives.ELEMENTWISE:
        return None

    def order_of(atom: Atom) -> Order | None:
        return turned[atom][1] if jaxprs.is_in(atom, turned) else None

    orders = {order_of(a) for a in eqn.invars if a.aval.ndim}
    if len(orders) != 1 or None in orders:
        return None
    order = orders.pop()
    values = [turned[a][0] if a.aval.ndim else jaxprs.read(env, a) for a in eqn.invars]
    changed = {} if axis is None else {axis: order[eqn.params[axis]]}
    return jaxprs.bind(eqn, *values, **changed), order
