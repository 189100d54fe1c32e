"""The compiled functions of training: several steps in one call, and the validation loss.

Shapes: K steps in one call, T characters in a chunk, B streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Carry, Model, Params
from .text import Chunk


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


def initial_state(model: Model, optimizer: optax.GradientTransformation, streams: int, seed: int) -> State:
    """The state before the first step; the parameters are a function of the seed."""
    params = jax.jit(model.init)(jax.random.key(seed))
    return State(params, optimizer.init(params), model.initial_carry(streams), jnp.zeros((), jnp.int32))


def stack_chunks(chunks: Sequence[Chunk], size: int) -> Chunk:
    """Chunks as one with a leading axis [K], filled up to `size` by repeating the last."""
    filled = [*chunks, *[chunks[-1]] * (size - len(chunks))]
    return Chunk(*(np.stack(parts) for parts in zip(*filled)))


def make_train_call(
    model: Model, optimizer: optax.GradientTransformation, streams: int, seed: int
) -> Callable[[State, Chunk, Any], tuple[State, Measured]]:
    """The compiled function `(state, chunks [K, ...], n) -> (state, measured [K])` that does `n <= K` steps.

    The number of steps is data, not shape: one compilation serves every call, and a step's result does not depend on
    which call it is done in.
    """
    key = jax.random.fold_in(jax.random.key(seed), 1)  # parameters are drawn from the seed's own key

    def one_step(state: State, chunk: Chunk) -> tuple[State, Any, Any]:
        carry = restart(chunk.fresh, model.initial_carry(streams), state.carry)
        step_key = jax.random.fold_in(key, state.step)
        loss, carry, gradients = model.gradients(state.params, carry, chunk, step_key)
        updates, opt_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, carry, state.step + 1), loss, optax.tree.norm(gradients)

    def call(state: State, chunks: Chunk, n: Any) -> tuple[State, Measured]:
        def body(k, loop):
            state, measured = loop
            state, loss, norm = one_step(state, jax.tree.map(lambda a: a[k], chunks))
            return state, Measured(measured.loss.at[k].set(loss), measured.gradient_norm.at[k].set(norm))

        steps = len(chunks.fresh)
        return jax.lax.fori_loop(0, n, body, (state, Measured(jnp.zeros(steps), jnp.zeros(steps))))

    return jax.jit(call, donate_argnums=0)


def make_validation(model: Model, chunks: Sequence[Chunk]) -> Callable[[Params], Any]:
    """The compiled function `params -> mean loss` over chunks that are read one after the other with carried state."""
    streams = chunks[0].tokens.shape[1]
    stacked = jax.device_put(stack_chunks(chunks, len(chunks)))

    def validate(params: Params, chunks: Chunk) -> Any:
        def body(carry, chunk):
            loss, carry = model.loss(params, carry, chunk, None)
            return carry, loss

        _, losses = jax.lax.scan(body, model.initial_carry(streams), chunks)
        return jnp.mean(losses)

    compiled = jax.jit(validate)
    return lambda params: compiled(params, stacked)


def restart(fresh: Any, initial: Carry, carry: Carry) -> Carry:
    """`initial` where the text starts anew, else `carry`."""
    return jax.tree.map(lambda first, going: jnp.where(fresh, first, going), initial, carry)
