"""From a step function to a loop as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.executor import jaxprs, views
from jrnn.executor.loop import Loop

# What is given to `jax.lax.scan` as it is.
AS_IT_IS = "side effects, no steps, explicit sharding, a carry that changes type, or JAX is asked to debug"


@dataclass(frozen=True)
class Traced:
    """A loop with the values that it is given, and the trees and weak types of what it returns."""

    loop: Loop
    consts: tuple[Any, ...]
    init: tuple[Any, ...]
    xs: tuple[Any, ...]
    carry_tree: Any
    ys_tree: Any
    weak: tuple[bool, ...]  # which of the carries and outputs are of a type that gives way to others
    names: frozenset[str]  # that the step gives values, be they used or not

    def unflatten(self, carry: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        flat = [_weakly_typed(v) if weak else v for v, weak in zip((*carry, *ys), self.weak)]
        carry, ys = flat[: len(carry)], flat[len(carry) :]
        return jax.tree.unflatten(self.carry_tree, carry), jax.tree.unflatten(self.ys_tree, ys)


def trace_step(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
) -> Traced | None:
    """Traces a step, or returns None for what `jax.lax.scan` had better be given itself.

    That is: no steps at all, side effects, a carry whose type changes (`lax.scan` promotes it, or says what is wrong),
    arguments that do not fit, and shardings in the types of the values, which decide where contractions end up. And all
    steps where JAX is told to run Python as it is written, or to look for NaN, which needs the operations as they are.
    """
    if jax.config.jax_disable_jit or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return None
    if not isinstance(unroll, (int, np.integer)) or unroll < 0:
        return None
    init, carry_tree = jax.tree.flatten(carry)
    leaves, xs_tree = jax.tree.flatten(xs)
    leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
    init = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in init]
    if any(leaf.ndim == 0 for leaf in leaves):
        return None
    sizes = {leaf.shape[0] for leaf in leaves} | ({int(length)} if length is not None else set())
    if len(sizes) != 1 or not min(sizes):
        return None
    (steps,) = sizes
    trees: list[Any] = []

    def flat_step(*args: Any) -> list[Any]:
        given = jax.tree.unflatten(carry_tree, args[: len(init)]), jax.tree.unflatten(xs_tree, args[len(init) :])
        out = step(*given)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise _Unfit
        (new, new_tree), (ys, ys_tree) = jax.tree.flatten(out[0]), jax.tree.flatten(out[1])
        trees[:] = [new_tree, ys_tree]
        return [*new, *ys]

    if any(_is_sharded_by_type(jax.typeof(leaf)) for leaf in (*init, *leaves)):
        return None
    avals = [*map(jax.typeof, init), *jax.make_jaxpr(lambda xs: [x[0] for x in xs])(leaves).out_avals]
    try:
        program = jaxprs.trace(flat_step, avals)
    except _Unfit:
        return None
    outs = [a.aval for a in program.outvars]
    fits = trees[0] == carry_tree and all(
        (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type) for a, b in zip(avals, outs[: len(init)])
    )
    if program.effects or not fits or any(_is_sharded_by_type(v.aval) for v in program.constvars):
        return None
    loop = Loop(
        program.eqns,
        program.constvars,
        program.invars[: len(init)],
        program.invars[len(init) :],
        program.outvars[: len(init)],
        program.outvars[len(init) :],
        steps,
        reverse,
        unroll,
    )
    weak = tuple(a.weak_type for a in outs)
    names = frozenset(e.params["name"] for e in program.eqns if e.primitive.name == "name")
    return Traced(views.direct(loop), program.consts, tuple(init), tuple(leaves), carry_tree, trees[1], weak, names)


def _weakly_typed(v: Any) -> Any:
    return jax.lax.convert_element_type_p.bind(v, new_dtype=v.dtype, weak_type=True, sharding=None)


def _is_sharded_by_type(aval: Any) -> bool:
    axes = aval.sharding.mesh.axis_types if hasattr(aval, "sharding") else ()
    return any(axis == jax.sharding.AxisType.Explicit for axis in axes)


class _Unfit(Exception):
    """A step whose result is not a pair."""
