"""Whole runs, in this process: they learn, stop, go on to the bit, and refuse what does not fit."""

import dataclasses
import io
import json
import shutil
import signal
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from jrnn.errors import CheckpointError, ConfigError, DataError, TrainError
from jrnn.train import load_run, metrics, train
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.metrics import MetricsFile, read_metrics
from jrnn.train.run_dir import RunDir, first_free


def losses(run):
    return {
        m["step"]: (m["loss"], m["gradient_norm"])
        for m in read_metrics(run / "metrics.jsonl")
        if "loss" in m
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where a finished run of the default small configuration is kept for the tests of this file."""
    return tmp_path_factory.mktemp("runs") / "whole"


@pytest.fixture
def whole(finished, make_config, quiet, text_file):
    """A finished run; made once. The text is written to another place for each test, with the same content."""
    if not finished.exists():
        train(make_config(), finished, console=quiet)
    return finished


@pytest.mark.exhaustive
def test_a_run_learns_and_says_where_it_comes_from(whole):
    recorded = losses(whole)
    assert list(recorded) == list(range(1, 25))
    assert recorded[24][0] < recorded[1][0] - 0.3
    validation = [m for m in read_metrics(whole / "metrics.jsonl") if "validation_loss" in m]
    assert [m["step"] for m in validation] == [12, 24]
    assert validation[1]["validation_loss"] < validation[0]["validation_loss"]
    timed = [
        m["step"] for m in read_metrics(whole / "metrics.jsonl") if m.get("items_per_second", 0) > 0
    ]
    assert timed == [4, 8, 12, 16, 20, 24]
    provenance = json.loads((whole / "run.json").read_text())
    assert provenance["versions"]["jax"] == jax.__version__
    assert set(provenance) >= {"started", "command", "devices", "git", "cpus"}
    assert RunDir(whole).load_config().train.steps == 24
    with Checkpoints(whole / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [16, 24]


def test_text_is_a_function_of_the_seed(whole):
    text = load_run(whole).sample(seed=1)
    assert text.startswith("the ")
    assert len(text) == 4 + 12
    assert load_run(whole).sample(seed=1) == text != load_run(whole).sample(seed=2)
    likeliest = load_run(whole).sample(temperature=0.0, length=30)
    assert likeliest == load_run(whole).sample(seed=5, temperature=0.0, length=30)
    with pytest.raises(DataError, match="does not know the character 'Z'"):
        load_run(whole).sample(prompt="Z")


@pytest.mark.exhaustive
def test_a_signal_stops_with_a_checkpoint_and_resuming_gives_the_same_bits(
    whole, make_config, quiet, tmp_path, monkeypatch
):
    """Stopped three times at odd steps, a run ends with the losses and parameters of the uninterrupted one."""
    config, out = make_config(), tmp_path / "run"
    write, stops = MetricsFile.write, iter([signal.SIGINT, signal.SIGTERM, signal.SIGINT])
    seen = []

    def write_and_stop(self, step, **values):
        write(self, step, **values)
        if step in (3, 9, 13) and step not in seen:
            seen.append(step)
            signal.raise_signal(next(stops))

    monkeypatch.setattr(MetricsFile, "write", write_and_stop)
    result = train(config, out, console=quiet)
    ends = [result.step]
    while result.interrupted:
        result = train(config, out, resume=True, console=quiet)
        ends.append(result.step)
    assert len(ends) == 4 and ends == sorted(set(ends)) and ends[-1] == 24
    assert losses(out) == losses(whole)
    assert result.validation_loss == read_metrics(whole / "metrics.jsonl")[-1]["validation_loss"]
    states = [_arrays(run) for run in (out, whole)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name])


def _arrays(run):
    with ocp.CheckpointManager(
        run.absolute() / "checkpoints", item_handlers=ocp.StandardCheckpointHandler()
    ) as manager:
        return manager.restore(24)


def test_a_finished_run_resumes_to_the_same_result(whole, make_config, quiet):
    before = losses(whole)
    result = train(make_config(), whole, resume=True, console=quiet)
    assert (result.step, result.interrupted) == (24, False)
    assert result.validation_loss == read_metrics(whole / "metrics.jsonl")[-1]["validation_loss"]
    assert losses(whole) == before


@pytest.mark.exhaustive
def test_the_net_gradient_trains_to_the_same_loss(whole, make_config, quiet, tmp_path):
    train(make_config(gradient={"source": "net", "check": True}), tmp_path / "net", console=quiet)
    ours, theirs = losses(tmp_path / "net"), losses(whole)
    np.testing.assert_allclose(
        [ours[k][0] for k in ours], [theirs[k][0] for k in theirs], rtol=1e-4
    )


def test_a_run_directory_is_not_overwritten(whole, make_config, quiet):
    with pytest.raises(ConfigError, match="holds a run already; continue it with --resume"):
        train(make_config(), whole, console=quiet)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": {"hidden": 9}}, CheckpointError, "model.hidden is 8 there, and 9 here"),
        ({"data": {"batch": 3}}, CheckpointError, "data.batch is 4 there, and 3 here"),
        (
            {"optimizer": {"name": "sgd"}},
            CheckpointError,
            r"of another model: optimizer\.\S+ is \S+ there, and absent",
        ),
    ],
)
def test_a_run_of_something_else_is_not_continued(
    whole, make_config, quiet, change, error, message
):
    with pytest.raises(error, match=message):
        train(make_config(**change), whole, resume=True, console=quiet)


def test_a_changed_text_is_not_continued(whole, make_config, quiet, text_file):
    text_file.write_text(text_file.read_text() + "more\n")
    with pytest.raises(DataError, match="the data have changed since this run began"):
        train(make_config(), whole, resume=True, console=quiet)


@pytest.mark.exhaustive
def test_nothing_to_resume(make_config, quiet, tmp_path):
    """A run that was killed before its first checkpoint starts from the beginning, and says so; it has nothing to sample."""
    config, out = make_config(train={"steps": 4}), tmp_path / "run"
    with pytest.raises(CheckpointError, match="is not a run directory: there is no such folder"):
        load_run(out).sample()
    for write_first in (False, True):
        if write_first:
            shutil.rmtree(out)
            out.mkdir()
            with pytest.raises(
                CheckpointError, match=r"is not a run directory: it has no config\.toml"
            ):
                load_run(out).sample()
            RunDir(out).write(config, config.kind.load(config))
            with pytest.raises(
                CheckpointError,
                match=rf"has no checkpoint, .* at step 4; .* jrnn train {out} --resume",
            ):
                load_run(out).sample()
        said = Console(file=io.StringIO(), width=200)
        assert train(config, out, resume=True, console=said).step == 4
        assert "no checkpoint to resume from: starting from the beginning" in said.file.getvalue()
    said = Console(file=io.StringIO(), width=200)
    train(config, out, resume=True, console=said)
    assert "resuming from step 4" in said.file.getvalue()


@pytest.mark.exhaustive
def test_other_steps_need_a_word_on_the_schedule(make_config, quiet, tmp_path):
    out = tmp_path / "run"
    ended = train(make_config(train={"steps": 4}), out, console=quiet).validation_loss
    both = r"'cosine' over 4 steps, and train.steps is 8 now; .*schedule_steps=4 to keep.*schedule_steps=8 to stretch"
    with pytest.raises(ConfigError, match=both):
        train(make_config(train={"steps": 8}), out, resume=True, console=quiet)
    kept = make_config(train={"steps": 8}, optimizer={"schedule_steps": 4})
    result = train(kept, out, resume=True, console=quiet)
    assert (result.step, result.validation_loss) == (
        8,
        ended,
    )  # the schedule has ended: the learning rate is 0
    with pytest.raises(ConfigError, match="'cosine' over 4 steps, and train.steps is 8 now"):
        train(make_config(train={"steps": 8}), out, resume=True, console=quiet)
    fewer = make_config(train={"steps": 6}, optimizer={"schedule_steps": 4})
    with pytest.raises(
        ConfigError, match="has 8 steps already, and train.steps is 6; give more steps"
    ):
        train(fewer, out, resume=True, console=quiet)


def test_a_step_that_is_not_finite_stops_the_run(make_config, quiet, tmp_path):
    """The state before it is kept, and the run resumes from there."""
    wild = make_config(
        optimizer={"name": "sgd", "learning_rate": 1e38, "clip": 0.0, "schedule": "constant"}
    )
    named = r"(blob '\w+', which op #\d+ \w+ -> .* writes, holds|all numbers of the model are finite; the greatest)"
    with pytest.raises(
        TrainError,
        match=rf"step \d+: the loss is .*, the gradient's norm .*; {named},? .*; the state before it",
    ) as e:
        train(wild, tmp_path / "run", console=quiet)
    step = int(str(e.value).split()[1].rstrip(":"))
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == step - 1
    tame = make_config(
        optimizer={"name": "sgd", "learning_rate": 0.0001, "clip": 0.0, "schedule": "constant"}
    )
    train(
        dataclasses.replace(tame, train=dataclasses.replace(tame.train, steps=step)),
        tmp_path / "run",
        resume=True,
    )
    assert list(losses(tmp_path / "run")) == list(range(1, step + 1))


@pytest.mark.exhaustive
def test_a_run_may_skip_what_is_not_finite(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_SKIPS", 9)
    config = make_config(train={"on_nan": "skip", "loss_limit": 1e-3, "steps": 12})
    console = Console(record=True, width=200)
    with pytest.raises(
        TrainError, match=r"step 9: the loss is \d.*, and so were the 8 steps before it"
    ):
        train(config, tmp_path / "run", console=console)
    assert "step 3: the loss is" in console.export_text()
    assert losses(tmp_path / "run") == {}
    monkeypatch.setattr(metrics, "MOST_SKIPS", 13)
    config = make_config(
        train={"on_nan": "skip", "loss_limit": 2.95, "steps": 12}
    )  # the third step is not above it
    result = train(config, tmp_path / "other", console=console)
    assert 0 < result.skipped < 12 and f"12 steps ({result.skipped} skipped), validation" in str(
        result
    )


def test_a_stop_by_the_limit_of_the_loss_names_it(make_config, tmp_path, quiet):
    config = make_config(train={"loss_limit": 1e-3, "steps": 2})
    named = r"step 1: the loss is \d.*, above train\.loss_limit = 0\.001, the gradient's norm .* a greater train\.loss_limit"
    with pytest.raises(TrainError, match=named):
        train(config, tmp_path / "run", console=quiet)
    config = make_config(train={"loss_limit": 1e-3, "steps": 2, "on_nan": "skip"})
    named = r"all 2 steps were skipped, .* above train\.loss_limit = 0\.001, .* all numbers of the model are finite"
    with pytest.raises(TrainError, match=named):
        train(config, tmp_path / "skip", console=quiet)


def test_the_second_in_a_run_directory_is_refused(tmp_path):
    with (
        RunDir(tmp_path / "run"),
        pytest.raises(ConfigError, match=r"another process \(pid \d+\) is training in this"),
    ):
        RunDir(tmp_path / "run").__enter__()
    with RunDir(tmp_path / "run"):
        pass  # free again


def test_a_run_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold a run"):
        RunDir(tmp_path / "file").__enter__()


def test_a_damaged_fingerprint(tmp_path):
    with pytest.raises(CheckpointError, match=r"data\.json: no such file"):
        RunDir(tmp_path).load_fingerprint()
    (tmp_path / "data.json").write_text('{"characters": "ab"')
    with pytest.raises(CheckpointError, match=r"data\.json: is not JSON"):
        RunDir(tmp_path).load_fingerprint()


def test_metrics_after_a_kill_lose_what_will_be_measured_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert [m["step"] for m in read_metrics(path)] == [1, 2]
    with MetricsFile(path, resume_at=1) as metrics:
        metrics.write(2, loss=2.5)
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]
    with MetricsFile(path) as metrics:
        metrics.write(1, loss=0.5)
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}]


@pytest.mark.exhaustive
def test_training_works_outside_the_main_thread(make_config, quiet, tmp_path):
    results = []
    config = make_config(train={"steps": 2})
    thread = threading.Thread(
        target=lambda: results.append(train(config, tmp_path / "run", console=quiet))
    )
    thread.start()
    thread.join()
    assert results[0].step == 2


def test_free_names(tmp_path):
    assert first_free(tmp_path, "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert first_free(tmp_path, "a") == tmp_path / "a-3"
