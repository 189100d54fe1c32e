"""Branches in place of selections: masked and stopped steps that are not run, and selections that a branch has decided.

A `select` copies a carry that the step updates in place, and the step's side effects happen before it. `runs_in_branch`
returns which steps have a branch. Nothing is selected in it, because it runs only if a sequence is alive. Under `vmap` it
runs if any example is alive, and then selects for each example. So the selection is a primitive, `branch_select`, which is
no operation until its predicate is batched.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    Primitive,
    ad,
    batching,
    jaxpr_as_fun,
    mesh_axes_type,
    mlir,
    set_check_rule,
    varying_axes,
)
from jrnn.jaxprs.mesh_axes import cast
from jrnn.loops.ir import StepFn, Tree

# A branch takes about as long as selecting this number of bytes: 2 microseconds.
MIN_BRANCH_BYTES = 1 << 16
_UPDATES = primitives.with_kind("update", "control")
# Selecting a carry copies all of it after these updates. After a `dynamic_update_slice`, XLA selects the slice alone.
_COPIED_UPDATES = _UPDATES - {"dynamic_update_slice"}


@jax.custom_batching.custom_vmap
def any_under_vmap(flag: Array) -> Array:
    """Returns the flag; under `vmap`, whether any example's flag is True, as one value for all examples."""
    return flag


@any_under_vmap.def_vmap
def _(axis_size: int, batched: list[bool], flag: Array) -> tuple[Array, bool]:
    (is_batched,) = batched
    if is_batched:
        flag = jnp.any(flag, axis=0)
    return any_under_vmap(flag), False


def any_of_all(flags: Array) -> Array:
    """Returns whether any of some flags is True: of all examples of `vmap`, and of all devices over which they vary.

    Devices have to take the same branch. One that skips a step would miss the collectives in it and in its gradient.
    """
    flag = any_under_vmap(jnp.any(flags))
    axes = varying_axes(flag)
    if not axes:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0


branch_select_p = Primitive("branch_select")

Arrays = Sequence[Array]
Axes = Sequence[int | None]  # the batch axis of each operand


def select_in_branch(alive: Array, then: Tree, otherwise: Tree) -> Tree:
    """Selects leaves of two pytrees in a branch that runs only if any of `alive` holds.

    The shape of `alive` is the beginning of the shape of every leaf. A scalar that is the same on all devices is True there,
    so nothing is selected.
    """
    return jax.tree.map(functools.partial(_select_leaf, alive), then, otherwise)


def _select_leaf(alive: Array, a: Array, b: Array) -> Array:
    kinds = list(map(mesh_axes_type, (alive, a, b)))
    if (
        jnp.ndim(alive)
        or varying_axes(alive)
        or jnp.result_type(a) != jnp.result_type(b)
        or kinds.count(kinds[0]) < len(kinds)
    ):
        return _where(alive, a, b)
    return branch_select_p.bind(alive, a, jnp.broadcast_to(b, jnp.shape(a)))


def with_axes(array: Array, ndim: int) -> Array:
    """Appends axes of size 1, up to a number of axes."""
    return jnp.reshape(array, jnp.shape(array) + (1,) * (ndim - jnp.ndim(array)))


def _where(alive: Array, a: Array, b: Array) -> Array:
    return jnp.where(with_axes(alive, jnp.ndim(a)), a, b)


def zeros_of(types: Tree, axes: AbstractSet[str]) -> Tree:
    """Returns zeros of some types, which also vary over some axes of devices."""

    def zeros(aval):
        return cast(jnp.zeros(aval.shape, aval.dtype), axes | varying_axes(aval))

    return jax.tree.map(zeros, types)


@branch_select_p.def_impl
def _impl(alive: Array, a: Array, b: Array) -> Array:
    return a


branch_select_p.def_abstract_eval(lambda alive, a, b: a)
mlir.register_lowering(branch_select_p, mlir.lower_fun(_impl, multiple_results=False))


def _jvp(primals: Arrays, tangents: Arrays) -> tuple[Array, Array]:
    alive, *values = primals
    result = branch_select_p.bind(alive, *values)
    if all(type(t) is ad.Zero for t in tangents[1:]):
        return result, tangents[1]
    return result, branch_select_p.bind(alive, *map(ad.instantiate_zeros, tangents[1:]))


def _transpose(cotangent: Array, alive: Array, a: Array, b: Array) -> list[Array | None]:
    if type(cotangent) is ad.Zero:
        return [None, cotangent, cotangent]
    nothing = jnp.zeros_like(cotangent)
    return [
        None,
        branch_select_p.bind(alive, cotangent, nothing),
        branch_select_p.bind(alive, nothing, cotangent),
    ]


def _batched(args: Arrays, axes: Axes) -> tuple[Array, int]:
    size = next(v.shape[axis] for v, axis in zip(args, axes) if axis is not None)
    alive, a, b = args
    a = batching.bdim_at_front(a, axes[1], size)
    b = batching.bdim_at_front(b, axes[2], size)
    if axes[0] is None:
        return branch_select_p.bind(alive, a, b), 0
    return _where(alive, a, b), 0


ad.primitive_jvps[branch_select_p] = _jvp
ad.primitive_transposes[branch_select_p] = _transpose
batching.primitive_batchers[branch_select_p] = _batched


# Arguments of what has stopped ------------------------------------------------------------------------------------------

# Under `vmap` a loop runs until every example has stopped, and evaluates its body for those that have stopped, too. What
# that makes is not selected. But `checkify` would report its checks. Under `checkify` this primitive is a selection, so that
# such a body gets arguments of a step that runs. Elsewhere it is no operation.
stand_in_p = Primitive("stand_in")


def with_stand_in(alive: Array, values: Tree, placeholder: Tree) -> Tree:
    """Returns the leaves of a pytree; under `checkify`, a placeholder's leaves where `alive` is False."""

    def leaf(value, other):
        if jnp.shape(value)[: jnp.ndim(alive)] != jnp.shape(alive) or value is other:
            return value
        return stand_in_p.bind(alive, value, other)

    return jax.tree.map(leaf, values, placeholder)


@stand_in_p.def_impl
def _stand_in(alive: Array, value: Array, other: Array) -> Array:
    return value


def _batched_stand_in(args: Arrays, axes: Axes) -> tuple[Array, int | None]:
    _, value, _ = args
    if axes[1] is None:  # what is the same for all examples is so for one that runs
        return value, None
    size = value.shape[axes[1]]
    batched = [batching.bdim_at_front(v, axis, size) for v, axis in zip(args, axes)]
    return stand_in_p.bind(*batched), 0


stand_in_p.def_abstract_eval(lambda alive, value, other: value)
mlir.register_lowering(stand_in_p, mlir.lower_fun(_stand_in, multiple_results=False))
batching.primitive_batchers[stand_in_p] = _batched_stand_in
set_check_rule(stand_in_p, _where)


def of_running(alive: Array, values: Tree) -> Tree:
    """Returns the leaves of a pytree; a stopped sequence or example gets the leaves of one that runs."""
    count = jnp.ndim(alive)
    if count:
        flat = jnp.reshape(alive, -1)
        values = jax.tree.map(lambda v: _of_first(alive, flat, v), values)
    return _of_running_example(jnp.any(alive), values)


def _of_first(alive: Array, flat: Array, value: Array) -> Array:
    """Returns an array [*alive.shape, ...] with the first running row in each that does not run."""
    shape = jnp.shape(alive)
    if jnp.shape(value)[: len(shape)] != shape:
        return value
    rows = jnp.reshape(value, (flat.size, *jnp.shape(value)[len(shape) :]))
    first = jax.lax.dynamic_index_in_dim(rows, jnp.argmax(flat), keepdims=False)
    return _where(alive, value, first)


@jax.custom_batching.custom_vmap
def _of_running_example(alive: Array, values: Tree) -> Tree:
    return values


@_of_running_example.def_vmap
def _(axis_size: int, batched: list[Tree], alive: Array, values: Tree) -> tuple[Tree, Tree]:
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
        closed: its closed jaxpr.
        out: the types of what it returns.
    """

    step: StepFn
    closed: ClosedJaxpr
    out: Tree

    @classmethod
    def of(cls, step: StepFn, carry: Tree, x: Tree) -> Traced | None:
        """Returns None if the step raises, which `jax.lax.scan` reports."""
        try:
            return cls(step, *jax.make_jaxpr(step, return_shape=True)(carry, x))
        except Exception:
            return None

    @property
    def has_effects(self) -> bool:
        return bool(self.closed.effects)

    def __call__(self, carry: Tree, x: Tree) -> Tree:
        """Returns what the step returns: from its trace, if the arguments have the types of the trace."""
        leaves = jax.tree.leaves((carry, x))
        # Python numbers have weak types, which the trace has lost.
        has_constants = any(map(jaxprs.is_literal, self.closed.jaxpr.outvars))
        has_other_types = list(map(jax.typeof, leaves)) != list(self.closed.in_avals)
        if self.has_effects or has_constants or has_other_types:
            return self.step(carry, x)
        return jax.tree.unflatten(jax.tree.structure(self.out), jaxpr_as_fun(self.closed)(*leaves))

    def updates_in_place(self, carry: Tree, names: frozenset[str]) -> bool:
        """Returns whether a large leaf of the carry is updated in place, by one of these primitives among others."""
        program = jaxprs.inlined(self.closed)
        producers = jaxprs.producers(program.eqns)
        for leaf, new, old in zip(jax.tree.leaves(carry), program.outvars, program.invars):
            if _is_large(leaf) and names & _updates(new, old, producers):
                return True
        return False


def runs_in_branch(traced: Traced, mask: Array, carry: Tree) -> bool:
    """Returns whether a mask decides in a branch whether the step runs. Then nothing moves out of the loop."""
    if traced.has_effects:
        return True
    if jnp.ndim(mask) or not _has_large_leaf(carry):
        return False
    return traced.updates_in_place(carry, _COPIED_UPDATES)


def resets_in_branch(step: StepFn, mask: Array, carry: Tree, x: Tree) -> bool:
    """Returns whether a mask decides in a branch what carry the step gets."""
    if jnp.ndim(mask) or not _has_large_leaf(carry):
        return False
    traced = Traced.of(step, carry, x)
    return traced is not None and traced.updates_in_place(carry, _UPDATES)


def _has_large_leaf(carry: Tree) -> bool:
    return any(map(_is_large, jax.tree.leaves(carry)))


def _is_large(leaf: Array) -> bool:
    return jnp.size(leaf) * jnp.result_type(leaf).itemsize >= MIN_BRANCH_BYTES


def _updates(new: Atom, old: Var, producers: dict[Var, Eqn]) -> set[str]:
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
