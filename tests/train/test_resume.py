"""Runs that go on: after a kill at any operation on a file, damage, and other options; and the best parameters then.

A step adds the learning rate to each parameter, and the validation losses are given, so that a run takes no time and its
parameters say which steps it did.
"""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jrnn.errors import CheckpointError, ConfigError
from jrnn.train import load_run, loop, train
from jrnn.train.checkpoint import Checkpoints, steps_in
from jrnn.train.metrics import Patience, read_validations
from jrnn.train.step import Measured, abstract_state

LOSSES = {4: 3.0, 8: 2.5, 12: 2.0, 16: 2.4, 18: 2.5, 20: 2.0, 24: 2.2, 28: 2.1, 32: 1.0}
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


class Kill(BaseException):
    """The process is killed."""


class Places:
    """Counts the operations on the files of a folder, and raises Kill at one of them and at all that follow."""

    folder = None

    def start(self, folder, at=0):
        self.folder, self.at, self.count = str(folder), at, 0

    def __call__(self, event, args):
        if self.folder is None or event not in OPERATIONS or not isinstance(args[0], (str, Path)):
            return
        if str(args[0]).startswith(self.folder):
            self.count += 1
            if 0 < self.at <= self.count:
                raise Kill


PLACES = Places()
sys.addaudithook(PLACES)  # for good: Python cannot remove it


@pytest.fixture(autouse=True)
def counting_steps(monkeypatch):
    """A call adds the learning rate to each parameter for each of its steps; `LOSSES` are those of validations."""

    def make_train_call(model, steps, shardings):
        rate = steps.config.optimizer.learning_rate

        def call(state, batches, step, n):
            params = jax.tree.map(lambda p: np.asarray(p) + np.float32(rate * n), state.params)
            size = len(batches.fresh)
            measured = Measured(jax.numpy.ones(size), np.ones(size), np.zeros(size, bool))
            return state._replace(params=params, step=np.int32(step + n)), measured

        return call

    def initial_state(model, steps):
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_state(model, steps))

    def evaluate(self):
        self.validation_loss = self.losses[int(self.state.step)]
        self.metrics = {}

    monkeypatch.setattr(loop, "initial_state", initial_state)
    monkeypatch.setattr(loop, "make_train_call", make_train_call)
    monkeypatch.setattr(loop._Training, "_evaluate", evaluate)
    monkeypatch.setattr(loop._Training, "losses", LOSSES, raising=False)
    yield
    PLACES.folder = None


@pytest.fixture
def config(make_config):
    """A configuration; `config(key=value)` changes keys of [train], `rate` is the learning rate."""
    ends = {"steps": 32, "steps_per_call": 4, "validate_every": 4, "checkpoint_every": 6}

    def make(rate=0.5, **changes):
        return make_config(
            train=ends | {"patience": 4} | changes,
            optimizer={"learning_rate": rate, "schedule": "constant"},
        )

    return make


def value(params, config):
    """How many steps the parameters of a run have done, by the first number of a bias that starts with 0."""
    return round(float(params["output_b"][0]) / config.optimizer.learning_rate)


def best_of(run, config):
    return value(load_run(run).params, config)


def resume(config, run, said=None):
    return train(config, run, resume=True, console=said or Console(quiet=True))


def die(run, config, monkeypatch, at):
    """Trains until the validation at a step has been written, where the process dies."""
    write = loop.MetricsFile.write

    def write_and_die(self, step, **values):
        write(self, step, **values)
        if step == at and "validation_loss" in values:
            raise Kill

    with monkeypatch.context() as patched, pytest.raises(Kill):
        patched.setattr(loop.MetricsFile, "write", write_and_die)
        resume(config, run)


def damage(checkpoint):
    path = max(
        (p for p in checkpoint.rglob("*") if p.is_file() and p.name != "sha256.json"),
        key=lambda p: p.stat().st_size,
    )
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.sample("3")
@pytest.mark.parametrize("places", [3, 15])
def test_killed_anywhere_it_ends_with_the_same_metrics_and_parameters(config, tmp_path, places):
    settings, whole = config(), tmp_path / "whole"
    PLACES.start(whole)
    assert resume(settings, whole).step == 28
    count = PLACES.count
    assert best_of(whole, settings) == 12
    for place in range(places):
        run = tmp_path / f"killed_{place}"
        first = (place + 1) * count // (places + 1)
        for at in (first, first // 2):  # and once more when it goes on
            PLACES.start(run, at)
            with suppress(
                Kill
            ):  # a run may end before: orbax does not always do as many operations
                resume(settings, run)
            PLACES.folder = None
            losses = read_validations(run / "metrics.jsonl")
            assert not losses or best_of(run, settings) == min(losses, key=losses.get)
        checkpoints = steps_in(run / "checkpoints")
        if len(checkpoints) > 1:
            damage(run / "checkpoints" / str(checkpoints[-1]))
        assert resume(settings, run).step == 28 and best_of(run, settings) == 12
        assert read_validations(run / "metrics.jsonl") == read_validations(whole / "metrics.jsonl")
        assert steps_in(run / "checkpoints") == steps_in(whole / "checkpoints")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_branch_that_is_left_leaves_no_parameters(config, tmp_path, monkeypatch, damaged):
    """It goes on from step 6 with another learning rate, and with other validations."""
    run = tmp_path / "run"
    die(run, config(), monkeypatch, 16 if damaged else 8)
    if damaged:
        assert steps_in(run / "checkpoints") == [6, 12]
        damage(run / "checkpoints" / "12")
    monkeypatch.setattr(loop._Training, "losses", {k: 2.5 + k / 100 for k in LOSSES})
    assert resume(config(rate=0.25, patience=9), run).step == 32
    losses = read_validations(run / "metrics.jsonl")
    assert losses[4] == 3.0 and min(losses, key=losses.get) == 8
    assert float(load_run(run).params["output_b"][0]) == 6 * 0.5 + 2 * 0.25
    assert steps_in(run / "checkpoints") == [30, 32]


def test_the_best_before_the_checkpoint_comes_back(config, tmp_path, monkeypatch):
    """Step 8 is the best until step 12, whose branch is left: the parameters of step 8 are still there."""
    run = tmp_path / "run"
    die(run, config(checkpoint_every=10), monkeypatch, 12)
    assert best_of(run, config()) == 12
    monkeypatch.setattr(loop._Training, "losses", dict.fromkeys(LOSSES, 2.9) | {4: 3.0, 8: 2.5})
    assert resume(config(checkpoint_every=10), run).step == 24
    assert best_of(run, config()) == 8


def test_patience_that_is_set_at_a_resume_begins_with_what_is_there(config, tmp_path):
    run = tmp_path / "run"
    resume(config(patience=0, steps=20, checkpoint_every=4, keep=1), run)  # that of 12 is gone
    console = Console(record=True, width=200)
    assert resume(config(patience=2, checkpoint_every=4), run, console).step == 28
    assert best_of(run, config()) == 20  # from its checkpoint
    assert "2.0000, is 2 validations old; its parameters are kept" in console.export_text()


def test_patience_that_was_off_begins_with_the_best_that_is_there(config, tmp_path):
    run = tmp_path / "run"
    resume(config(patience=9, steps=8), run)
    resume(config(patience=0, steps=18, keep=1), run)  # those of 12 and 16 are gone
    assert best_of(run, config(patience=0)) == 18  # without patience the newest
    console = Console(record=True, width=200)
    assert resume(config(patience=5, steps=28), run, console).step == 28
    assert "stopped" not in console.export_text()
    assert best_of(run, config()) == 20


def test_validations_that_are_not_finite_end_a_run_with_patience(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop._Training, "losses", dict.fromkeys(LOSSES, float("nan")))
    console = Console(record=True, width=200)
    assert resume(config(patience=2), tmp_path / "run", console).step == 8
    assert "none of 2 validation losses was finite" in console.export_text()
    assert best_of(tmp_path / "run", config()) == 8


def test_the_best_is_found_among_validations_that_are_not_finite(config, tmp_path, monkeypatch):
    lost = dict.fromkeys((4, 12, 20), float("nan"))
    monkeypatch.setattr(loop._Training, "losses", LOSSES | lost)
    run = tmp_path / "run"
    resume(config(steps=12), run)
    assert best_of(run, config()) == 8
    resume(config(steps=20), run)
    assert best_of(run, config()) == 16
    assert resume(config(), run).step == 32


def test_damaged_best_parameters_are_replaced(config, tmp_path):
    run = tmp_path / "run"
    resume(config(steps=12), run)
    damage(run / "best" / "12")
    with pytest.warns(UserWarning, match="best/12: is damaged"):
        assert best_of(run, config()) == 12  # from its checkpoint
    console = Console(record=True, width=200)
    assert resume(config(steps=16), run, console).step == 16
    assert "best/12: is damaged" in console.export_text()
    assert best_of(run, config()) == 12
    damage(run / "best" / "12")
    shutil.rmtree(run / "checkpoints" / "12")
    with pytest.warns(UserWarning, match="best/12: is damaged"):
        assert best_of(run, config()) == 16  # the best that is left
    assert resume(config(steps=20), run).step == 20
    assert best_of(run, config()) == 20


def test_a_lost_line_is_measured_again(config, tmp_path):
    run = tmp_path / "run"
    resume(config(steps=12), run)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-9])
    resume(config(), run)
    assert read_validations(metrics)[12] == 2.0
    assert best_of(run, config()) == 12


def test_fewer_steps_than_done_change_nothing(config, tmp_path):
    run = tmp_path / "run"
    resume(config(steps=12), run)
    before = (run / "config.toml").read_text()
    with pytest.raises(ConfigError, match="has 12 steps already, and train.steps is 8"):
        resume(config(steps=8), run)
    assert (run / "config.toml").read_text() == before


def test_the_patience_of_all_processes_is_exact(config):
    """It is given to the other processes as words of 32 bits, and stays what it is."""
    task = config().kind.load(config())
    training = loop._Training(config(), loop.RunDir("run"), task, loop.Devices.of(config()), None)
    training.patience = Patience(4, 1 / 3, 2)
    training.is_validated = False
    training.share()
    assert training.patience == Patience(4, 1 / 3, 2) and training.is_validated is False


def test_a_later_checkpoint_refuses_an_earlier_one(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(9, {"w": np.ones(2)})
        with pytest.raises(
            CheckpointError, match="5: cannot be written: the folder holds .* later step, 9"
        ):
            checkpoints.save(5, {"w": np.zeros(2)})
        checkpoints.save(9, {"w": np.zeros(2)})
        checkpoints.save(12, {"w": np.zeros(2)})
        checkpoints.remove_after(9)
        assert checkpoints.steps() == [9]
        checkpoints.save(12, {"w": np.full(2, 3.0)})
        restored, _ = checkpoints.restore({"w": np.ones(2)})
        assert restored["w"].tolist() == [3.0, 3.0]
    assert sorted(os.listdir(tmp_path)) == ["12", "9"]
    (tmp_path / "12").rename(tmp_path / ".12.removed")  # a process was killed here
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [9] and (tmp_path / ".12.removed").is_dir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [9]
    assert os.listdir(tmp_path) == ["9"]
