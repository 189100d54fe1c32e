"""The stage that makes inputs of lookups: `x[t]`, of a constant x at an index that depends on inputs alone.

Only a loop that is differentiated needs it, because the gradient of a lookup adds to the whole constant at each step.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var
from jrnn.loops.ir import Adapter, Length, Loop, Results, RunLoop, Values


@dataclass(frozen=True)
class Lookup:
    """An equation that reads one place of a constant along an axis, and everything along the others."""

    eqn: Eqn
    index: Var
    axis: int

    def over_time(
        self,
        eqns: Sequence[Eqn],
        env: Env,
        stacked: Env,
        length: int,
    ) -> Array:
        """Returns what it reads at each step, [T, ...]: a slice, if its places follow each other."""
        x = env[self.eqn.invars[0]]
        out = self.eqn.outvars[0]
        index = stacked[self.index].reshape(length)
        first = index[0]
        last = index[-1]
        steps = jnp.arange(length, dtype=index.dtype)
        inside = (jnp.minimum(first, last) >= 0) & (jnp.maximum(first, last) < x.shape[self.axis])
        forward = jnp.all(index == first + steps)
        backward = jnp.all(index == first - steps)

        def in_any_order() -> Array:
            at_steps = dict(stacked)
            jaxprs.over_time(eqns, [out], dict(env), at_steps)
            return at_steps[out]

        def slice_from(start: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(x, start, length, self.axis)
            return jnp.moveaxis(part, self.axis, 0).reshape(length, *out.aval.shape)

        def in_order() -> Array:
            return slice_from(first)

        def backwards() -> Array:
            return jnp.flip(slice_from(last), 0)

        order = jnp.where(forward, 1, jnp.where(backward, 2, 0))
        which = jnp.where(inside, order, 0)
        return jax.lax.switch(which, [in_any_order, in_order, backwards])


def hoist_lookups(loop: Loop, constants: Collection[Var]) -> tuple[Loop, Adapter | None]:
    """Returns the loop with lookups of some of its constants as its last inputs, and its adapter; None if there is none.

    The inputs are no larger than the constants. Invariant: every value is unchanged.
    """
    lookups = []
    for eqn in loop.eqns:
        if not eqn.invars or not jaxprs.is_in(eqn.invars[0], constants):
            continue
        lookup = _lookup(eqn)
        if lookup is not None and lookup.index in loop.per_step and _is_short(loop, lookup):
            lookups.append(lookup)
    if not lookups:
        return loop, None

    def adapter(run: RunLoop, consts: Values, init: Values, xs: Values, length: Length) -> Results:
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, [lookup.index for lookup in lookups], env, stacked)
        looked_up = [lookup.over_time(loop.eqns, env, stacked, length) for lookup in lookups]
        return run(consts, init, [*xs, *looked_up], length)

    results = [lookup.eqn.outvars[0] for lookup in lookups]
    with_inputs = replace(loop, xs=(*loop.xs, *results))
    return with_inputs.with_eqns(loop.eqns, loop.outputs), adapter


def _is_short(loop: Loop, lookup: Lookup) -> bool:
    """Whether what a loop looks up is no larger than the constant where it is found."""
    if not jaxprs.is_known(loop.length):
        return False
    return 1 < loop.length <= lookup.eqn.invars[0].aval.shape[lookup.axis]


def _lookup(eqn: Eqn) -> Lookup | None:
    """Returns what an equation looks up, or None if it does something else."""
    shape = eqn.invars[0].aval.shape
    name = eqn.primitive.name
    p = eqn.params
    if name not in ("dynamic_slice", "gather") or not all(map(jaxprs.is_known, shape)):
        return None
    axes = [a for a, (n, size) in enumerate(zip(shape, p["slice_sizes"])) if size != n]
    if len(axes) != 1 or p["slice_sizes"][axes[0]] != 1:
        return None
    if name == "dynamic_slice":
        index = eqn.invars[1 + axes[0]]
    else:
        index = eqn.invars[1]
        numbers = p["dimension_numbers"]
        in_order = numbers.offset_dims == tuple(range(len(shape) - 1))
        of_one_axis = numbers.collapsed_slice_dims == numbers.start_index_map == (axes[0],)
        if index.aval.shape != (1,) or not in_order or not of_one_axis:
            return None
    return None if jaxprs.is_literal(index) else Lookup(eqn, index, axes[0])
