"""A loss is a mean over values, however they are divided into batches: where targets are missing, masked, or end early."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrnn.errors import ConfigError
from jrnn.train import Examples, FunctionModel, Model, Signature
from jrnn.train.config import Config, OptimizerConfig
from jrnn.train.seq2seq.encoder_decoder import Seq2SeqConfig, seq2seq
from jrnn.train.seq2seq.seq2seq_task import VOCABULARY, Pairs
from jrnn.train.step import (
    Recipe,
    check_parts,
    initial_state,
    make_train_call,
    make_validation,
    stack_batches,
)
from jrnn.train.tasks.task import AXES, in_batches
from jrnn.train.text_streams import TextConfig
from jrnn.train.toml_codec import decode

N = 12
rng = np.random.default_rng(0)
INPUTS = rng.normal(size=(2, N, 3)).astype(np.float32)
TARGETS = np.where(np.arange(N)[:, None] < [N, 9, 2], rng.normal(size=(N, 3)), np.nan)
EXAMPLES = Examples(INPUTS, TARGETS.astype(np.float32), mask=rng.random((2, N)) < 0.6)
SIGNATURE = Signature(False, 3, 3, loss="squared_error")


def start(key):
    return {"w": jnp.eye(3), "b": jnp.ones(3)}


def apply(params, batch, key):
    return batch.inputs[0] @ params["w"] + params["b"][None]


class Masked(Model):
    """A user's model, whose loss is the mean over the steps that its mask names."""

    def init(self, key):
        return start(key)

    def loss(self, params, carry, batch, key):
        errors = ((batch.inputs @ params["w"] + params["b"][None, None]) ** 2).mean(-1)
        return jnp.sum(errors * batch.mask) / jnp.sum(batch.mask), carry

    def predict(self, params, carry, batch):
        return batch.inputs, carry


class Counted(Masked):
    def count(self, batch):
        return jnp.sum(jnp.asarray(batch.mask))


class Alone:
    """Has the methods of `Model` that a version without `count` asked for."""

    def __init__(self, model):
        for name in ("init", "initial_carry", "loss", "gradients", "predict"):
            setattr(self, name, getattr(model, name))


class OwnLoss(FunctionModel):
    """Inherits a method `count`, which knows nothing of this loss."""

    def loss(self, params, carry, batch, key):
        return Masked().loss(params, carry, batch, key)


MODELS = {"known": FunctionModel(start, apply, SIGNATURE), "masked": Counted()}


@dataclasses.dataclass
class Task:
    """The examples in batches of one size."""

    model: object
    size: int = N
    axes: ClassVar = AXES

    @property
    def train(self):
        return self

    def at(self, step):
        return in_batches(EXAMPLES, self.size)[step]

    def validation(self):
        return in_batches(EXAMPLES, self.size)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_validation_loss_is_the_mean_over_all_values(model):
    params = model.init(None)
    right = float(model.loss(params, {}, EXAMPLES, None)[0])
    means = [float(model.loss(params, {}, b, None)[0]) for b in in_batches(EXAMPLES, 4)]
    assert abs(np.mean(means) - right) > 0.01  # the mean of the batches' means is another one
    for size in (1, 5):
        np.testing.assert_allclose(make_validation(Task(model, size))(params), right, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_batch_in_parts_has_the_gradient_of_the_whole(model):
    def step(accumulate):
        config = Config(
            data=TextConfig(batch=N), optimizer=OptimizerConfig(accumulate=accumulate, clip=0.0)
        )
        steps = Recipe(optax.with_extra_args_support(optax.sgd(1.0)), config, AXES)
        state = initial_state(model, steps)
        state, measured = make_train_call(model, steps)(state, stack_batches([EXAMPLES], 1), 0, 1)
        return jax.device_get((state.params, measured))

    for one, other in zip(jax.tree.leaves(step(1)), jax.tree.leaves(step(4)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


LEAVE_OUT = {
    "Model": Masked(),
    "methods": Alone(Masked()),
    "inherited": OwnLoss(start, apply, SIGNATURE),
}


@pytest.mark.parametrize("model", LEAVE_OUT.values(), ids=LEAVE_OUT)
def test_a_loss_that_does_not_count_what_it_leaves_out_is_an_error(model):
    config = Config(data=TextConfig(batch=N), optimizer=OptimizerConfig(accumulate=4))
    message = r"loss of the first batch is .*, but the mean over its 4 parts is .* count\(batch\)"
    with pytest.raises(ConfigError, match=message):
        check_parts(Task(model), config, start(None))
    check_parts(Task(model), Config(data=TextConfig(batch=N)), start(None))
    check_parts(Task(Counted()), config, start(None))


@pytest.mark.exhaustive
def test_the_loss_of_sequences_is_the_mean_over_their_steps():
    pairs = Pairs(batch=6, longest=8, seed=0, reversals=1.0, held_out=True).draw(0, 6)
    model = seq2seq(Seq2SeqConfig(embedding=2, encoder=2, decoder=3), len(VOCABULARY))
    of = Pairs(batch=6, longest=8, seed=0).of
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0)))

    class Pieces:
        axes: ClassVar = {"inputs": 1, "input_lengths": 0, "targets": 1, "target_lengths": 0}

        def __init__(self, size):
            self.model, self.size = model, size

        def validation(self):
            return [of(pairs[k : k + self.size]) for k in range(0, len(pairs), self.size)]

    losses = [make_validation(Pieces(size))(params) for size in (6, 4, 1)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_missing_targets_need_a_model_that_leaves_them_out(tmp_path):
    rows = "".join(f"{k},{'' if k % 5 else k}\n" for k in range(60))
    (tmp_path / "x.csv").write_text(f"a,b\n{rows}")
    data = {"path": str(tmp_path / "x.csv"), "inputs": ["a"], "targets": ["b"]}
    data |= {"window": 4, "horizon": 5, "batch": 6}
    tables = {"task": "forecast", "data": data, "model": {"kind": "nn", "hidden": 2}}
    config = decode(Config, tables | {"optimizer": {"accumulate": 2}}, "x.toml")
    assert np.isnan(config.kind.load(config).train.all.targets).any()
    config = decode(Config, tables | {"model": {"kind": "cells", "hidden": 2}}, "x.toml")
    with pytest.raises(ConfigError, match=r"empty cells among the targets, .* model.kind = \"nn\""):
        config.kind.load(config)
