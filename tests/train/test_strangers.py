"""Data, configurations and run directories that were changed, damaged or mistyped: each raises an error."""

import io
import os
import zipfile

import numpy as np
import pytest

from jrnn.errors import CheckpointError, ConfigError, DataError, TrainError
from jrnn.files import read_text
from jrnn.files.tensors import load_npy, load_npz
from jrnn.train import load_config, load_run, train
from jrnn.train.loggers import TensorBoard
from jrnn.train.metrics import MetricsFile
from jrnn.train.runs import curves, summarize
from jrnn.train.tasks.classification import ClassificationData, read_examples
from jrnn.train.tasks.forecast import read_columns
from jrnn.train.text_streams import TextConfig, text_of

X, Y = np.zeros((4, 3)), np.array([0, 1, 0, 1])


def with_value(value, at=(1, 2)):
    changed = X.copy()
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    "arrays, rule",
    [
        ({"inputs": X, "targets": Y + 2**32}, r"'targets'\[1\] is 4294967297"),
        ({"inputs": with_value(np.nan), "targets": Y}, "example 1 is nan at step 2, feature 0"),
        ({"inputs": with_value(1e300), "targets": Y}, "example 1 is 1e.300 at step 2, feature 0"),
        (
            {"inputs": X, "targets": np.array([None] * 4)},
            "array 'targets': it holds Python objects, which are never read",
        ),
    ],
)
def test_examples_that_are_not_what_they_seem(tmp_path, arrays, rule):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=rule) as e:
        read_examples(ClassificationData(path=str(tmp_path / "d.npz")))
    assert "pickle" not in str(e.value)


def test_padding_may_hold_anything(tmp_path):
    np.savez(
        tmp_path / "d.npz", inputs=with_value(np.nan), targets=Y, lengths=np.array([3, 2, 3, 3])
    )
    assert read_examples(ClassificationData(path=str(tmp_path / "d.npz"))).inputs.shape == (3, 4, 1)


def header(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + b"\0" * 64


def test_headers_that_promise_more_than_there_is(tmp_path):
    (tmp_path / "d.npy").write_bytes(header((10**12,)))
    with pytest.raises(DataError, match="needs 4,000,000,000,000 bytes, and 64 follow"):
        load_npy(tmp_path / "d.npy", DataError)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", header((10**6, 10**6)))
    with pytest.raises(
        DataError, match=r"d\.npz: .* array 'x': its header says float32\[1000000, 1000000\]"
    ):
        load_npz(tmp_path / "d.npz", DataError)
    np.save(tmp_path / "good.npy", X.T)
    np.testing.assert_array_equal(load_npy(tmp_path / "good.npy", DataError), X.T)
    for bad in ("none.npy", "a\0b.npy", "."):
        with pytest.raises(DataError):
            load_npy(tmp_path / bad, DataError)


@pytest.mark.parametrize(
    "text, rule",
    [
        ('a,b\n1,2\n3,"4\n5,6\n', "line 4: unexpected end of data; is a quote not closed"),
        ("a,b,a\n1,2,3\n", "has 2 columns 'a'"),
        ("a;b\n1;2\n", "separated by semicolons"),
        ("a\tb\n1\t2\n", "separated by tabs"),
        ("a,b\n1,2,3\n", "line 2: has 3 cells, and the first line 2"),
        ("a,b\n" + "1" * 140_000 + ",2\n", "line 2: field larger than field limit"),
    ],
)
def test_csv_files_whose_rows_would_be_lost(tmp_path, text, rule):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(DataError, match=rule):
        read_columns(tmp_path / "d.csv", ["a"])


def test_utf_16_is_named(tmp_path):
    (tmp_path / "d.txt").write_text("text", encoding="utf-16")
    with pytest.raises(DataError, match="is UTF-16; convert it, as with: iconv -f utf-16"):
        read_text(tmp_path / "d.txt", DataError)


@pytest.mark.parametrize(
    "change, rule",
    [
        ("optimizer.learning_rate=inf", "learning_rate must be a finite number, is inf"),
        ("optimizer.clip=nan", "clip must be a finite number"),
        ("train.steps=100000000000000000000", "train.steps must have 32 bits"),
        ("train.steps=3000000000", "train.steps must be below"),
        ("seed=18446744073709551616", "seed must have 32 bits"),
        ("seed=-1", "seed must lie between 0 and"),
    ],
)
def test_numbers_that_cannot_be_meant(change, rule):
    with pytest.raises(ConfigError, match=rule):
        load_config("char_lstm", [change])


@pytest.mark.exhaustive
def test_an_edited_config_does_not_continue(make_config, quiet, tmp_path):
    config = make_config(
        train={"steps": 2, "checkpoint_every": 2, "validate_every": 2, "steps_per_call": 2}
    )
    out = tmp_path / "run"
    train(config, out, console=quiet)
    file = out / "config.toml"
    text = file.read_text()
    file.write_text(text.replace("clip = 1.0", "clip = 0.5").replace("hidden = ", "hidden = 1"))
    with pytest.raises(
        CheckpointError,
        match=r"was changed .*: model.hidden was (\d+) and is 1\1.*clip was 1.0 and is 0.5",
    ):
        train(config, out, resume=True, console=quiet)
    file.write_text(text)
    assert train(config, out, resume=True, console=quiet).step == 2
    file.write_text("")
    with pytest.raises(CheckpointError, match="config.toml: is empty"):
        load_run(out).sample()
    file.write_text(text)
    (out / "data.json").unlink()
    (out / "data.json").mkdir()
    with pytest.raises(CheckpointError, match="data.json: is a folder, not a file"):
        load_run(out).sample()


def test_pipes_devices_and_folders_are_no_files(make_config, quiet, tmp_path):
    """Reading them may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path / "pipe", "a pipe"),
        ("/dev/zero", "a device"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(DataError, match=f"is {what}, not a file"):
            text_of(TextConfig(path=str(path)))
        with pytest.raises(DataError, match=f"is {what}, not a file"):
            read_columns(path, ["a"])
        with pytest.raises(ConfigError, match=f"is {what}, not a file"):
            load_config(path)
    (tmp_path / "config.toml").write_text("")
    for make, what in ((os.mkdir, "a folder"), (os.mkfifo, "a pipe")):
        make(tmp_path / "metrics.jsonl")
        with pytest.raises(DataError, match=f"metrics.jsonl: is {what}, not a file"):
            summarize(tmp_path)
        (tmp_path / "metrics.jsonl").rename(tmp_path / what)


def test_a_run_directory_has_a_name_of_text(make_config, quiet, tmp_path):
    with pytest.raises(ConfigError, match="its path is not UTF-8"):
        train(make_config(), tmp_path / "r\udcff", console=quiet)


def test_metrics_that_are_no_numbers_are_not_drawn(tmp_path):
    lines = [
        '{"step": 1, "loss": "x"}',
        '{"step": 2, "loss": [1]}',
        '{"step": 3, "loss": 2.5}',
        '{"step": 4, "loss": 1e999}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (steps, losses), _ = curves(tmp_path)
    assert (steps.tolist(), losses.tolist()) == ([3], [2.5])


def test_names_of_metrics_on_a_board(tmp_path):
    logger = TensorBoard(tmp_path, None, None)
    logger._writer = board = Board()
    with MetricsFile(tmp_path / "metrics.jsonl", loggers=[logger]) as metrics:
        metrics.write(1, **{"a\x1b[2J\nb": 0.5})
    assert board.tags == ["a\\x1b[2J\\nb"]


class Board:
    def __init__(self):
        self.tags = []

    def add_scalar(self, tag, value, step):
        self.tags.append(tag)

    def close(self):
        pass


@pytest.mark.exhaustive
def test_a_run_that_skips_every_step_fails(make_config, quiet, tmp_path):
    config = make_config(
        train={"steps": 2, "on_nan": "skip", "loss_limit": 1e-9, "steps_per_call": 2}
    )
    with pytest.raises(TrainError, match="all 2 steps were skipped, so nothing was trained"):
        train(config, tmp_path / "run", console=quiet)


def test_a_damaged_best_falls_back(make_config, quiet, tmp_path):
    steps = {
        "steps": 2,
        "checkpoint_every": 2,
        "validate_every": 2,
        "steps_per_call": 2,
        "patience": 2,
    }
    out = tmp_path / "run"
    train(make_config(train=steps), out, console=quiet)
    wanted = load_run(out).sample()
    for file in (out / "best").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:3])
    with pytest.warns(
        UserWarning, match="is damaged .*; the next best parameters of the run are used"
    ):
        assert load_run(out).sample() == wanted
