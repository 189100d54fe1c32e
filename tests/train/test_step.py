"""The compiled call: how many steps one call does is of no consequence, to the bit."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrnn.train.config import Config, OptimizerConfig, TrainConfig
from jrnn.train.models import Signature
from jrnn.train.models.cells import TokenCellsConfig, cells_model
from jrnn.train.optimizers import make_optimizer
from jrnn.train.step import (
    Recipe,
    initial_state,
    make_train_call,
    make_validation,
    restart,
    stack_batches,
)
from jrnn.train.text_streams import Streams, TextChunk, TextConfig

STREAMS, PER_CALL = 3, 4
config = functools.partial(Config, data=TextConfig(batch=STREAMS))


@pytest.fixture(scope="module")
def data():
    return Streams.of(np.random.default_rng(0).integers(0, 6, 120).astype(np.int32), STREAMS, 5)


@pytest.fixture(scope="module")
def model():
    return cells_model(
        TokenCellsConfig(embedding=3, hidden=4), Signature(True, 6, 6, True, "cross_entropy", True)
    )


@pytest.fixture(scope="module")
def steps():
    return Recipe(make_optimizer(OptimizerConfig(learning_rate=0.01), 12), config(seed=3))


@pytest.fixture(scope="module")
def call(model, steps):
    return make_train_call(model, steps)


def run(model, steps, call, data, sizes):
    state, losses, step = initial_state(model, steps), [], 0
    for n in sizes:
        state, measured = call(
            state, stack_batches([data.at(step + k) for k in range(n)], PER_CALL), step, n
        )
        losses.extend(np.asarray(measured.loss)[:n].tolist())
        step += n
    return jax.device_get(state), losses


@pytest.mark.exhaustive
def test_calls_of_any_size_give_the_same_bits(model, steps, call, data):
    whole, losses = run(model, steps, call, data, [4, 4, 4])
    pieces, losses_again = run(model, steps, call, data, [1, 4, 2, 3, 2])
    assert losses == losses_again
    assert len(set(losses)) == 12
    assert int(whole.step) == 12
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    assert call._cache_size() == 1  # one compilation for every number of steps


@pytest.mark.exhaustive
def test_measured_norm_is_that_of_the_gradient(model, steps, call, data):
    state = initial_state(model, steps)
    outcome = model.gradients(state.params, state.carry, data.at(0), None)
    expected = np.sqrt(sum(float((g**2).sum()) for g in outcome.gradients.values()))
    _, measured = call(state, stack_batches([data.at(0)], PER_CALL), 0, 1)
    np.testing.assert_allclose(measured.gradient_norm[0], expected, rtol=1e-5)
    np.testing.assert_allclose(measured.loss[0], outcome.loss, rtol=1e-6)


def test_a_fresh_chunk_starts_from_the_initial_state():
    first, going = {"h": np.zeros((1, 2, 3))}, {"h": np.ones((1, 2, 3))}
    assert restart(np.asarray(True), first, going)["h"].sum() == 0
    assert restart(np.asarray(False), first, going)["h"].sum() == 6


class Task:
    axes: ClassVar = {"tokens": 1, "targets": 1}

    def __init__(self, model, batches):
        self.model, self.batches = model, batches

    def validation(self):
        return self.batches


@pytest.mark.exhaustive
def test_validation_reads_the_text_as_one(model, steps, data):
    params = initial_state(model, steps).params
    chunks = list(data.one_pass())
    carry, losses = model.initial_carry(STREAMS), []
    for chunk in chunks:
        loss, carry = model.loss(params, carry, chunk, None)
        losses.append(float(loss))
    np.testing.assert_allclose(
        make_validation(Task(model, chunks))(params), np.mean(losses), rtol=1e-6
    )


@pytest.mark.exhaustive
def test_a_smaller_last_batch_has_less_weight(model, steps, data):
    """Independent examples: the mean over batches of 3, 3 and 2 is that over all 8."""
    params = initial_state(model, steps).params
    batches = [TextChunk(*data.at(step)[:2], np.asarray(True)) for step in range(3)]
    batches[-1] = TextChunk(
        batches[-1].tokens[:, :2], batches[-1].targets[:, :2], batches[-1].fresh
    )
    whole = TextChunk(
        *(np.concatenate(parts, axis=1) for parts in zip(*(b[:2] for b in batches))),
        np.asarray(True),
    )
    expected, _ = model.loss(params, model.initial_carry(8), whole, None)
    np.testing.assert_allclose(make_validation(Task(model, batches))(params), expected, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(model, data, on_nan):
    """A learning rate that is infinite at the third step: the parameters of the second stay."""
    optimizer = optax.sgd(lambda step: jnp.where(step == 2, jnp.inf, 0.1))
    steps = Recipe(
        optax.with_extra_args_support(optimizer), config(seed=3, train=TrainConfig(on_nan=on_nan))
    )
    call = make_train_call(model, steps)
    two, _ = call(
        initial_state(model, steps), stack_batches([data.at(0), data.at(1)], PER_CALL), 0, 2
    )
    two = jax.device_get(two)
    state = initial_state(model, steps)
    state, measured = call(state, stack_batches([data.at(k) for k in range(4)], PER_CALL), 0, 4)
    if on_nan == "stop":
        assert measured.bad.tolist() == [False, False, True, False]
        state, measured = call(
            state, stack_batches([data.at(4)], PER_CALL), 4, 1
        )  # already under way: does nothing
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), two)
    else:
        assert measured.bad.tolist() == [
            False,
            False,
            True,
            True,
        ]  # as sgd counts its own steps, it stays at the third
        assert int(state.step) == 4
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), two.params)


@pytest.mark.exhaustive
def test_a_loss_above_its_limit_is_bad(model, steps, data):
    call = make_train_call(model, steps._replace(config=config(train=TrainConfig(loss_limit=0.5))))
    state, measured = call(
        initial_state(model, steps), stack_batches([data.at(0)] * 2, PER_CALL), 0, 2
    )
    assert measured.bad.tolist() == [True, False, False, False]
    assert measured.loss[0] > 0.5 and int(state.step) == 0
