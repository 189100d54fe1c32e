"""Differentiation of a loop: fast in reverse mode, right in every mode.

The loop is a `jax.custom_jvp` function. Its rule runs the forward loop that stores what the reverse loop needs, and
expresses the tangents as one linear equation, `tangent_p`, whose transpose is the reverse loop. Everything else that
JAX may ask of that equation (forward mode, second derivatives, batching) is answered by plain autodiff of the same loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jrnn.executor import rewrite
from jrnn.executor.fission import slices, split
from jrnn.executor.loop import Loop
from jrnn.executor.residuals import Perturbed, gradient

Flat = list[Any]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear map and its transpose, both functions of `(known values, linear values)`, flat."""

    apply: Callable[[Flat, Flat], Flat]
    transpose: Callable[[Flat, Flat], Flat]


def differentiable(loop: Loop, forbidden: Any = None) -> Callable[[Flat, Flat, Flat], tuple[Flat, Flat]]:
    """`loop.run` with a fast reverse mode.

    Args:
        loop: the loop.
        forbidden: as in `residuals.gradient`.
    """
    n_consts, n_carry = len(loop.consts), len(loop.carry)
    n_in = len(loop.inputs)
    plain = split(rewrite.apart(loop), slices) if rewrite.runs_meet(loop) else rewrite.together(loop)
    loop = rewrite.together(loop)

    def run(*flat: Any) -> Flat:
        carry, ys = plain.run(flat[:n_consts], flat[n_consts : n_consts + n_carry], flat[n_consts + n_carry :])
        return [*carry, *ys]

    @functools.cache
    def build(given: tuple[bool, ...]) -> tuple[Any, Linear]:
        perturbed = Perturbed.of(loop, given)
        grad = gradient(loop, perturbed, forbidden)

        def apply(known: Flat, tangents: Flat) -> Flat:
            def of_perturbed(*values: Any) -> Flat:
                full = list(known[:n_in])
                for i, v in zip([i for i, p in enumerate(given) if p], values):
                    full[i] = v
                return [o for o, p in zip(run(*full), perturbed.outputs) if p]

            primals = [v for v, p in zip(known, given) if p]
            return jax.jvp(of_perturbed, primals, list(tangents))[1]

        def transpose(known: Flat, cts: Flat) -> Flat:
            consts, init = known[:n_consts], known[n_consts : n_consts + n_carry]
            xs, ys = known[n_consts + n_carry : n_in], known[n_in:]
            ct_consts, ct_carry, ct_xs = grad.reverse(consts, init, xs, ys, cts)
            of_carry = iter(ct_carry)
            ct_init = [ct for p, ct in ((p, next(of_carry) if p else None) for p in perturbed.carry)]
            return [*ct_consts, *(ct for ct, p in zip(ct_init, perturbed.init) if p), *ct_xs]

        return grad, Linear(apply, transpose)

    @jax.custom_jvp
    def smooth(*flat: Any) -> Flat:
        return run(*flat)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Flat, Flat]:
        given = tuple(
            not isinstance(t, SymbolicZero) and jnp.issubdtype(jnp.result_type(p), jnp.inexact)
            for p, t in zip(primals, tangents)
        )
        grad, linear = build(given)
        carry, ys = grad.forward.run(
            primals[:n_consts], primals[n_consts : n_consts + n_carry], primals[n_consts + n_carry :]
        )
        outs = [*carry, *ys[: len(loop.ys)]]
        moved = tangent_p.bind(
            *primals,
            *ys,
            *(t for t, p in zip(tangents, given) if p),
            linear=linear,
            n_known=n_in + len(ys),
        )
        smooth_outs = iter(moved)
        return outs, [next(smooth_outs) if p else zero_tangent(o) for o, p in zip(outs, grad.perturbed.outputs)]

    smooth.defjvp(rule, symbolic_zeros=True)

    def runner(consts: Flat, init: Flat, xs: Flat) -> tuple[Flat, Flat]:
        flat = smooth(*consts, *init, *xs)
        return flat[:n_carry], flat[n_carry:]

    return runner


def zero_tangent(primal: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(primal).to_tangent_aval())


# The linear equation -------------------------------------------------------------------------------------------------

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
