"""The compiled functions of training: several steps in one call, and the validation loss.

Shapes: K steps in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .models.model import Carry, Model, Params
from .tasks import Batch, Task


class State(NamedTuple):
    """All that a step changes; with the seed, all that a run needs to go on as if it had never stopped."""

    params: Params
    optimizer: Any
    carry: Carry
    step: Any  # int32 [], steps done


class Measured(NamedTuple):
    """What each step of a call measured, [K]."""

    loss: Any
    gradient_norm: Any


def initial_state(model: Model, optimizer: optax.GradientTransformation, examples: int, seed: int) -> State:
    """The state before the first step, of so many examples side by side; the parameters are a function of the seed."""
    params = jax.jit(model.init)(jax.random.key(seed))
    return State(params, optimizer.init(params), model.initial_carry(examples), jnp.zeros((), jnp.int32))


def stack_batches(batches: Sequence[Batch], size: int) -> Batch:
    """Batches as one with a leading axis [K], filled up to `size` by repeating the last."""
    filled = [*batches, *[batches[-1]] * (size - len(batches))]
    return jax.tree.map(lambda *parts: np.stack(parts), *filled)


def make_train_call(
    model: Model, optimizer: optax.GradientTransformation, examples: int, seed: int
) -> Callable[[State, Batch, Any], tuple[State, Measured]]:
    """The compiled function `(state, batches [K, ...], n) -> (state, measured [K])` that does `n <= K` steps.

    The number of steps is data, not shape: one compilation serves every call, and a step's result does not depend on
    which call it is done in.
    """
    key = jax.random.fold_in(jax.random.key(seed), 1)  # parameters are drawn from the seed's own key

    def one_step(state: State, batch: Batch) -> tuple[State, Any, Any]:
        carry = restart(batch.fresh, model.initial_carry(examples), state.carry)
        step_key = jax.random.fold_in(key, state.step)
        loss, carry, gradients = model.gradients(state.params, carry, batch, step_key)
        updates, opt_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, carry, state.step + 1), loss, optax.tree.norm(gradients)

    def call(state: State, batches: Batch, n: Any) -> tuple[State, Measured]:
        def body(k, loop):
            state, measured = loop
            state, loss, norm = one_step(state, jax.tree.map(lambda a: a[k], batches))
            return state, Measured(measured.loss.at[k].set(loss), measured.gradient_norm.at[k].set(norm))

        steps = len(batches.fresh)
        return jax.lax.fori_loop(0, n, body, (state, Measured(jnp.zeros(steps), jnp.zeros(steps))))

    return jax.jit(call, donate_argnums=0)


def make_validation(task: Task) -> Callable[[Params], float]:
    """The function `params -> mean loss` over the validation batches, each with the weight of its examples.

    The batches are read one after the other with carried state. Where their shapes differ (the last may be smaller), each
    run of equal ones is compiled by itself, and starts with a state of its own.
    """
    model = task.model
    member, axis = next(iter(task.axes.items()))

    def mean(params: Params, batches: Batch) -> Any:
        def body(carry, batch):
            loss, carry = model.loss(params, restart(batch.fresh, first, carry), batch, None)
            return carry, loss

        first = model.initial_carry(getattr(batches, member).shape[1 + axis])
        return jnp.mean(jax.lax.scan(body, first, batches)[1])

    runs, weights = [], []
    for _, run in groupby(task.validation(), lambda batch: [np.shape(a) for a in jax.tree.leaves(batch)]):
        equal = list(run)
        runs.append(jax.device_put(stack_batches(equal, len(equal))))
        weights.append(len(equal) * getattr(equal[0], member).shape[axis])
    compiled = jax.jit(mean)
    return lambda params: float(np.average([compiled(params, run) for run in runs], weights=weights))


def restart(fresh: Any, initial: Carry, carry: Carry) -> Carry:
    """`initial` where the data start anew, else `carry`."""
    return jax.tree.map(lambda first, going: jnp.where(fresh, first, going), initial, carry)
