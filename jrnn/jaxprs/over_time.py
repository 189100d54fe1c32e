"""All steps at once: equations of one step evaluated over a leading axis of time, and stacks of values.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.jaxprs.programs import (
    Atom,
    Env,
    Eqn,
    bind,
    evaluate,
    in_scope,
    is_explicit,
    is_in,
    read,
    take,
    value,
)
from jrnn.jaxprs.queries import needed, other_axes


def over_time(eqns: Sequence[Eqn], outs: Iterable[Atom], env: Env, stacked: Env) -> None:
    """Evaluates what leads to `outs` for all steps.

    Adds results to `env`, or to `stacked` [T, ...] if they differ between steps.
    """
    for eqn in needed(eqns, outs, ChainMap(env, stacked))[0]:
        moving = [is_in(atom, stacked) for atom in eqn.invars]
        if not any(moving):
            evaluate([eqn], env)
            continue
        values = [
            stacked[atom] if moves else read(env, atom) for atom, moves in zip(eqn.invars, moving)
        ]
        of_one_step = functools.partial(_of_one_step, eqn)
        with in_scope(eqn):
            results = jax.vmap(of_one_step, [0 if moves else None for moves in moving])(*values)
        stacked.update(zip(eqn.outvars, results))


def _of_one_step(eqn: Eqn, *operands: Array) -> Sequence[Array]:
    params = eqn.params
    if eqn.primitive.name != "dot_general" or params.get("out_sharding") is not None:
        return bind(eqn, *operands)
    dtype = params["preferred_element_type"]
    return [product(*operands, params["dimension_numbers"], params["precision"], dtype)]


def product(
    a: Array,
    b: Array,
    numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike,
    dtype: jnp.dtype | None,
) -> Array:
    """Computes `lax.dot_general` with its batch axes joined to one.

    XLA aborts the process where it simplifies products of three batch axes (docs/notes/xla_faults.md), and every `vmap`
    around a product, such as the one over time, adds a batch axis.

    Args:
        a, b: the operands.
        numbers: the dimension numbers.
        precision: of the product.
        dtype: of the result.
    """
    contracted, batch = numbers
    count = len(batch[0])
    if count < 2 or any(is_explicit(jax.typeof(x)) for x in (a, b)):
        return jax.lax.dot_general(a, b, numbers, precision, dtype)
    joined = []
    over = []
    sizes = take(a.shape, batch[0])
    for x, summed, axes in zip((a, b), contracted, batch):
        rest = other_axes(x.ndim, axes)
        joined.append(jax.lax.collapse(jnp.transpose(x, (*axes, *rest)), 0, count))
        over.append(tuple(1 + rest.index(d) for d in summed))
        sizes += take(x.shape, other_axes(x.ndim, (*axes, *summed)))
    result = jax.lax.dot_general(*joined, (tuple(over), ((0,), (0,))), precision, dtype)
    return result.reshape(sizes)


def stack(atom: Atom, env: Env, stacked: Env, length: int) -> Array:
    """Returns the values of an atom at all steps, [T, ...]: from `stacked`, or its value in `env`, repeated."""
    if is_in(atom, stacked):
        return stacked[atom]
    each = value(env, atom)
    return jnp.broadcast_to(each, (length, *each.shape))


def stacks(
    eqns: Sequence[Eqn], outs: Sequence[Atom], env: Env, stacked: Env, length: int
) -> list[Array]:
    """Evaluates what leads to `outs` for all steps, as `over_time` does, and returns their values at all steps."""
    over_time(eqns, outs, env, stacked)
    return [stack(atom, env, stacked, length) for atom in outs]


def shifted(stacked: Array, first: Array, reverse: bool) -> Array:
    """Returns the carries before each step, from the carries after each step and the first one, [T, ...]."""
    if reverse:
        return jnp.concatenate([stacked[1:], first[None]])
    return jnp.concatenate([first[None], stacked[:-1]])
