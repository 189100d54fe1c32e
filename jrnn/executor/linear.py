"""A linear map with a transpose of its own, as one equation.

JAX differentiates, batches and lowers the map as the plain function that it is, but transposes it as told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

Flat = list[Any]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear map and its transpose, both functions of `(known values, linear values)`, flat."""

    apply: Callable[[Flat, Flat], Flat]
    transpose: Callable[[Flat, Flat], Flat]


tangent_p = jex.Primitive("jrnn_tangent")
tangent_p.multiple_results = True


def _apply(*args: Any, linear: Linear, n_known: int) -> Flat:
    return linear.apply(list(args[:n_known]), list(args[n_known:]))


def _abstract(*avals: Any, linear: Linear, n_known: int) -> list[Any]:
    closed = jax.make_jaxpr(functools.partial(_apply, linear=linear, n_known=n_known))(*avals)
    return list(closed.out_avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear, n_known: int) -> tuple[Flat, Flat]:
    """Plain autodiff of the map, except where only its linear inputs move."""
    if all(isinstance(t, ad.Zero) for t in tangents[:n_known]):
        moved = [ad.instantiate_zeros(t) for t in tangents[n_known:]]
        known = primals[:n_known]
        bind = functools.partial(tangent_p.bind, *known, linear=linear, n_known=n_known)
        return bind(*primals[n_known:]), bind(*moved)
    apply = functools.partial(_apply, linear=linear, n_known=n_known)
    return jax.jvp(apply, list(primals), [ad.instantiate_zeros(t) for t in tangents])


def _transpose(cts: Sequence[Any], *args: Any, linear: Linear, n_known: int) -> list[Any]:
    assert not any(ad.is_undefined_primal(a) for a in args[:n_known])
    made = linear.transpose(list(args[:n_known]), [ad.instantiate_zeros(ct) for ct in cts])
    return [*[None] * n_known, *made]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, linear: Linear, n_known: int) -> tuple[Flat, list[int]]:
    """All linear values get the batch axis in front; known values keep theirs where they have one."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    axes = [None if d is None else d for d in dims[:n_known]]
    moved = [
        jnp.broadcast_to(a, (size, *jnp.shape(a))) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args[n_known:], dims[n_known:])
    ]
    batched = Linear(jax.vmap(linear.apply, (axes, 0)), jax.vmap(linear.transpose, (axes, 0)))
    outs = tangent_p.bind(*args[:n_known], *moved, linear=batched, n_known=n_known)
    return outs, [0] * len(outs)


tangent_p.def_impl(_apply)
tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_apply, multiple_results=True))


# A function with a derivative rule of its own must give its results the batch axes that the rule gives them: JAX takes
# those of the one for the other's. By this, which is no operation besides, both put one in front of every result as soon as
# one of their arguments has one.
_in_front_p = jex.Primitive("jrnn_batch_in_front")
_in_front_p.multiple_results = True


def _in_front_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[Flat, Flat]:
    return _in_front_p.bind(*primals, count=count), list(tangents[:count])


def _in_front_batch(args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[Flat, list[int]]:
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    moved = [
        jnp.broadcast_to(a, (size, *jnp.shape(a))) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)
    ]
    return _in_front_p.bind(*moved, count=count), [0] * count


_in_front_p.def_impl(lambda *values, count: list(values[:count]))
_in_front_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
ad.primitive_jvps[_in_front_p] = _in_front_jvp
batching.primitive_batchers[_in_front_p] = _in_front_batch
mlir.register_lowering(_in_front_p, lambda ctx, *values, count: list(values[:count]))


def batch_in_front(values: Sequence[Any], arguments: Sequence[Any]) -> Flat:
    """The values; under `vmap` of one of the arguments, each with the batch axis in front."""
    return _in_front_p.bind(*values, *arguments, count=len(values))
