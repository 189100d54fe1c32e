"""Selections that a condition has decided: where a branch runs only if a sequence is alive, nothing is selected in it.

Under `vmap` the condition of a loop holds if any example is alive, and the branch then selects for each example. So the
selection is a primitive, `decided`, which is no operation until its predicate is batched. A `select` copies a carry that the
step updates in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.jaxprs.names import Primitive, ad, batching, mlir


@jax.custom_batching.custom_vmap
def some(flag: Any) -> Any:
    """Returns the flag; under `vmap`, whether that of any example is True, as one value for all examples."""
    return flag


@some.def_vmap
def _(axis_size: int, batched: list[bool], flag: Any) -> tuple[Any, bool]:
    return (some(jnp.any(flag, axis=0)) if batched[0] else some(flag)), False


decided_p = Primitive("decided")


def choose(alive: Any, then: Any, otherwise: Any) -> Any:
    """Selects leaves of two pytrees in a branch that runs only if any of `alive` holds.

    The shape of `alive` is the beginning of the shape of every leaf. A scalar is True there, so nothing is selected.
    """
    return jax.tree.map(lambda a, b: _chosen(alive, a, b), then, otherwise)


def _chosen(alive: Any, a: Any, b: Any) -> Any:
    kinds = [getattr(jax.typeof(v), "manual_axis_type", None) for v in (alive, a, b)]
    if jnp.ndim(alive) or jnp.result_type(a) != jnp.result_type(b) or kinds.count(kinds[0]) < len(kinds):
        return jnp.where(_spread(alive, a), a, b)
    return decided_p.bind(alive, a, jnp.broadcast_to(b, jnp.shape(a)))


def _spread(alive: Any, like: Any) -> Any:
    return jnp.reshape(alive, jnp.shape(alive) + (1,) * (jnp.ndim(like) - jnp.ndim(alive)))


@decided_p.def_impl
def _impl(alive: Any, a: Any, b: Any) -> Any:
    return a


decided_p.def_abstract_eval(lambda alive, a, b: a)
mlir.register_lowering(decided_p, mlir.lower_fun(_impl, multiple_results=False))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    alive, *values = primals
    result = decided_p.bind(alive, *values)
    if all(type(t) is ad.Zero for t in tangents[1:]):
        return result, tangents[1]
    return result, decided_p.bind(alive, *map(ad.instantiate_zeros, tangents[1:]))


def _transpose(cotangent: Any, alive: Any, a: Any, b: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, cotangent, cotangent]
    nothing = jnp.zeros_like(cotangent)
    return [None, decided_p.bind(alive, cotangent, nothing), decided_p.bind(alive, nothing, cotangent)]


def _batched(args: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, int]:
    size = next(v.shape[axis] for v, axis in zip(args, axes) if axis is not None)
    alive, of_alive = args[0], axes[0]
    a, b = (batching.bdim_at_front(v, axis, size) for v, axis in zip(args[1:], axes[1:]))
    if of_alive is None:
        return decided_p.bind(alive, a, b), 0
    return jnp.where(_spread(alive, a), a, b), 0


ad.primitive_jvps[decided_p] = _jvp
ad.primitive_transposes[decided_p] = _transpose
batching.primitive_batchers[decided_p] = _batched
