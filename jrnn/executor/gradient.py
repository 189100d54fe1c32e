"""Differentiation of a loop: fast in reverse mode, right in every mode.

The loop is a `jax.custom_jvp` function. Its rule runs the forward loop that stores what the reverse loop needs, and
expresses the tangents as one linear equation, `tangent_p`, whose transpose is the reverse loop. Everything else that
JAX may ask of that equation (forward mode, second derivatives, batching) is answered by plain autodiff of the same loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jrnn.executor import rewrite
from jrnn.executor.fission import slices, split
from jrnn.executor.linear import Flat, Linear, batch_in_front, tangent_p
from jrnn.executor.loop import Loop
from jrnn.executor.residuals import Perturbed, SideEffects, gradient


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

    def run_as_written(*flat: Any) -> Flat:
        carry, ys = loop.run(flat[:n_consts], flat[n_consts : n_consts + n_carry], flat[n_consts + n_carry :])
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
        return batch_in_front(run(*flat), flat)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Flat, Flat]:
        given = _given(primals, tangents)
        try:
            grad, linear = build(given)
        except SideEffects:
            return jvp_where_given(run_as_written, primals, tangents)
        carry, ys = grad.forward.run(
            primals[:n_consts], primals[n_consts : n_consts + n_carry], primals[n_consts + n_carry :]
        )
        outs = batch_in_front([*carry, *ys[: len(loop.ys)]], primals)
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


def _given(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Which arguments of a rule have tangents."""
    return tuple(
        not isinstance(t, SymbolicZero) and jnp.issubdtype(jnp.result_type(p), jnp.inexact)
        for p, t in zip(primals, tangents)
    )


def jvp_where_given(run: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` for a rule with symbolic zeros: of a function of flat arguments, of which some have no tangents."""
    moving = [i for i, given in enumerate(_given(primals, tangents)) if given]

    def of_moving(*values: Any) -> Sequence[Any]:
        flat = list(primals)
        for i, v in zip(moving, values):
            flat[i] = v
        return run(*flat)

    outs, moved = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    smooth = [jnp.issubdtype(out.dtype, jnp.inexact) for out in outs]
    moved = [t if is_smooth else zero_tangent(out) for out, t, is_smooth in zip(outs, moved, smooth)]
    return batch_in_front(outs, primals), moved


def zero_tangent(primal: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(primal).to_tangent_aval())
