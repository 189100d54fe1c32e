"""Loops that stop early: a bounded loop whose work ends when its condition says so, with derivatives of every order.

Evaluated without a derivative, such a loop is one `jax.lax.while_loop`. It is differentiated as a scan of the bounded
length, in which one `jax.lax.cond` a step skips what comes after the stop. Under `vmap` and `jax.shard_map` both go on until
every example on every device has stopped: `any_of_all` joins the predicates. Examples that have stopped keep their state
(`branches.py`). For them the body is evaluated with arguments of its first step, so that no derivative of what comes after
the stop, such as the derivative of 1 / 0, reaches a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn.errors import ScanError
from jrnn.jaxprs import without_closure
from jrnn.jaxprs.mesh_axes import cast, like, varying_axes
from jrnn.loops.ir import StepFn, Tree, promoted
from jrnn.loops.wrappers.branches import (
    any_of_all,
    of_running,
    select_in_branch,
    with_stand_in,
    zeros_of,
)

# From a state or a carry to booleans.
Predicate = Callable[[Tree], Array]
# `(step, carried, xs) -> (carried, ys)`: a scan.
BoundedScan = Callable[[StepFn, Tree, Tree], tuple[Tree, Tree]]


def stopping(continues: Predicate, body: StepFn, placeholder: Tree, zeros: Tree) -> StepFn:
    """Returns a step `((alive, state), x) -> (the same, y)` of a scan that stops early.

    Args:
        continues: state -> booleans, whether the next step is run.
        body: `(state, x) -> (state, y)`.
        placeholder: a state and an x, with which the body is evaluated where a sequence has stopped.
        zeros: the y of a step after the stop.
    """
    placeholder = lax.stop_gradient(placeholder)

    def step(carried, x):
        def go(carried, x):
            alive, state = carried
            new, y = body(*select_in_branch(alive, (state, x), placeholder))
            new = select_in_branch(alive, new, state)
            return (alive & continues(new), new), select_in_branch(alive, y, zeros)

        def skip(carried, x):
            return carried, zeros

        return lax.cond(any_of_all(carried[0]), go, skip, carried, x)

    return step


def run(
    continues: Predicate,
    body: StepFn,
    state: Tree,
    xs: Tree,
    ys: Tree,
    steps: int,
    reverse: bool,
    bounded: BoundedScan,
) -> tuple[Tree, Tree]:
    """Runs a loop that stops early: `(state, ys)`.

    Args:
        continues, body: as in `stopping`; they may close over values that are differentiated.
        state: the first state.
        xs: a pytree with leaves [steps, ...].
        ys: the type of the y of a step.
        steps: the largest number of steps, at least 1.
        reverse: whether the steps are taken from the last to the first.
        bounded: `(step, carried, xs) -> (carried, ys)`, the scan whose derivative is taken, of a step of `stopping`.
    """

    def first(xs):
        return jax.tree.map(lambda stacked: stacked[-1 if reverse else 0], xs)

    # Inside of `jax.shard_map`, devices may stop at different steps: all that is selected then varies from one to another.
    axes = varying_axes(jax.eval_shape(continues, state))
    state = cast(state, axes) if axes else state
    condition, of_cond = without_closure(continues, state)
    body_of, of_body = without_closure(body, state, first(xs))

    def parts(of_cond, of_body):
        zeros = zeros_of(ys, axes)
        return functools.partial(condition, of_cond), functools.partial(body_of, of_body), zeros

    def arguments(continues, state, xs):
        """Returns a state and an x of a step that runs, for sequences that have stopped."""
        state, x = lax.stop_gradient((state, first(xs)))
        return of_running(continues(state), (state, x))

    @jax.custom_jvp
    def of_inputs(of_cond, of_body, state, xs):
        continues, _, _ = parts(of_cond, of_body)
        alive = jnp.any(continues(state))
        of_body = with_stand_in(alive, of_body, of_running(alive, of_body))
        placeholder = arguments(continues, state, xs)
        return _run_while(*parts(of_cond, of_body), placeholder, state, xs, steps, reverse)

    @of_inputs.defjvp
    def _(primals, tangents):
        def scanned(of_cond, of_body, state, xs):
            continues, body, zeros = parts(of_cond, of_body)
            step = stopping(continues, body, arguments(continues, state, xs), zeros)
            (_, state), ys = bounded(step, (continues(state), state), xs)
            return state, ys

        return jax.jvp(scanned, primals, tangents)

    return of_inputs(of_cond, of_body, state, xs)


def _run_while(
    continues: Predicate,
    body: StepFn,
    zeros: Tree,
    placeholder: Tree,
    state: Tree,
    xs: Tree,
    steps: int,
    reverse: bool,
) -> tuple[Tree, Tree]:
    """Runs a loop that stops early as one while loop, which has no reverse-mode derivative: `(state, ys)`."""

    def stacked_zeros(zero):
        return like(jnp.zeros((steps, *jnp.shape(zero)), jnp.result_type(zero)), zero)

    def is_running(carried):
        k, alive, _, _ = carried
        return any_of_all(alive) & (k < steps)

    def iteration(carried):
        k, alive, state, ys = carried
        t = steps - 1 - k if reverse else k
        x = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, t, keepdims=False), xs)
        new, y = body(*with_stand_in(alive, (state, x), placeholder))
        new = select_in_branch(alive, new, state)
        y = select_in_branch(alive, y, zeros)
        ys = jax.tree.map(lambda ys, v: lax.dynamic_update_index_in_dim(ys, v, t, 0), ys, y)
        return k + 1, alive & continues(new), new, ys

    ys = jax.tree.map(stacked_zeros, zeros)
    start = jnp.int32(0), continues(state), state, ys
    _, _, state, ys = lax.while_loop(is_running, iteration, start)
    return state, ys


def run_until(
    until: Predicate,
    step: StepFn,
    init: Tree,
    xs: Tree,
    length: int | None,
    steps: int,
    reverse: bool,
    bounded: BoundedScan,
) -> tuple[Tree, Tree]:
    """Runs a scan that stops where `until` says so: `(carry, ys)`.

    Args:
        until: carry -> booleans, evaluated before each step.
        step, init, xs, length, reverse: the arguments of the scan.
        steps: T, at least 1.
        bounded: `(step, carried, xs) -> (carried, ys)`, the scan whose derivative is taken, of a step of `stopping`.
    """

    def whole(init, xs):
        return lax.scan(step, init, xs, length, reverse)

    def continues(carry):
        return ~until(carry)

    last, ys = jax.eval_shape(whole, init, xs)
    init = promoted(init, last)
    y = jax.tree.map(lambda y: jax.eval_shape(lambda v: v[0], y), ys)
    _check_until(jax.eval_shape(until, init), (last, y))
    state, ys = run(continues, step, init, xs, y, steps, reverse, bounded)
    return state, ys


def _check_until(stops: Array, results: Tree) -> None:
    """Raises a ScanError unless `until` returns booleans whose shape begins the shape of all results."""
    if not hasattr(stops, "dtype") or stops.dtype != jnp.bool_:
        kind = getattr(stops, "dtype", type(stops).__name__)
        raise ScanError(
            f"scan: until must return booleans, but returns {kind}; compare the carry with something"
        )
    for leaf in jax.tree.leaves(results):
        if leaf.shape[: len(stops.shape)] != stops.shape:
            raise ScanError(
                f"scan: until returns booleans of shape {list(stops.shape)}, so every leaf of the carry and of the outputs "
                f"must begin with that shape, but one is {list(leaf.shape)}; reduce them with jnp.all or jnp.any"
            )
