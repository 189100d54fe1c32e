"""Products with a constant matrix on the left, as `jax.vmap` of `W @ x` makes them.

Their results and cotangents are transposed in every step, and stacked both ways. With the matrix on the right, the batch
comes first throughout and the transpositions cancel.
"""

from __future__ import annotations

from typing import Any

import jax

from jrnn.executor import jaxprs, primitives
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop

Turned = dict[Var, tuple[Any, tuple[int, ...]]]  # what is a transposition: of which value, and how


def batch_first(loop: Loop) -> Loop:
    """Rewrites `W x^T`, W constant, as `(x W^T)^T`, and takes transpositions out of what reads the result.

    Invariant: every value stays what it was.
    """
    constant = set(loop.consts)
    swapped = {id(eqn) for eqn in loop.eqns if _is_plain_product(eqn) and _matrix_first(eqn, constant)}
    read = {v for eqn in loop.eqns if _is_plain_product(eqn) for v in jaxprs.inputs(eqn)}
    turns = any(eqn.primitive.name == "transpose" and eqn.outvars[0] in read for eqn in loop.eqns)
    if not swapped and not turns:
        return loop

    def evaluation(env: Env) -> Env:
        turned: Turned = {}
        for eqn in loop.eqns:
            with jaxprs.in_scope(eqn):
                found = _turned(eqn, env, turned, id(eqn) in swapped)
            if found is None:
                jaxprs.evaluate([eqn], env)
                continue
            values, order = found
            for out, value in zip(eqn.outvars, values):
                if order == tuple(range(len(order))):
                    env[out] = value
                else:
                    turned[out] = value, order
                    env[out] = jax.lax.transpose(value, order)  # dropped again where nothing reads it
        return env

    return loop.rewritten(evaluation)


def _is_plain_product(eqn: Any) -> bool:
    """Whether it is a `dot_general` of two variables without batch axes."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    return not eqn.params["dimension_numbers"][1][0] and eqn.params.get("out_sharding") is None


def _matrix_first(eqn: Any, constant: set[Var]) -> bool:
    left, right = eqn.invars
    (axes, _), _ = eqn.params["dimension_numbers"]
    return left in constant and right not in constant and (left.aval.ndim, right.aval.ndim, len(axes)) == (2, 2, 1)


def _turned(eqn: Any, env: Env, turned: Turned, swap: bool) -> tuple[list[Any], tuple[int, ...]] | None:
    """An equation's results as transpositions of other values, or None where that gains nothing."""
    if eqn.primitive.name == "transpose" and eqn.invars[0] in turned:
        value, order = turned[eqn.invars[0]]
        return [value], tuple(order[i] for i in eqn.params["permutation"])
    if eqn.primitive.name == "transpose" and not jaxprs.is_literal(eqn.invars[0]):
        return [env[eqn.invars[0]]], tuple(eqn.params["permutation"])
    if _is_plain_product(eqn) and (swap or any(v in turned for v in eqn.invars)):
        return _product(eqn, env, turned, swap)
    return _alike(eqn, env, turned)


def _product(eqn: Any, env: Env, turned: Turned, swap: bool) -> tuple[list[Any], tuple[int, ...]]:
    """The product of what the operands are transpositions of, operands exchanged where asked."""
    operands, contracted = [], []
    for v, axes in zip(eqn.invars, eqn.params["dimension_numbers"][0]):
        value, order = turned.get(v, (env[v], tuple(range(v.aval.ndim))))
        if v.aval.ndim - len(axes) > 1:  # the order of the axes of the result would change
            value, order = env[v], tuple(range(v.aval.ndim))
        operands.append(value)
        contracted.append(tuple(order[a] for a in axes))
    params = eqn.primitive.get_bind_params(eqn.params)
    precision = params["precision"]
    if swap:
        operands, contracted = operands[::-1], contracted[::-1]
        precision = precision[::-1] if isinstance(precision, tuple) else precision
    numbers = (tuple(contracted), ((), ()))
    product = eqn.primitive.bind(*operands, **{**params, "dimension_numbers": numbers, "precision": precision})
    return [product], (1, 0) if swap else tuple(range(product.ndim))


# The parameter that holds the axis of primitives that join or cut along one.
_AXES = {"concatenate": "dimension", "split": "axis"}


def _alike(eqn: Any, env: Env, turned: Turned) -> tuple[list[Any], tuple[int, ...]] | None:
    """An elementwise equation, concatenation or split of values that are all transposed alike, done before it."""
    axis = _AXES.get(eqn.primitive.name)
    if axis is None and eqn.primitive.name not in primitives.ELEMENTWISE:
        return None

    def order_of(atom: Atom) -> Any:
        return None if jaxprs.is_literal(atom) or atom not in turned else turned[atom][1]

    orders = {order_of(a) for a in eqn.invars if a.aval.ndim}
    if len(orders) != 1 or None in orders:
        return None
    order = orders.pop()
    values = [turned[a][0] if a.aval.ndim else jaxprs.read(env, a) for a in eqn.invars]
    params = eqn.primitive.get_bind_params(eqn.params)
    if axis is not None:
        params = {**params, axis: order[params[axis]]}
    out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out], order
