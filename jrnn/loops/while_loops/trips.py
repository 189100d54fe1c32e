"""Loops of nets whose number of trips depends on the data, with a reverse-mode gradient and without a bound.

Each trip of the reverse pass needs the state before that trip. `Trips` chooses where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn.errors import JrnnError
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import Tree
from jrnn.loops.while_loops.while_loop import while_loop

SLOTS = 32  # per level of checkpoints; with up to SLOTS**2 trips no step is computed more than four times
# `(constants, state) -> a boolean scalar`, and `(constants, state) -> state`
Cond = Callable[[Tree, Tree], Array]
Body = Callable[[Tree, Tree], Tree]
POLICIES = ("checkpointed", "bounded", "host")


@dataclass(frozen=True)
class Trips:
    """How a while loop is differentiated in reverse mode.

    "checkpointed": any number of trips n, first derivatives only. It keeps 2 x 32 states for any n. A reverse pass costs up
    to four forward passes if n <= 1024, and n^2 / 1024 steps otherwise.
    "bounded": at most `bound` trips, by `while_loop`. It has derivatives of every order, and keeps `bound` states. A loop
    that continues after `bound` trips raises an error at run time.
    "host": the caller counts the trips with concrete values, and then runs a scan of that length. It has derivatives of
    every order, but does not work under jit.
    """

    policy: str = "checkpointed"
    bound: int | None = None

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {list(POLICIES)}, but is {self.policy!r}")
        if (self.policy == "bounded") != (self.bound is not None):
            raise ValueError("policy 'bounded' needs a bound, and only that policy takes one")


CHECKPOINTED = Trips()


def run_trips(
    cond: Cond, body: Body, constants: Tree, state: Tree, trips: Trips = CHECKPOINTED
) -> Tree:
    """Runs `state = body(constants, state)` while `cond(constants, state)`, differentiable in constants and state.

    Args:
        cond: (constants, state) -> bool scalar.
        body: (constants, state) -> a state of the same structure, shapes and dtypes.
        constants, state: pytrees of arrays. Leaves that are not floating point have no gradient.
        trips: see Trips.

    Returns:
        The last state.

    >>> import jax
    >>> def double_until(x):
    ...     return run_trips(lambda limit, s: s < limit, lambda limit, s: 2 * s, 100.0, x)
    >>> float(double_until(3.0)), float(jax.grad(double_until)(3.0))
    (192.0, 64.0)
    """
    constants, state = jax.tree.map(jnp.asarray, (constants, state))
    if trips.policy == "host":
        raise ValueError(
            "run_trips: policy 'host' is for `to_jax`; give 'checkpointed', or 'bounded' with a bound"
        )
    if trips.policy == "checkpointed":
        return _checkpointed(cond, body, constants, state)
    bound = trips.bound
    last = while_loop(
        partial(cond, constants),
        partial(body, constants),
        state,
        max_steps=bound,
        checkpoints=bound,
    )
    jax.debug.callback(partial(_check_ended, bound), cond(constants, last))
    return last


def _check_ended(bound: int, goes_on: Array) -> None:
    if goes_on:
        raise JrnnError(
            f"run_trips: the loop continues after its bound of {bound} trips; give Trips a larger bound"
        )


# Checkpoints of two levels --------------------------------------------------------------------------------------------
#
# The forward pass counts its n trips, and keeps its first state only. The reverse pass runs the loop again and keeps the
# state before each of 32 segments; then, from the last segment to the first, the states before each of 32 segments in it;
# then each trip of these, from the last to the first, is reached from the state before its segment.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _checkpointed(cond: Cond, body: Body, constants: Tree, state: Tree) -> Tree:
    return lax.while_loop(partial(cond, constants), partial(body, constants), state)


def _forward(cond: Cond, body: Body, constants: Tree, state: Tree) -> tuple[Tree, Tree]:
    def continues(counted):
        _, s = counted
        return cond(constants, s)

    def counting(counted):
        count, s = counted
        return count + 1, body(constants, s)

    count, last = lax.while_loop(continues, counting, (jnp.int32(0), state))
    return last, (constants, state, count)


def _reverse(cond: Cond, body: Body, residuals: Tree, arriving: Tree) -> tuple[Tree, Tree]:
    constants, first, count = residuals
    run = partial(_advance, body, constants)

    def trip(state, gradients):
        """Pulls the gradients back over one trip from a state."""
        of_constants, of_state = gradients
        _, pull = jax.vjp(body, constants, state)
        added, of_state = pull(_as_cotangents(state, of_state))
        of_constants = jax.tree.map(jnp.add, of_constants, _without_float0(constants, added))
        return of_constants, _without_float0(state, of_state)

    def trips(levels, first, count, gradients):
        """Pulls the gradients back over `count` trips from a state, with checkpoints of some levels."""
        if not levels:

            def from_first(k, gradients):
                return trip(run(first, count - 1 - k), gradients)

            return lax.fori_loop(0, count, from_first, gradients)

        stride = -(-count // SLOTS)
        segments = -(-count // jnp.maximum(stride, 1))
        states = _checkpoints(run, first, segments, stride, count)

        def segment(k, gradients):
            at = segments - 1 - k
            state = jax.tree.map(partial(_slot, at), states)
            return trips(levels - 1, state, jnp.minimum(stride, count - at * stride), gradients)

        return lax.fori_loop(0, segments, segment, gradients)

    zeros = jax.tree.map(jnp.zeros_like, _without_float0(constants, constants))
    start = zeros, _without_float0(first, arriving)
    of_constants, of_state = trips(2, first, count, start)
    return _as_cotangents(constants, of_constants), _as_cotangents(first, of_state)


_checkpointed.defvjp(_forward, _reverse)


def _advance(body: Body, constants: Tree, state: Tree, count: Array) -> Tree:
    return lax.fori_loop(0, count, lambda _, s: body(constants, s), state)


def _slot(k: Array, slots: Array) -> Array:
    return lax.dynamic_index_in_dim(slots, k, 0, keepdims=False)


def _checkpoints(
    run: Callable[[Tree, Array], Tree], state: Tree, segments: Array, stride: Array, count: Array
) -> Tree:
    """Returns the states before trips 0, stride, 2 stride, ... of `count`, in SLOTS slots."""

    def segment(k, carried):
        slots, s = carried
        slots = jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, k, 0), slots, s)
        return slots, run(s, jnp.minimum(stride, count - k * stride))

    slots = jax.tree.map(lambda x: jnp.zeros((SLOTS, *x.shape), x.dtype), state)
    slots, _ = lax.fori_loop(0, segments, segment, (slots, state))
    return slots


def _without_float0(like: Tree, cotangents: Tree) -> Tree:
    """Replaces the cotangents of leaves without gradients, which a loop cannot carry, by empty arrays."""

    def leaf(x, g):
        return g if is_smooth(x) else jnp.zeros((0,))

    return jax.tree.map(leaf, like, cotangents)


def _as_cotangents(like: Tree, gradients: Tree) -> Tree:
    """Gives leaves without gradients cotangents of dtype float0, as JAX requires."""

    def leaf(x, g):
        return g if is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(leaf, like, gradients)
