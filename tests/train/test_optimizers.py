"""Optimizers by name, schedules by hand-computed values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrnn.errors import ConfigError
from jrnn.train.config import OptimizerConfig
from jrnn.train.optimizers import (
    NAMES,
    NAMES_OF_SCHEDULES,
    OPTIMIZERS,
    SCHEDULES,
    follows_the_run,
    make_optimizer,
    make_schedule,
)


@pytest.mark.sample("adamax", "nadamw", "signum")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_downhill(name):
    """On |w|^2, by its third step: prodigy begins with tiny ones."""
    optimizer = make_optimizer(
        OptimizerConfig(name=name, learning_rate=0.05, schedule="constant"), 10
    )
    params = {"w": jnp.linspace(1.0, 2.0, 12).reshape(3, 4)}
    state = optimizer.init(params)
    for _ in range(3):
        gradients = jax.tree.map(lambda w: 2 * w, params)
        updates, state = optimizer.update(gradients, state, params, value=jnp.sum(params["w"] ** 2))
        params = optax.apply_updates(params, updates)
    assert float(jnp.sum(gradients["w"] * updates["w"])) < 0


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("constant", {0: 0.5, 1: 1.0, 2: 1.0, 10: 1.0}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1}),
        ("cosine", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1}),
    ],
)
def test_schedules(schedule, at):
    f = make_schedule(
        OptimizerConfig(learning_rate=1.0, schedule=schedule, final_rate=0.1, warmup=2), 10
    )
    for step, rate in at.items():
        np.testing.assert_allclose(float(f(step)), rate, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "options", "at"),
    [
        ("exponential_decay", {"decay_rate": 0.25}, {0: 1.0, 5: 0.5, 10: 0.25}),
        ("cosine_decay_schedule", {"alpha": 0.5}, {0: 1.0, 5: 0.75, 10: 0.5}),
        (
            "warmup_cosine_decay_schedule",
            {"warmup_steps": 2},
            {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0},
        ),
        (
            "piecewise_constant_schedule",
            {"boundaries_and_scales": {"3": 0.1, "6": 0.5}},
            {2: 1.0, 5: 0.1, 8: 0.05},
        ),
        ("polynomial_schedule", {"power": 2, "end_value": 0.0}, {0: 1.0, 5: 0.25, 10: 0.0}),
    ],
)
def test_schedules_of_optax_by_name(schedule, options, at):
    """The learning rate is the greatest rate, and the steps of the run are the schedule's, unless they are given."""
    f = make_schedule(
        OptimizerConfig(learning_rate=1.0, schedule=schedule, schedule_options=options), 10
    )
    for step, rate in at.items():
        np.testing.assert_allclose(float(f(step)), rate, rtol=1e-6, atol=1e-7)


def test_a_schedule_may_have_a_length_of_its_own():
    f = make_schedule(OptimizerConfig(learning_rate=1.0, schedule="linear", schedule_steps=5), 10)
    assert [float(f(step)) for step in (0, 5, 10)] == [1.0, 0.0, 0.0]
    follows = {
        name: follows_the_run(OptimizerConfig(schedule=name, schedule_options=options))
        for name, options in {
            "constant": {},
            "cosine": {},
            "exponential_decay": {},
            "linear_schedule": {"transition_steps": 3},
            "piecewise_constant_schedule": {},
        }.items()
    }
    assert [name for name, does in follows.items() if does] == ["cosine", "exponential_decay"]
    assert not follows_the_run(OptimizerConfig(schedule_steps=5))


def test_every_name_is_one_of_optax():
    """Of the optax that is installed, which has all of them."""
    assert list(OPTIMIZERS) == NAMES.split() and list(SCHEDULES) == NAMES_OF_SCHEDULES.split()


@pytest.mark.exhaustive("adamw")
@pytest.mark.parametrize("name", ["adamw", "contrib.muon"])
def test_weight_decay_of_matrices_alone(name):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    config = OptimizerConfig(name, 1.0, "constant", options={"weight_decay": 0.5}, decay="matrices")
    optimizer = make_optimizer(config, 1)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    assert float(updates["w"][0, 0]) == -0.5
    assert float(updates["b"][0]) == 0


def test_the_gradient_is_clipped_unless_clip_is_zero():
    params = {"w": jnp.zeros(2)}
    for clip, expected in ((1.0, [-0.6, -0.8]), (0.0, [-3.0, -4.0])):
        optimizer = make_optimizer(OptimizerConfig("sgd", 1.0, "constant", clip=clip), 1)
        updates, _ = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)


def test_options_reach_optax():
    params = {"w": jnp.ones(2)}
    optimizer = make_optimizer(
        OptimizerConfig("adamw", 1.0, "constant", options={"weight_decay": 0.5}), 1
    )
    updates, _ = optimizer.update({"w": jnp.zeros(2)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.5, -0.5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="adan0"), "optax has no optimizer 'adan0' here; did you mean 'adan'"),
        (OptimizerConfig(name="xyz"), "known are adabelief, adadelta"),
        (
            OptimizerConfig(schedule="cosin"),
            "optimizer.schedule: optax has no schedule 'cosin' here; did you mean 'cosine'",
        ),
        (
            OptimizerConfig(schedule="exponential_decay"),
            "schedule_options: optax.exponential_decay: .*'decay_rate'",
        ),
        (
            OptimizerConfig(schedule="exponential_decay", schedule_options={"decay": 1}),
            "optax.exponential_decay has no option 'decay'; did you mean 'decay_rate'",
        ),
        (
            OptimizerConfig(schedule_options={"alpha": 1}),
            "the schedule 'cosine' takes none; give optax's own name",
        ),
        (
            OptimizerConfig(decay="matrices"),
            "needs an optimizer with weight decay: adadelta, .*, adamw",
        ),
        (OptimizerConfig(options={"beta1": 0.9}), r"optax.adam has no option 'beta1'"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(config, 10)
