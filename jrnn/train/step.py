"""The compiled functions of training: several steps in one call, and the validation loss.

Shapes: K steps in one call.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrnn.errors import ConfigError
from jrnn.nn.checks import Shape
from jrnn.train.config import Config
from jrnn.train.models.interface import CARRY_AXIS, Carry, Model, Outcome, Params
from jrnn.train.optimizers import make_optimizer, name_of, trained
from jrnn.train.tasks import Batch, Task
from jrnn.train.tasks.task import Axes
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


Stepped = tuple[State, Measured]


class Recipe(NamedTuple):
    """What a step needs besides its model.

    Attributes:
        optimizer: from `make_optimizer`.
        config: of the run.
        axes: along which a batch is cut that is read in parts, see `Task`.
    """

    optimizer: optax.GradientTransformationExtraArgs
    config: Config
    axes: Axes

    @classmethod
    def of(cls, config: Config, axes: Axes) -> Recipe:
        return cls(make_optimizer(config.optimizer, config.train.steps), config, axes)


def initial_state(model: Model, steps: Recipe) -> State:
    """Returns the state before the first step; the parameters are a function of the seed."""
    # The parameters of a model that tells their shapes are read from files, and are no part of a compiled program.
    init = model.init if hasattr(model, "shapes") else jax.jit(model.init)
    return state_of(model, steps, init(jax.random.key(steps.config.seed)))


def abstract_state(model: Model, steps: Recipe) -> State:
    """Returns the shapes and types of a run's state."""
    key = jax.random.key(steps.config.seed)
    shapes = model.shapes() if hasattr(model, "shapes") else jax.eval_shape(model.init, key)
    return jax.eval_shape(partial(state_of, model, steps), shapes)


def state_of(model: Model, steps: Recipe, params: Params) -> State:
    """Returns the state before the first step, of these parameters; raises ConfigError for a pattern that matches none."""
    optimizer = steps.config.optimizer
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    for pattern in optimizer.only:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"optimizer.only: no parameter has a name like {pattern!r}{hint(pattern, names)}"
            )
    mean = jax.tree.map(jnp.copy, params) if optimizer.ema else {}
    carry = model.initial_carry(steps.config.data.batch)
    return State(params, steps.optimizer.init(params), carry, jnp.zeros((), jnp.int32), mean)


def describe_trained(config: Config, params: Params) -> str:
    """Returns how many numbers are trained if `optimizer.only` says which, else an empty text."""
    only = config.optimizer.only
    if not only:
        return ""
    total = 0
    count = 0
    for leaf, is_trained in zip(jax.tree.leaves(params), jax.tree.leaves(trained(only, params))):
        total += np.size(leaf)
        if is_trained:
            count += np.size(leaf)
    return f"training {count:,} of {total:,} parameters"


def stack_batches(batches: Sequence[Batch], size: int) -> Batch:
    """Stacks batches along a leading axis [K], filled up to `size` by repeating the last."""
    filled = [*batches, *[batches[-1]] * (size - len(batches))]
    return jax.tree.map(lambda *parts: np.stack(parts), *filled)


def make_train_call(
    model: Model, steps: Recipe, out_shardings: Any = None
) -> Callable[[State, Batch, Any, Any], Stepped]:
    """Returns the compiled function `(state, batches [K, ...], step, n) -> (state, measured [K])`.

    It does steps `step + 1` to `step + n`, n <= K. The number of steps is data, not shape: one compilation serves every
    call, and a step's result does not depend on the call that it is done in.

    If bad steps are skipped, a bad step only counts as done. If they stop the run, a bad step and all steps after it change
    nothing, in this call and in the next ones: `state.step` then stays behind `step`.
    """

    config = steps.config

    def one_step(state: State, batch: Batch) -> Stepped:
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

    def call(state: State, batches: Batch, step: Any, n: Any) -> Stepped:
        def body(k: Any, loop: Stepped) -> Stepped:
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
    """Returns the gradients of a batch that is read whole, or in parts: the mean over the values of all parts."""
    parts = steps.config.optimizer.accumulate
    if parts == 1:
        return model.gradients(params, carry, batch, key)
    count_of = counter(model, steps.axes)

    def body(total: Any, part: Any) -> tuple[Any, Carry]:
        batch, carry, key = part
        loss, carry, gradients = model.gradients(params, carry, batch, key)
        count = jnp.asarray(count_of(batch), jnp.float32)
        weighted = jax.tree.map(lambda x: count * x, (loss, gradients))
        return jax.tree.map(jnp.add, total, (count, weighted)), carry

    batches = cut_batch(batch, steps.axes, parts)
    carries = jax.tree.map(lambda x: _cut(x, CARRY_AXIS, parts), carry)
    zero = jnp.zeros(())
    (count, (loss, gradients)), last = jax.lax.scan(
        body,
        (zero, (zero, jax.tree.map(jnp.zeros_like, params))),
        (batches, carries, jax.random.split(key, parts)),
    )
    joined = jax.tree.map(
        lambda x, like: jnp.moveaxis(x, 0, CARRY_AXIS).reshape(like.shape), last, carry
    )
    count = jnp.where(count > 0, count, 1)
    return Outcome(loss / count, joined, jax.tree.map(lambda g: g / count, gradients))


def cut_batch(batch: Batch, axes: Axes, parts: int) -> Any:
    """Returns a batch in parts of equal numbers of examples, stacked along a leading axis."""
    members = {}
    for name, value in batch._asdict().items():
        members[name] = None if value is None else _cut(value, axes.get(name), parts)
    return type(batch)(**members)


def _cut(x: Any, axis: int | None, parts: int) -> Any:
    """[..., B, ...] -> [parts, ..., B / parts, ...]; without an axis of examples, each part has all."""
    x = jnp.asarray(x)
    if axis is None:
        return jnp.broadcast_to(x, (parts, *x.shape))
    split = jnp.reshape(x, (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :]))
    return jnp.moveaxis(split, axis, 0)


def counter(model: Model, axes: Axes) -> Callable[[Batch], Any]:
    """Returns the function that says how much the loss of a batch counts: `Model.count`, or the number of examples."""
    member, axis = next(iter(axes.items()))
    own = _own_count(model)

    def count(batch: Batch) -> Any:
        counted = None if own is None else own(batch)
        return np.shape(getattr(batch, member))[axis] if counted is None else counted

    return count


def _own_count(model: Model) -> Callable[[Batch], Any] | None:
    """Returns `Model.count`, or None if a subclass overrides the loss and the inherited count may be wrong."""
    for kind in type(model).__mro__:
        if "count" in vars(kind):
            return model.count
        if "loss" in vars(kind):
            return None
    return getattr(model, "count", None)


def check_parts(task: Task, config: Config, params: Params) -> None:
    """Raises ConfigError for a loss that leaves values out and does not count them, if batches are read in parts."""
    parts = config.optimizer.accumulate
    model = task.model
    batch = task.train.at(0)
    own = _own_count(model)
    if parts == 1 or (own is not None and own(batch) is not None):
        return

    def mean_of(batch: Batch, examples: int) -> Any:
        return model.loss(params, model.initial_carry(examples), batch, None)[0]

    size = config.data.batch
    whole = float(jax.jit(partial(mean_of, examples=size))(batch))
    cut = cut_batch(batch, task.axes, parts)
    losses = jax.jit(partial(jax.lax.map, partial(mean_of, examples=size // parts)))(cut)
    mean = float(jnp.mean(losses))
    tolerance = 1e-3 if config.train.precision == "float32" else 3e-2
    if math.isfinite(whole) and not math.isclose(whole, mean, rel_tol=tolerance, abs_tol=1e-6):
        raise ConfigError(
            f"optimizer.accumulate: the loss of the first batch is {whole:.6g}, but the mean over its {parts} parts is "
            f"{mean:.6g}: the loss leaves values out; give the model a method count(batch), which returns how many "
            "values the loss is the mean over, or set optimizer.accumulate = 1"
        )


def make_validation(
    task: Task, put: Callable[[Batch], Batch] = jax.device_put
) -> Callable[[Params], float]:
    """Returns the function `params -> mean loss` over the values of all validation batches.

    The batches are read one after the other with carried state. Batches of another shape (the last may be smaller) are
    compiled separately, and start with the initial state. `put` brings stacked batches to the devices.
    """
    model = task.model
    member, axis = next(iter(task.axes.items()))
    count_of = counter(model, task.axes)

    def mean(params: Params, batches: Batch, weights: Any) -> Any:
        def body(carry, batch):
            loss, carry = model.loss(params, restart(batch.fresh, first, carry), batch, None)
            return carry, loss

        first = model.initial_carry(getattr(batches, member).shape[1 + axis])
        losses = jax.lax.scan(body, first, batches)[1]
        # A batch without a known value may have a loss that is no number.
        return jnp.sum(jnp.where(weights > 0, losses * weights, 0))

    runs = []
    totals = []
    for _, run in groupby(task.validation(), _shapes):
        equal = list(run)
        counts = np.array([float(count_of(batch)) for batch in equal])
        total = max(float(counts.sum()), 1.0)
        weights = (counts / total).astype(np.float32)
        runs.append((put(stack_batches(equal, len(equal))), weights))
        totals.append(total)
    compiled = jax.jit(mean)

    def validate(params: Params) -> float:
        means = [compiled(params, *run) for run in runs]
        return float(np.average(means, weights=totals))

    return validate


def _shapes(batch: Batch) -> list[Shape]:
    return list(map(np.shape, jax.tree.leaves(batch)))


def restart(fresh: Any, initial: Carry, carry: Carry) -> Carry:
    """Returns `initial` if the data start anew, else `carry`."""
    return jax.tree.map(lambda first, going: jnp.where(fresh, first, going), initial, carry)
