"""Branches in place of selections: masked and stopped steps that are not run, and selections that a branch has decided.

A `select` copies a carry that the step updates in place, and the step's side effects happen before it. `runs_in_branch`
returns which steps have a branch. Nothing is selected in it, because it runs only if a sequence is alive. Under `vmap` it
runs if any example is alive, and then selects for each example. So the selection is a primitive, `branch_select`, which is
no operation until its predicate is batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import (
    Primitive,
    ad,
    batching,
    jaxpr_as_fun,
    mesh_axes_type,
    mlir,
    set_check_rule,
    varying_axes,
)

# A branch takes about as long as selecting so many bytes: 2 microseconds.
_BYTES = 1 << 16
_UPDATES = primitives.with_kind("update", "control")
_WHOLE = _UPDATES - {"dynamic_update_slice"}  # of that one, XLA selects the slice alone


@jax.custom_batching.custom_vmap
def any_under_vmap(flag: Any) -> Any:
    """Returns the flag; under `vmap`, whether that of any example is True, as one value for all examples."""
    return flag


@any_under_vmap.def_vmap
def _(axis_size: int, batched: list[bool], flag: Any) -> tuple[Any, bool]:
    return (any_under_vmap(jnp.any(flag, axis=0)) if batched[0] else any_under_vmap(flag)), False


def any_of_all(flags: jax.Array) -> jax.Array:
    """Returns whether any of some flags is True: of all examples of `vmap`, and of all devices over which they vary.

    Devices have to take the same branch. One that skips a step would miss the collectives in it and in its gradient.
    """
    flag = any_under_vmap(jnp.any(flags))
    axes = varying_axes(flag)
    return jax.lax.pmax(flag.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0 if axes else flag


branch_select_p = Primitive("branch_select")


def select_in_branch(alive: Any, then: Any, otherwise: Any) -> Any:
    """Selects leaves of two pytrees in a branch that runs only if any of `alive` holds.

    The shape of `alive` is the beginning of the shape of every leaf. A scalar that is the same on all devices is True there,
    so nothing is selected.
    """
    return jax.tree.map(lambda a, b: _select_leaf(alive, a, b), then, otherwise)


def _select_leaf(alive: Any, a: Any, b: Any) -> Any:
    kinds = [mesh_axes_type(v) for v in (alive, a, b)]
    if (
        jnp.ndim(alive)
        or varying_axes(alive)
        or jnp.result_type(a) != jnp.result_type(b)
        or kinds.count(kinds[0]) < len(kinds)
    ):
        return jnp.where(_spread(alive, a), a, b)
    return branch_select_p.bind(alive, a, jnp.broadcast_to(b, jnp.shape(a)))


def _spread(alive: Any, like: Any) -> Any:
    return jnp.reshape(alive, jnp.shape(alive) + (1,) * (jnp.ndim(like) - jnp.ndim(alive)))


@branch_select_p.def_impl
def _impl(alive: Any, a: Any, b: Any) -> Any:
    return a


branch_select_p.def_abstract_eval(lambda alive, a, b: a)
mlir.register_lowering(branch_select_p, mlir.lower_fun(_impl, multiple_results=False))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    alive, *values = primals
    result = branch_select_p.bind(alive, *values)
    if all(type(t) is ad.Zero for t in tangents[1:]):
        return result, tangents[1]
    return result, branch_select_p.bind(alive, *map(ad.instantiate_zeros, tangents[1:]))


def _transpose(cotangent: Any, alive: Any, a: Any, b: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, cotangent, cotangent]
    nothing = jnp.zeros_like(cotangent)
    return [
        None,
        branch_select_p.bind(alive, cotangent, nothing),
        branch_select_p.bind(alive, nothing, cotangent),
    ]


def _batched(args: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, int]:
    size = next(v.shape[axis] for v, axis in zip(args, axes) if axis is not None)
    alive = args[0]
    of_alive = axes[0]
    a, b = (batching.bdim_at_front(v, axis, size) for v, axis in zip(args[1:], axes[1:]))
    if of_alive is None:
        return branch_select_p.bind(alive, a, b), 0
    return jnp.where(_spread(alive, a), a, b), 0


ad.primitive_jvps[branch_select_p] = _jvp
ad.primitive_transposes[branch_select_p] = _transpose
batching.primitive_batchers[branch_select_p] = _batched


# Arguments of what has stopped ------------------------------------------------------------------------------------------

# Under `vmap` a loop runs until every example has stopped, and evaluates its body for those that have stopped, too. What
# that makes is not selected. But `checkify` would report its checks. Under `checkify` this primitive is a selection, so that
# such a body gets arguments of a step that runs. Elsewhere it is no operation.
stand_in_p = Primitive("stand_in")


def with_stand_in(alive: Any, values: Any, placeholder: Any) -> Any:
    """Returns the leaves of a pytree; under `checkify`, those of a placeholder where `alive` is False."""

    def leaf(value: Any, other: Any) -> Any:
        if jnp.shape(value)[: jnp.ndim(alive)] != jnp.shape(alive) or value is other:
            return value
        return stand_in_p.bind(alive, value, other)

    return jax.tree.map(leaf, values, placeholder)


@stand_in_p.def_impl
def _stand_in(alive: Any, value: Any, other: Any) -> Any:
    return value


def _selected_stand_in(alive: Any, value: Any, other: Any) -> Any:
    return jnp.where(_spread(alive, value), value, other)


def _batched_stand_in(args: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    alive, value, other = args
    if axes[1] is None:  # what is the same for all examples is so for one that runs
        return value, None
    size = value.shape[axes[1]]
    moved = [batching.bdim_at_front(v, axis, size) for v, axis in zip(args, axes)]
    return stand_in_p.bind(*moved), 0


stand_in_p.def_abstract_eval(lambda alive, value, other: value)
mlir.register_lowering(stand_in_p, mlir.lower_fun(_stand_in, multiple_results=False))
batching.primitive_batchers[stand_in_p] = _batched_stand_in
set_check_rule(stand_in_p, _selected_stand_in)


def of_running(alive: Any, values: Any) -> Any:
    """Returns the leaves of a pytree, with those of a sequence or an example that runs in place of those that do not."""
    count = jnp.ndim(alive)
    if count:
        flat = jnp.reshape(alive, -1)
        values = jax.tree.map(lambda v: _of_first(alive, flat, v), values)
    return _of_running_example(jnp.any(alive), values)


def _of_first(alive: Any, flat: Any, value: Any) -> Any:
    """Returns an array [*alive.shape, ...] with the first running row in each that does not run."""
    shape = jnp.shape(alive)
    if jnp.shape(value)[: len(shape)] != shape:
        return value
    rows = jnp.reshape(value, (flat.size, *jnp.shape(value)[len(shape) :]))
    first = jax.lax.dynamic_index_in_dim(rows, jnp.argmax(flat), keepdims=False)
    return jnp.where(_spread(alive, value), value, first)


@jax.custom_batching.custom_vmap
def _of_running_example(alive: Any, values: Any) -> Any:
    return values


@_of_running_example.def_vmap
def _(axis_size: int, batched: list[Any], alive: Any, values: Any) -> tuple[Any, Any]:
    alive_is_batched, are_batched = batched
    if alive_is_batched:
        values = jax.tree.map(
            lambda v, b: _of_first(alive, alive, v) if b else v, values, are_batched
        )
        alive = jnp.any(alive)
    return _of_running_example(alive, values), are_batched


class Traced(NamedTuple):
    """A step, traced with the types of a carry and an x.

    Attributes:
        step: the step.
        closed: its jaxpr.
        out: the types of what it returns.
    """

    step: Callable
    closed: Any
    out: Any

    @classmethod
    def of(cls, step: Callable, carry: Any, x: Any) -> Traced | None:
        """Returns None if the step raises, which `jax.lax.scan` reports."""
        try:
            return cls(step, *jax.make_jaxpr(step, return_shape=True)(carry, x))
        except Exception:
            return None

    @property
    def has_effects(self) -> bool:
        return bool(self.closed.effects)

    def __call__(self, carry: Any, x: Any) -> Any:
        """Returns what the step returns: from its trace, if the arguments have the types of the trace."""
        leaves = jax.tree.leaves((carry, x))
        has_constants = any(
            map(jaxprs.is_literal, self.closed.jaxpr.outvars)
        )  # Python numbers have weak types
        if (
            self.has_effects
            or has_constants
            or list(map(jax.typeof, leaves)) != list(self.closed.in_avals)
        ):
            return self.step(carry, x)
        return jax.tree.unflatten(jax.tree.structure(self.out), jaxpr_as_fun(self.closed)(*leaves))

    def updates_in_place(self, carry: Any, names: frozenset[str]) -> bool:
        """Returns whether a large leaf of the carry is updated in place, by one of these primitives among others."""
        program = jaxprs.inlined(self.closed)
        producers = jaxprs.producers(program.eqns)
        pairs = zip(jax.tree.leaves(carry), program.outvars, program.invars)
        return any(
            _is_large(leaf) and names & _updates(new, old, producers) for leaf, new, old in pairs
        )


def runs_in_branch(traced: Traced, mask: Any, carry: Any) -> bool:
    """Returns whether a mask decides in a branch whether the step runs. Then nothing moves out of the loop."""
    if traced.has_effects:
        return True
    return (
        not jnp.ndim(mask)
        and any(map(_is_large, jax.tree.leaves(carry)))
        and traced.updates_in_place(carry, _WHOLE)
    )


def resets_in_branch(step: Callable, mask: Any, carry: Any, x: Any) -> bool:
    """Returns whether a mask decides in a branch what carry the step gets."""
    if jnp.ndim(mask) or not any(map(_is_large, jax.tree.leaves(carry))):
        return False
    traced = Traced.of(step, carry, x)
    return traced is not None and traced.updates_in_place(carry, _UPDATES)


def _is_large(leaf: Any) -> bool:
    return jnp.size(leaf) * jnp.result_type(leaf).itemsize >= _BYTES


def _updates(new: Any, old: Var, producers: dict[Var, Eqn]) -> set[str]:
    """Returns the primitives that make a new carry from the old one in place; none if something else does."""
    names = set()
    while new is not old:
        eqn = None if jaxprs.is_literal(new) else producers.get(new)
        if eqn is None or not primitives.is_kind(eqn, "update", "control"):
            return set()
        names.add(eqn.primitive.name)
        if primitives.is_kind(eqn, "control"):
            return names if any(v is old for v in eqn.invars) else set()
        new = eqn.invars[0]
    return names
