"""The compiled functions of training: several steps in one call, and the validation loss.

Shapes: K steps in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrnn.errors import ConfigError
from jrnn.train.config import Config
from jrnn.train.models.interface import CARRY_AXIS, Carry, Model, Outcome, Params
from jrnn.train.optimizers import make_optimizer, name_of, trained
from jrnn.train.tasks import Batch, Task
from jrnn.train.toml_codec import hint


class State(NamedTuple):
    """All that a step changes; with the seed, all that a run needs to continue to the bit."""

    params: Params
    optimizer: Any
    carry: Carry
    step: Any  # int32 [], steps done
    mean: Params  # the running mean of the parameters; empty without `ema`

    @property
    def evaluation_params(self) -> Params:
        """The parameters to validate, sample and export."""
        return self.mean or self.params


class Measured(NamedTuple):
    """Measurements of each step of a call, [K]."""

    loss: Any
    gradient_norm: Any
    bad: Any  # bool: the loss, the gradient or the update was not finite, or the loss above its limit


class Recipe(NamedTuple):
    """What a step needs besides its model.

    Attributes:
        optimizer: from `make_optimizer`.
        config: of the run.
        axes: along which a batch is cut that is read in parts, see `Task`.
    """

    optimizer: optax.GradientTransformationExtraArgs
    config: Config
    axes: Mapping[str, int] = {}

    @classmethod
    def of(cls, config: Config, axes: Mapping[str, int]) -> Recipe:
        return cls(make_optimizer(config.optimizer, config.train.steps), config, axes)


def initial_state(model: Model, steps: Recipe) -> State:
    """Returns the state before the first step; the parameters are a function of the seed."""
    key = jax.random.key(steps.config.seed)
    # The parameters of a model that tells their shapes are read from files, and are no part of a compiled program.
    return state_of(
        model, steps, model.init(key) if hasattr(model, "shapes") else jax.jit(model.init)(key)
    )


def abstract_state(model: Model, steps: Recipe) -> State:
    """Returns the shapes and types of a run's state."""
    key = jax.random.key(steps.config.seed)
    shapes = model.shapes() if hasattr(model, "shapes") else jax.eval_shape(model.init, key)
    return jax.eval_shape(partial(state_of, model, steps), shapes)


def state_of(model: Model, steps: Recipe, params: Params) -> State:
    """Returns the state before the first step, of these parameters; raises ConfigError if none of them is trained."""
    optimizer = steps.config.optimizer
    only = optimizer.only
    if only and not any(jax.tree.leaves(trained(only, params))):
        names = jax.tree.leaves(jax.tree.map_with_path(lambda path, _: name_of(path), params))
        raise ConfigError(
            f"optimizer.only: no parameter has a name like {' or '.join(map(repr, only))}{hint(only[0], names)}"
        )
    mean = jax.tree.map(jnp.copy, params) if optimizer.ema else {}
    carry = model.initial_carry(steps.config.data.batch)
    return State(params, steps.optimizer.init(params), carry, jnp.zeros((), jnp.int32), mean)


def stack_batches(batches: Sequence[Batch], size: int) -> Batch:
    """Stacks batches along a leading axis [K], filled up to `size` by repeating the last."""
    filled = [*batches, *[batches[-1]] * (size - len(batches))]
    return jax.tree.map(lambda *parts: np.stack(parts), *filled)


def make_train_call(
    model: Model, steps: Recipe, out_shardings: Any = None
) -> Callable[[State, Batch, Any, Any], tuple[State, Measured]]:
    """Returns the compiled function `(state, batches [K, ...], step, n) -> (state, measured [K])`.

    It does steps `step + 1` to `step + n`, n <= K. The number of steps is data, not shape: one compilation serves every
    call, and a step's result does not depend on the call that it is done in.

    If bad steps are skipped, a bad step only counts as done. If they stop the run, a bad step and all steps after it change
    nothing, in this call and in the next ones: `state.step` then stays behind `step`.
    """

    config = steps.config

    def one_step(state: State, batch: Batch) -> tuple[State, Measured]:
        carry = restart(batch.fresh, model.initial_carry(config.data.batch), state.carry)
        loss, carry, gradients = _gradients(
            model, steps, state.params, carry, batch, step_key(config.seed, state.step)
        )
        if config.optimizer.only:
            keep = trained(config.optimizer.only, gradients)
            gradients = jax.tree.map(
                lambda g, is_trained: g if is_trained else jnp.zeros_like(g), gradients, keep
            )
        updates, opt_state = steps.optimizer.update(
            gradients, state.optimizer, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        mean = state.mean
        if config.optimizer.ema:  # the first steps are forgotten quickly
            kept = jnp.minimum(config.optimizer.ema, (1.0 + state.step) / (10.0 + state.step))
            mean = optax.incremental_update(params, mean, 1 - kept)
        norm = optax.tree.norm(gradients)
        bad = ~jnp.isfinite(loss + norm + optax.tree.norm(updates))
        if config.train.loss_limit:
            bad |= loss > config.train.loss_limit
        done = State(params, opt_state, carry, state.step + 1, mean)
        left = state._replace(step=state.step + 1) if config.train.on_nan == "skip" else state
        return _choose(bad, left, done), Measured(loss, norm, bad)

    def call(state: State, batches: Batch, step: Any, n: Any) -> tuple[State, Measured]:
        def body(k: Any, loop: tuple[State, Measured]) -> tuple[State, Measured]:
            state, measured = loop
            going = state.step == step + k
            new, metrics = one_step(state, jax.tree.map(lambda a: a[k], batches))
            where = jnp.where(going, k, size)  # out of bounds: dropped
            return _choose(going, new, state), jax.tree.map(
                lambda all, one: all.at[where].set(one, mode="drop"), measured, metrics
            )

        size = len(batches.fresh)
        nothing = Measured(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))
        return jax.lax.fori_loop(0, n, body, (state, nothing))

    return jax.jit(call, donate_argnums=0, out_shardings=out_shardings)


def step_key(seed: int, step: Any) -> Any:
    """Returns the key of a step's dropout; `step` is the number of steps before it. Parameters use the seed's own key."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)


def _choose(true: Any, one: State, other: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(true, a, b), one, other)


def _gradients(
    model: Model, steps: Recipe, params: Params, carry: Carry, batch: Batch, key: Any
) -> Outcome:
    """Returns the gradients of a batch that is read whole, or in parts whose outcomes are averaged."""
    parts = steps.config.optimizer.accumulate
    if parts == 1:
        return model.gradients(params, carry, batch, key)

    def cut(x: Any, axis: int | None) -> Any:
        """[..., B, ...] -> [parts, ..., B / parts, ...]."""
        x = jnp.asarray(x)
        if axis is None:
            return jnp.broadcast_to(x, (parts, *x.shape))
        split = jnp.reshape(
            x, (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
        )
        return jnp.moveaxis(split, axis, 0)

    def body(total: Any, part: Any) -> tuple[Any, Carry]:
        batch, carry, key = part
        loss, carry, gradients = model.gradients(params, carry, batch, key)
        return jax.tree.map(jnp.add, total, (loss, gradients)), carry

    members = batch._asdict()
    batches = type(batch)(
        **{n: None if x is None else cut(x, steps.axes.get(n)) for n, x in members.items()}
    )
    carries = jax.tree.map(lambda x: cut(x, CARRY_AXIS), carry)
    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, gradients), last = jax.lax.scan(
        body, zeros, (batches, carries, jax.random.split(key, parts))
    )
    joined = jax.tree.map(
        lambda x, like: jnp.moveaxis(x, 0, CARRY_AXIS).reshape(like.shape), last, carry
    )
    return Outcome(loss / parts, joined, jax.tree.map(lambda g: g / parts, gradients))


def make_validation(
    task: Task, put: Callable[[Batch], Batch] = jax.device_put
) -> Callable[[Params], float]:
    """Returns the function `params -> mean loss` over the validation batches, weighted by their examples.

    The batches are read one after the other with carried state. Batches of another shape (the last may be smaller) are
    compiled separately, and start with the initial state. `put` brings stacked batches to the devices.
    """
    model = task.model
    member, axis = next(iter(task.axes.items()))

    def mean(params: Params, batches: Batch) -> Any:
        def body(carry, batch):
            loss, carry = model.loss(params, restart(batch.fresh, first, carry), batch, None)
            return carry, loss

        first = model.initial_carry(getattr(batches, member).shape[1 + axis])
        return jnp.mean(jax.lax.scan(body, first, batches)[1])

    runs = []
    weights = []
    for _, run in groupby(
        task.validation(), lambda batch: [np.shape(a) for a in jax.tree.leaves(batch)]
    ):
        equal = list(run)
        runs.append(put(stack_batches(equal, len(equal))))
        weights.append(len(equal) * getattr(equal[0], member).shape[axis])
    compiled = jax.jit(mean)
    return lambda params: float(
        np.average([compiled(params, run) for run in runs], weights=weights)
    )


def restart(fresh: Any, initial: Carry, carry: Carry) -> Carry:
    """Returns `initial` if the data start anew, else `carry`."""
    return jax.tree.map(lambda first, going: jnp.where(fresh, first, going), initial, carry)
