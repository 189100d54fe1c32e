"""Optimizers by name, schedules by hand-computed values."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.errors import ConfigError
from jrnn.train.config import OptimizerConfig
from jrnn.train.optimizers import NAMES, make_optimizer, make_schedule


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_steps_downhill(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.01, schedule="constant"), 10)
    params = {"w": jnp.ones((3, 4))}
    updates, _ = optimizer.update({"w": jnp.full((3, 4), 0.1)}, optimizer.init(params), params)
    assert (updates["w"] < 0).all()


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("constant", {0: 0.5, 1: 1.0, 2: 1.0, 10: 1.0}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1}),
        ("cosine", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1}),
    ],
)
def test_schedules(schedule, at):
    f = make_schedule(OptimizerConfig(learning_rate=1.0, schedule=schedule, final_rate=0.1, warmup=2), 10)
    for step, rate in at.items():
        np.testing.assert_allclose(float(f(step)), rate, rtol=1e-6)


def test_the_gradient_is_clipped_unless_clip_is_zero():
    params = {"w": jnp.zeros(2)}
    for clip, expected in ((1.0, [-0.6, -0.8]), (0.0, [-3.0, -4.0])):
        optimizer = make_optimizer(OptimizerConfig("sgd", 1.0, "constant", clip=clip), 1)
        updates, _ = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)


def test_options_reach_optax():
    params = {"w": jnp.ones(2)}
    optimizer = make_optimizer(OptimizerConfig("adamw", 1.0, "constant", options={"weight_decay": 0.5}), 1)
    updates, _ = optimizer.update({"w": jnp.zeros(2)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.5, -0.5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="adan0"), "optax has no optimizer 'adan0' here; did you mean 'adan'"),
        (OptimizerConfig(name="xyz"), "known are adabelief, adadelta"),
        (OptimizerConfig(options={"beta1": 0.9}), r"optax.adam has no option 'beta1'"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(config, 10)
