"""Sums over time of a value that a step computes, formed after the loop from what the step read.

A sum commutes with linear operations, so it moves up through them: the sum of `dot(a, b)` is one contraction over
time and the dot's own axes together, the sum of a reduction is one reduction, and only their operands are stacked.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs
from jrnn.executor.contraction import over_time
from jrnn.executor.jaxprs import Atom, Env, Var

_LINEAR = frozenset(
    ("transpose", "reshape", "neg", "broadcast_in_dim", "squeeze", "copy", "copy_p", "rev", "slice", "reduce_sum")
)
_ADDS = ("add", "add_any", "sub")
# A value that is not a contraction or a reduction is stacked only when it is small: otherwise adding in place is better.
_SMALL = 64 * 1024


def pays(v: Atom, made: Mapping[Var, Any], free: Collection[Var]) -> bool:
    """Whether summing after the loop is better than adding at each step."""
    if jaxprs.is_literal(v) or v not in made or v in free:
        return jaxprs.nbytes(v) <= _SMALL
    eqn = made[v]
    if eqn.primitive.name in ("dot_general", "reduce_sum"):
        return True
    if _is_linear(eqn) or eqn.primitive.name in _ADDS:
        return all(pays(a, made, free) for a in eqn.invars)
    return jaxprs.nbytes(v) <= _SMALL


def leaves(values: Iterable[Atom], made: Mapping[Var, Any], stacked: Collection[Var]) -> list[Var]:
    """The variables whose stacks the sums of `values` are formed from; `stacked` are those that exist anyway."""
    values = list(values)
    known = dict.fromkeys(stacked)
    for contractions_only in (True, False):  # what a contraction reads is stacked, so a reduction may read it too
        found = [leaf for v in values for leaf in _leaves(v, made, known, contractions_only)]
        known.update(dict.fromkeys(found))
    return list(dict.fromkeys(found))


def frugal(values: Mapping[int, Atom], made: Mapping[Var, Any], stacked: Collection[Var]) -> dict[int, Atom]:
    """Those of `values` whose sums need no more stacks than `stacked` and what contractions read."""
    known = {*stacked, *(leaf for v in values.values() for leaf in _leaves(v, made, stacked, True))}
    return {i: v for i, v in values.items() if known.issuperset(leaves([v], made, known))}


def _leaves(v: Atom, made: Mapping[Var, Any], stacked: Collection[Var], contractions_only: bool) -> list[Var]:
    if jaxprs.is_literal(v):
        return []
    eqn = None if v in stacked else made.get(v)
    if eqn is not None and eqn.primitive.name == "dot_general":
        return jaxprs.inputs(eqn)
    if eqn is not None and (_is_linear(eqn) or eqn.primitive.name in _ADDS):
        return [leaf for a in eqn.invars for leaf in _leaves(a, made, stacked, contractions_only)]
    return [] if contractions_only else [v]


def total(v: Atom, made: Mapping[Var, Any], stacked: Env, env: Env, length: int, dtype: Any = None) -> Any:
    """The sum over time of `v`; `stacked` holds what varies, [T, ...], and `env` what is constant.

    It is formed in `dtype`, by default the type of `v`: where the step widens a value before it adds it, not even the sum
    of the narrow values may be narrow.
    """
    dtype = dtype or v.aval.dtype
    if jaxprs.is_literal(v) or v in env:
        return _repeated(jaxprs.value(env, v).astype(dtype), length)
    if v in stacked:
        return jnp.sum(stacked[v], axis=0, dtype=dtype)
    eqn = made[v]
    with jaxprs.in_scope(eqn):
        if eqn.primitive.name == "convert_element_type":
            narrow = jnp.promote_types(dtype, eqn.invars[0].aval.dtype) != dtype
            return total(eqn.invars[0], made, stacked, env, length, None if narrow else dtype).astype(dtype)
        if eqn.primitive.name == "dot_general":
            return _contraction(eqn, stacked, env, length, dtype)
        operand = eqn.invars[0]
        inner = made.get(operand) if not jaxprs.is_literal(operand) and operand not in stacked else None
        if inner is not None and _is_swapped_dot(eqn, inner):
            return _contraction(inner, stacked, env, length, dtype, swap=True)
        if eqn.primitive.name == "reduce_sum" and operand in stacked:
            axes = (0, *(a + 1 for a in eqn.params["axes"]))
            return jnp.sum(stacked[operand], axis=axes, dtype=dtype)
        sums = [total(a, made, stacked, env, length, dtype) for a in eqn.invars]
        return eqn.primitive.bind(*sums, **eqn.params)


def _repeated(value: Any, length: int) -> Any:
    """`value * length`; integers wrap around as sums do, and what `length` overflows is multiplied in float32."""
    dtype = value.dtype
    wide = accumulator(dtype)
    return (value.astype(wide) * jnp.asarray(length).astype(wide)).astype(dtype)


def accumulator(dtype: Any) -> Any:
    """The type to form a long sum of `dtype` in: float32 for narrower floats."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def _is_linear(eqn: Any) -> bool:
    if eqn.primitive.name == "convert_element_type":
        return all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (eqn.invars[0], eqn.outvars[0]))
    return eqn.primitive.name in _LINEAR and len(eqn.invars) == 1


def _is_swapped_dot(eqn: Any, inner: Any) -> bool:
    """Whether `eqn` transposes the dot `inner` into the dot of the same operands, exchanged."""
    if eqn.primitive.name != "transpose" or inner.primitive.name != "dot_general":
        return False
    (lhs_contract, _), (lhs_batch, _) = inner.params["dimension_numbers"]
    rank = len(inner.outvars[0].aval.shape)
    free = inner.invars[0].aval.ndim - len(lhs_contract)
    return not lhs_batch and tuple(eqn.params["permutation"]) == (*range(free, rank), *range(free))


def _contraction(eqn: Any, stacked: Env, env: Env, length: int, dtype: Any, swap: bool = False) -> Any:
    """The sum over time of a dot: time is contracted together with the dot's own axes."""
    (lhs, rhs), (dims, batch) = eqn.invars, eqn.params["dimension_numbers"]
    if swap:
        lhs, rhs, dims, batch = rhs, lhs, dims[::-1], batch[::-1]
    operands = [lhs, rhs]
    fixed = [a for a in operands if jaxprs.is_literal(a) or a not in stacked]
    if fixed:  # a constant operand: sum the other one first
        values = [jaxprs.read(env, a) if a is fixed[0] else total(a, {}, stacked, env, length) for a in operands]
    else:
        values = [stacked[a] for a in operands]
        dims = tuple((0, *(a + 1 for a in axes)) for axes in dims)
        batch = tuple(tuple(a + 1 for a in axes) for axes in batch)
    settings = dict(
        precision=_exchanged(eqn.params["precision"]) if swap else eqn.params["precision"],
        preferred_element_type=dtype if dtype != eqn.outvars[0].aval.dtype else eqn.params["preferred_element_type"],
    )
    if fixed or batch[0]:
        return jax.lax.dot_general(*values, (dims, batch), **settings)
    return over_time(*values, dims, **settings)


def _exchanged(precision: Any) -> Any:
    return precision[::-1] if isinstance(precision, tuple) else precision
