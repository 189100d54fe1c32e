"""A run's directory: it is written completely or an error says why not, and it is enough to repeat the run."""

import json
import os
import shutil

import pytest

from jrnn.cli import main
from jrnn.errors import CheckpointError, ConfigError, GradientError, TrainError
from jrnn.train import train
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.config import Config
from jrnn.train.devices import ProcessLost
from jrnn.train.metrics import MetricsFile, read_metrics
from jrnn.train.run_dir import RunDir
from jrnn.train.toml_codec import decode


def write_toml(path, tables):
    rows = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
        for name, table in tables.items()
    ]
    path.write_text("".join(rows))


@pytest.mark.exhaustive
def test_a_run_is_done_again_from_its_directory_alone(
    small, text_file, tmp_path, monkeypatch, capsys
):
    """From another working directory too, though its text was named by a relative path: the same losses, to the bit."""
    monkeypatch.chdir(text_file.parent)
    write_toml(
        tmp_path / "small.toml", {**small, "data": {**small["data"], "path": text_file.name}}
    )
    assert (
        main(["train", "small.toml", "--out", "first", "--no-sample", "--set", "train.steps=12"])
        == 0
    )
    (tmp_path / "small.toml").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "../first", "--no-sample"]) == 0
    first, again = (
        read_metrics(run / "metrics.jsonl")
        for run in (tmp_path / "first", tmp_path / "elsewhere/runs/first")
    )
    for one, other in zip(first, again, strict=True):
        assert {k: v for k, v in one.items() if k != "items_per_second"} == {
            k: v for k, v in other.items() if k != "items_per_second"
        }
    facts = json.loads((tmp_path / "first" / "run.json").read_text())
    assert facts["versions"]["jax"] and (facts["seed"], facts["processes"]) == (0, 1)
    assert "commit" in (facts["git"] or {"commit": None})
    assert RunDir(tmp_path / "first").load_config().seed == 0
    capsys.readouterr()


@pytest.mark.exhaustive
def test_a_full_disk_ends_the_run_with_what_was_saved(
    make_config, tmp_path, quiet, monkeypatch, a_full_disk
):
    """The disk fills up at the 17th step: the checkpoint of the 16th is complete, and the run resumes from it."""
    write, full = MetricsFile.write, a_full_disk()

    def write_until_full(self, step, **values):
        if step == 17:
            full.__enter__()
        write(self, step, **values)

    monkeypatch.setattr(MetricsFile, "write", write_until_full)
    try:
        with pytest.raises(
            TrainError,
            match=r"metrics\.jsonl: cannot be written: File too large; what the last checkpoint",
        ):
            train(make_config(), tmp_path / "run", console=quiet)
    finally:
        full.__exit__(None, None, None)
    monkeypatch.undo()
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [8, 16]
    assert train(make_config(), tmp_path / "run", resume=True, console=quiet).step == 24
    assert [
        m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in m
    ] == list(range(1, 25))


def test_a_directory_that_cannot_hold_a_run(make_config, tmp_path, quiet, a_full_disk):
    for path in ("/proc/self/run", tmp_path / "file" / "run"):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot hold a run"):
            train(make_config(), path, console=quiet)
    with a_full_disk(), pytest.raises(ConfigError, match="lock: cannot be written: File too large"):
        RunDir(tmp_path / "run").__enter__()
    with RunDir(tmp_path / "run"):
        pass  # the lock was let go


def test_a_config_that_cannot_be_written_leaves_the_one_before(tmp_path, a_full_disk):
    run = RunDir(tmp_path)
    run._write_text("config.toml", "seed = 1\n")
    with (
        a_full_disk(),
        pytest.raises(ConfigError, match=r"config\.toml: cannot be written: File too large"),
    ):
        run._write_text("config.toml", "seed = 2\n")
    assert (tmp_path / "config.toml").read_text() == "seed = 1\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(make_config, tmp_path, quiet):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="run: cannot hold a run: Permission denied"):
        train(make_config(), tmp_path / "run", console=quiet)


def test_an_error_of_the_config_leaves_no_folder(tmp_path, make_config, quiet):
    unknown = make_config(train={"loggers": ["nowhere.py:Logger"]})
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "new" / "run", tmp_path / "mine"):
        with pytest.raises(ConfigError, match="nowhere.py"):
            train(unknown, out, console=quiet)
    assert (
        not (tmp_path / "new").exists() and (tmp_path / "mine").is_dir()
    )  # which was there before


def test_the_lock_names_its_holder(tmp_path):
    (tmp_path / "lock").write_text("pid 123456789012345")
    with (
        RunDir(tmp_path),
        pytest.raises(ConfigError, match=rf"another process \(pid {os.getpid()}\) is training"),
    ):
        RunDir(tmp_path).__enter__()


class Data:
    def fingerprint(self):
        return {"sha256": "0"}


def test_files_are_named_from_the_root(tmp_path, monkeypatch):
    """Data and nets on disk; the run is continued by the relative name, too, and not with another net."""
    monkeypatch.chdir(tmp_path)
    tables = {
        "task": "classification",
        "data": {"path": "data.npz"},
        "model": {"kind": "net", "net": "old/net.pb"},
    }
    config, run = decode(Config, tables, "c.toml"), RunDir(tmp_path / "run")
    run.path.mkdir()
    run.write(config, Data())
    kept = run.load_config()
    assert (kept.data.path, kept.model.net) == (
        str(tmp_path / "data.npz"),
        str(tmp_path / "old" / "net.pb"),
    )
    assert kept.model.init_net is None
    run.check_continues(config, Data())
    other = decode(
        Config,
        {**tables, "data": {"path": "moved.npz"}, "model": {"kind": "net", "net": "net.pb"}},
        "c.toml",
    )
    with pytest.raises(
        CheckpointError,
        match=r"is another run: model\.net is '.*/old/net\.pb' there, and '.*/net\.pb' here",
    ):
        run.check_continues(other, Data())


def test_an_error_leaves_a_run_that_can_go_on(tmp_path):
    """Before the first step nothing is left; later, what was measured, and what a lost process is to be resumed from."""
    path = tmp_path / "run"

    def fail(error, running=False, measured=False):
        with pytest.raises(type(error)), RunDir(path) as run:
            run.is_running = running
            (path / "config.toml").touch()
            with MetricsFile(run.metrics) as metrics:
                if measured:
                    metrics.write(1, loss=1.0)
            raise error
        return path.exists()

    assert not fail(TrainError("another process cannot begin"))
    assert not fail(ConfigError("a mistake"), running=True)
    for error, running in ((TrainError("a full disk"), True), (ProcessLost("it is lost"), False)):
        assert fail(error, running)
        shutil.rmtree(path)
    assert fail(GradientError("step 15: they disagree"), running=True, measured=True)
