"""The options of a run other than the optimizer: each is compared with what it is defined to do."""

import jax
import numpy as np
import optax
import pytest

from jrnn.errors import ConfigError, GradientError
from jrnn.train import load_run, train
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.config import Config, OptimizerConfig
from jrnn.train.disagreements import GradientCheck
from jrnn.train.metrics import Patience, read_metrics
from jrnn.train.models import FunctionModel, Signature
from jrnn.train.models.nn import NnModel, TokenNnConfig
from jrnn.train.step import (
    Recipe,
    abstract_state,
    initial_state,
    make_train_call,
    make_validation,
    stack_batches,
)
from jrnn.train.text_streams import TextChunk, TextConfig

B, T, V = 4, 3, 5
AXES = {"tokens": 1, "targets": 1}
SIGNATURE = Signature(True, V, V, every_step=True, loss="cross_entropy", carried=True)


@pytest.fixture(scope="module")
def model():
    config = TokenNnConfig(cell="gru", embedding=3, hidden=4)
    return NnModel(config, SIGNATURE)


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, V, (T + 1, B)).astype(np.int32) for _ in range(3)]
    return stack_batches(
        [TextChunk(t[:-1], t[1:], np.asarray(k == 0)) for k, t in enumerate(texts)], 3
    )


def steps_of(**options):
    config = Config(data=TextConfig(batch=B), optimizer=OptimizerConfig(**options))
    return Recipe(optax.with_extra_args_support(optax.adam(0.01)), config, AXES)


def three_steps(model, batches, **options):
    steps = steps_of(**options)
    return make_train_call(model, steps)(initial_state(model, steps), batches, 0, 3)


@pytest.fixture(scope="module")
def plain(model, batches):
    return jax.device_get(three_steps(model, batches))


@pytest.mark.exhaustive
def test_batches_in_parts_are_whole_batches(model, batches, plain):
    """The same parameters, losses and carried states, in another order of additions."""
    state, measured = three_steps(model, batches, accumulate=2)
    for a, b in zip(jax.tree.leaves((state, measured)), jax.tree.leaves(plain)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_parts_must_be_equal(make_config):
    with pytest.raises(
        ConfigError, match=r"data\.batch must be a multiple of optimizer\.accumulate = 3, is 4"
    ):
        make_config(optimizer={"accumulate": 3})


@pytest.mark.exhaustive
def test_the_running_mean_is_the_recurrence(model, batches, plain):
    """mean <- d mean + (1 - d) params with d = min(0.2, (1 + t) / (10 + t)), from the first parameters."""
    steps = steps_of(ema=0.2)
    call, state = make_train_call(model, steps), initial_state(model, steps)
    mean = jax.device_get(state.params)
    for t, decay in enumerate((1 / 10, 2 / 11, 0.2)):
        one = jax.tree.map(lambda x, t=t: np.stack([x[t]] * 3), batches)
        state, _ = call(state, one, t, 1)
        mean = {
            name: decay * mean[name] + (1 - decay) * np.asarray(x)
            for name, x in state.params.items()
        }
    for name, x in mean.items():
        np.testing.assert_allclose(state.evaluation_params[name], x, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(
            state.params[name], plain[0].params[name], rtol=1e-6
        )  # training is as without it
        assert (state.params[name] != state.evaluation_params[name]).any()


@pytest.mark.exhaustive
def test_the_running_mean_is_what_is_validated_and_used_later(make_config, quiet, tmp_path):
    config = make_config(train={"steps": 4}, optimizer={"ema": 0.9, "learning_rate": 0.3})
    result = train(config, tmp_path / "run", console=quiet)
    trained, task = load_run(tmp_path / "run"), config.kind.load(config)
    np.testing.assert_allclose(
        make_validation(task)(trained.params), result.validation_loss, rtol=1e-6
    )
    last = restored(config, task, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, trained.params, last.mean)
    assert abs(make_validation(task)(last.params) - result.validation_loss) > 1e-3


def restored(config, task, run):
    with Checkpoints(run / "checkpoints") as checkpoints:
        return checkpoints.restore(abstract_state(task.model, Recipe.of(config, {})))[0]


def test_patience_counts_what_is_not_better():
    patience = Patience.after(3, {10: 2.0, 20: 1.0, 30: float("nan"), 40: 1.0}, 20)
    assert (patience.best, patience.since, patience.is_over) == (1.0, 2, False)
    assert not patience.see(1.5) and patience.is_over
    assert not Patience.after(0, {10: 1.0, 20: 2.0, 30: 3.0}, 10).is_over
    # The parameters of step 30 were not kept: patience starts anew from those of step 10.
    assert Patience.after(2, {10: 2.0, 20: 3.0, 30: 1.0, 40: 3.0}, 10) == Patience(2, 2.0, 0)


@pytest.mark.exhaustive
def test_a_run_without_patience_left_stops_with_its_best_parameters(make_config, quiet, tmp_path):
    """Small steps help, then ten times the rate does not: it stops after two such validations, and so when resumed."""
    schedule = {
        "schedule": "piecewise_constant_schedule",
        "learning_rate": 0.01,
        "name": "sgd",
        "clip": 0.0,
    }
    schedule["schedule_options"] = {"boundaries_and_scales": {"4": 5000.0}}
    ends = {"steps": 24, "validate_every": 2, "checkpoint_every": 6, "patience": 2}
    config, out = make_config(optimizer=schedule, train=ends), tmp_path / "run"
    result = train(config, out, console=quiet)
    losses = {
        m["step"]: m["validation_loss"]
        for m in read_metrics(out / "metrics.jsonl")
        if "validation_loss" in m
    }
    best = min(losses, key=losses.get)
    assert (result.step, result.interrupted) == (best + 4, False) and result.step < 24
    trained, task = load_run(out), config.kind.load(config)
    np.testing.assert_allclose(make_validation(task)(trained.params), losses[best], rtol=1e-6)
    again = train(config, out, resume=True, console=quiet)
    assert (again.step, again.interrupted) == (result.step, False)


def test_gradients_are_checked_along_the_way(make_config, quiet, tmp_path, monkeypatch):
    """After the steps that the config names, with the parameters of then; a disagreement ends the run there."""
    seen = []

    def compare(self, params, batch):
        seen.append(float(params["output_b"][0]))
        return {"output_b": (1.0, 0.0 if len(seen) < 3 else 1e-6)}

    monkeypatch.setattr(GradientCheck, "compare", compare)
    config = make_config(gradient={"check_every": 5}, train={"steps": 24})
    with pytest.raises(
        GradientError, match=r"step 15: the gradients by JAX and by the net disagree"
    ):
        train(config, tmp_path / "run", console=quiet)
    assert len(set(seen)) == 3


@pytest.mark.exhaustive
def test_a_model_that_is_no_net_is_checked_by_differences(model, batches, monkeypatch):
    params, batch = model.init(jax.random.key(0)), jax.tree.map(lambda x: x[0], batches)
    check = GradientCheck(model, B)
    for name, (size, far) in check.compare(params, batch).items():
        assert far < 1e-8 * max(size, 1e-3), name
    own = FunctionModel(
        model.init,
        lambda p, batch, key: model.predict(p, model.initial_carry(B), batch)[0],
        SIGNATURE,
    )
    assert GradientCheck(own, B).compare(params, batch).keys() == params.keys()
    gradients = NnModel.gradients

    def wrong(self, *args):
        step = gradients(self, *args)
        return step._replace(
            gradients={**step.gradients, "output_b": 1.001 * step.gradients["output_b"]}
        )

    monkeypatch.setattr(NnModel, "gradients", wrong)
    with pytest.raises(
        GradientError, match=r"that of the differences disagree\n(.*\n)*  output_b .*<-"
    ):
        GradientCheck(model, B)(params, batch)
