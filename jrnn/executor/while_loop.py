"""while_loop: `jax.lax.while_loop` with a reverse-mode gradient, for loops whose number of trips depends on the data.

Memory: a trip of the reverse pass needs the state before it. `Trips` says where that comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import JrnnError

SLOTS = 32  # of each of the two levels of checkpoints; up to SLOTS**2 trips no step is computed more than four times

POLICIES = ("checkpointed", "bounded", "host")


@dataclass(frozen=True)
class Trips:
    """How a while loop is differentiated in reverse.

    "checkpointed": any number of trips, first derivatives only. 2 x 32 states are kept whatever the number of trips n;
    a reverse pass costs up to four forward passes where n <= 1024, and n^2 / 1024 steps beyond.
    "bounded": at most `bound` trips, as a scan of that length in which the trips after the last do nothing; derivatives of
    every order, and memory for `bound` states. A loop that goes on after `bound` trips is an error at run time.
    "host": whoever runs the loop first counts its trips with concrete values and then runs a scan of that length;
    derivatives of every order, but not under jit.
    """

    policy: str = "checkpointed"
    bound: int | None = None

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {list(POLICIES)}, is {self.policy!r}")
        if (self.policy == "bounded") != (self.bound is not None):
            raise ValueError("policy 'bounded' needs a bound, and only that policy takes one")


CHECKPOINTED = Trips()


def while_loop(cond: Callable, body: Callable, constants: Any, state: Any, trips: Trips = CHECKPOINTED) -> Any:
    """Runs `state = body(constants, state)` while `cond(constants, state)`; differentiable by constants and state.

    Args:
        cond: (constants, state) -> bool scalar.
        body: (constants, state) -> a state of the same structure, shapes and dtypes.
        constants, state: pytrees of arrays. Leaves that are not floating point have no gradient.
        trips: see Trips.

    Returns:
        The last state.

    >>> import jax
    >>> def double_until(x):
    ...     return while_loop(lambda limit, s: s < limit, lambda limit, s: 2 * s, 100.0, x)
    >>> float(double_until(3.0)), float(jax.grad(double_until)(3.0))
    (192.0, 64.0)
    """
    constants, state = jax.tree.map(jnp.asarray, (constants, state))
    if trips.policy == "host":
        raise ValueError("policy 'host' is for who can count the trips before the loop, and then needs no while_loop")
    if trips.policy == "bounded":
        return _bounded(cond, body, constants, state, trips.bound)
    return _checkpointed(cond, body, constants, state)


def _bounded(cond: Callable, body: Callable, constants: Any, state: Any, bound: int) -> Any:
    def step(state, _):
        # cond, not where: in a trip that does not happen the body may divide by zero, and 0 x NaN is NaN
        return lax.cond(cond(constants, state), lambda s: body(constants, s), lambda s: s, state), None

    state, _ = lax.scan(step, state, None, length=bound)
    jax.debug.callback(partial(_check_ended, bound), cond(constants, state))
    return state


def _check_ended(bound: int, goes_on: Any) -> None:
    if goes_on:
        raise JrnnError(f"a while loop goes on after its bound of {bound} trips; give a greater bound to Trips")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _checkpointed(cond, body, constants, state):
    return lax.while_loop(partial(cond, constants), partial(body, constants), state)


def _forward(cond, body, constants, state):
    def counting(pair):
        count, s = pair
        return count + 1, body(constants, s)

    count, last = lax.while_loop(lambda pair: cond(constants, pair[1]), counting, (jnp.int32(0), state))
    return last, (constants, state, count)


def _reverse(cond, body, residuals, arriving):
    constants, first, count = residuals
    run = partial(_advance, body, constants)
    outer = -(-count // SLOTS)  # trips between checkpoints of the first level, and of the second
    inner = -(-outer // SLOTS)
    coarse = _checkpoints(run, first, count, outer)

    def trip(k, carry):
        """Takes the gradients back over trip n-1-k. The second level is filled when a segment is entered from its end."""
        of_constants, of_state, fine, segment = carry
        t = count - 1 - k
        now = t // jnp.maximum(outer, 1)
        start = now * outer
        fine = lax.cond(
            now != segment,
            lambda: _checkpoints(run, _slot(coarse, now), jnp.minimum(outer, count - start), inner),
            lambda: fine,
        )
        at = (t - start) // jnp.maximum(inner, 1)
        state = run(_slot(fine, at), t - start - at * inner)
        more, of_state = _pull_back(body, constants, state, of_state)
        return _add(of_constants, more), of_state, fine, now

    zeros = jax.tree.map(_zero_gradient, constants)
    empty = jax.tree.map(lambda x: jnp.zeros((SLOTS, *x.shape), x.dtype), first)
    of_constants, of_state, _, _ = lax.fori_loop(
        0, count, trip, (zeros, _floating(first, arriving), empty, jnp.int32(-1))
    )
    return _as_cotangents(constants, of_constants), _as_cotangents(first, of_state)


_checkpointed.defvjp(_forward, _reverse)


def _advance(body: Callable, constants: Any, state: Any, count: Any) -> Any:
    return lax.fori_loop(0, count, lambda _, s: body(constants, s), state)


def _checkpoints(run: Callable, state: Any, count: Any, stride: Any) -> Any:
    """The states before trips 0, stride, 2 stride, ... of `count`, in SLOTS slots."""
    slots = jax.tree.map(lambda x: jnp.zeros((SLOTS, *x.shape), x.dtype), state)

    def segment(k, pair):
        slots, s = pair
        slots = jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, k, 0), slots, s)
        return slots, run(s, jnp.minimum(stride, count - k * stride))

    return lax.fori_loop(0, -(-count // jnp.maximum(stride, 1)), segment, (slots, state))[0]


def _slot(slots: Any, k: Any) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, k, 0, keepdims=False), slots)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _zero_gradient(x: Any) -> Any:
    """Zeros like x; an empty array stands for the gradient of a leaf that has none."""
    return jnp.zeros_like(x) if _is_floating(x) else jnp.zeros((0,))


def _floating(like: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda x, g: g if _is_floating(x) else jnp.zeros((0,)), like, gradients)


def _as_cotangents(like: Any, gradients: Any) -> Any:
    """Gradients as JAX wants them: those of integer leaves are of type float0."""
    return jax.tree.map(lambda x, g: g if _is_floating(x) else np.zeros(x.shape, jax.dtypes.float0), like, gradients)


def _add(total: Any, more: Any) -> Any:
    return jax.tree.map(jnp.add, total, more)


def _pull_back(body: Callable, constants: Any, state: Any, of_state: Any) -> tuple[Any, Any]:
    """The gradients of one trip's constants and incoming state, from that of its outgoing state."""
    leaves, tree = jax.tree.flatten((constants, state))
    where = [k for k, x in enumerate(leaves) if _is_floating(x)]

    def of_floating(floating):
        full = list(leaves)
        for k, x in zip(where, floating):
            full[k] = x
        out = jax.tree.leaves(body(*jax.tree.unflatten(tree, full)))
        return [x for x in out if _is_floating(x)]

    _, pull = jax.vjp(of_floating, [leaves[k] for k in where])
    arriving = [g for x, g in zip(jax.tree.leaves(state), jax.tree.leaves(of_state)) if _is_floating(x)]
    (found,) = pull(arriving)
    full = [jnp.zeros((0,))] * len(leaves)
    for k, g in zip(where, found):
        full[k] = g
    return jax.tree.unflatten(tree, full)
