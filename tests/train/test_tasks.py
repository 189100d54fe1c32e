"""Tasks of independent examples: what they read, how they cut and scale it, and short trainings of each."""

import csv
import io
import sys

import numpy as np
import pytest

from jrnn.errors import ConfigError, DataError
from jrnn.train import Config, load_run, train
from jrnn.train.tasks.adding import Adding
from jrnn.train.tasks.classification import ClassificationData, read_examples
from jrnn.train.tasks.forecast import read_columns, windows
from jrnn.train.tasks.task import Examples, Scaling, Shuffled, in_batches, split
from jrnn.train.toml_codec import decode

SMALL = {"kind": "nn", "cell": "gru", "hidden": 4}


def examples(count, steps=3):
    inputs = np.arange(steps * count, dtype=np.float32).reshape(steps, count, 1)
    return Examples(inputs, np.arange(count), lengths=np.arange(count))


def test_a_pass_shows_every_example_once_in_an_order_of_its_own():
    shuffled = Shuffled.of(examples(10), 5, seed=3)
    passes = [[t for step in (2 * k, 2 * k + 1) for t in shuffled.at(step).targets.tolist()] for k in range(3)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    batch = shuffled.at(4)
    np.testing.assert_array_equal(batch.inputs[0, :, 0], batch.targets)  # the members stay together
    np.testing.assert_array_equal(batch.lengths, batch.targets)
    np.testing.assert_array_equal(Shuffled.of(examples(10), 5, seed=3).at(4).targets, batch.targets)
    with pytest.raises(DataError, match=r"there are 10 examples to train on, but data\.batch = 11"):
        Shuffled.of(examples(10), 11, 0)


def test_noise_is_a_function_of_the_step():
    clean, noisy = (Shuffled.of(examples(1000, 20), 500, 0, noise) for noise in (0.0, 0.5))
    added = noisy.at(3).inputs - clean.at(3).inputs
    assert abs(added.std() - 0.5) < 0.02 and abs(added.mean()) < 0.02
    np.testing.assert_array_equal(noisy.at(3).inputs, noisy.at(3).inputs)
    assert (added != noisy.at(5).inputs - clean.at(5).inputs).any()


def test_what_is_held_out_is_never_trained_on():
    train_part, held = split(examples(10), 0.3, seed=0)
    assert len(held.targets) == 3
    assert sorted([*train_part.targets, *held.targets]) == list(range(10))
    assert [len(b.targets) for b in in_batches(train_part, 3)] == [3, 3, 1]
    with pytest.raises(DataError, match="leaves none for training or validation"):
        split(examples(2), 0.1, 0)


def test_scaling_is_undone():
    values = np.random.default_rng(0).normal(5, 3, (50, 2))
    values[:, 1] = 7  # always the same
    scaling = Scaling.fit(values)
    scaled = scaling.apply(values)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(scaled.std(axis=0), [1, 0], atol=1e-6)
    np.testing.assert_allclose(scaling.undo(scaled), values, rtol=1e-5)


def test_the_adding_problem_asks_for_the_sum_of_the_marked():
    batch = Adding(9, batch=50, seed=1).at(7)
    numbers, marks = batch.inputs[..., 0], batch.inputs[..., 1]
    assert (marks[:4].sum(axis=0) == 1).all() and (marks[4:].sum(axis=0) == 1).all()
    np.testing.assert_allclose(batch.targets[:, 0], (numbers * marks).sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(Adding(9, batch=50, seed=1).at(7).inputs, batch.inputs)
    assert (Adding(9, batch=50, seed=1).at(8).inputs != batch.inputs).any()


# files


def write_npz(path, **arrays):
    rng = np.random.default_rng(0)
    fields = {"inputs": rng.standard_normal((30, 5, 2)), "targets": np.arange(30) % 3, **arrays}
    np.savez(path, **{name: value for name, value in fields.items() if value is not None})
    return ClassificationData(path=str(path))


def test_arrays_from_a_file(tmp_path):
    read = read_examples(write_npz(tmp_path / "a.npz", lengths=np.full(30, 5)))
    assert read.inputs.shape == (5, 30, 2)
    assert (read.inputs.dtype, read.targets.dtype, read.lengths.dtype) == (np.float32, np.int32, np.int32)
    assert read_examples(write_npz(tmp_path / "b.npz", inputs=np.zeros((30, 5), np.uint8))).inputs.shape == (5, 30, 1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"targets": None}, "a.npz: lacks the array 'targets'; it holds inputs"),
        ({"targets": np.zeros(30)}, r"'targets' is float64\[30\]; it must be integers >= 0, \[30\]"),
        ({"targets": np.full(30, -1)}, "must be integers >= 0"),
        ({"inputs": np.zeros(30)}, r"'inputs' is float64\[30\]; it must be numbers \[N, T, D\] or \[N, T\]"),
        ({"lengths": np.full(30, 6)}, r"'lengths' must be integers from 1 to 5, \[30\]"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        read_examples(write_npz(tmp_path / "a.npz", **arrays))


@pytest.mark.exhaustive
def test_digits_are_read_pixel_by_pixel():
    digits = read_examples(ClassificationData())
    assert digits.inputs.shape == (64, 1797, 1) and set(digits.targets) == set(range(10))
    assert digits.inputs[:8, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # the first row of the first digit


def test_without_scikit_learn_there_are_no_digits(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"needs the extra 'data': pip install 'jrnn\[data\]'"):
        read_examples(ClassificationData())


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_examples(ClassificationData(path=str(tmp_path / "a.npz")))
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"is not a \.npz file of numbers"):
        read_examples(ClassificationData(path=str(tmp_path / "a.npz")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"has no column 'value'; known are a, b"),
        ("a,valu\n1,2\n", r"has no column 'value'; did you mean 'valu'"),
        ("a,value\n1,2\n3\n", r"x\.csv, line 3: column 'value' must be a number, is ''"),
        ("value\n1\nnan\n", r"line 3: column 'value' must be a number, is 'nan'"),
        ("", r"has no column 'value'"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_columns(tmp_path / "x.csv", ["value"])


def test_columns_by_name(tmp_path):
    (tmp_path / "x.csv").write_text('\ufeffday, value,"other, one"\r\nmon,1,2\r\n\r\ntue,3.5,4e1\r\n', newline="")
    np.testing.assert_array_equal(read_columns(tmp_path / "x.csv", ["other, one", "value"]), [[2, 1], [40, 3.5]])


def test_windows_and_what_follows_them():
    rows = np.arange(6.0)[:, None]
    series = windows(rows, np.concatenate([rows, rows * 10], axis=1), window=3, horizon=2)
    np.testing.assert_array_equal(series.inputs[..., 0].T, [[0, 1, 2], [1, 2, 3]])
    np.testing.assert_array_equal(series.targets, [[3, 30, 4, 40], [4, 40, 5, 50]])
    with pytest.raises(DataError, match=r"4 rows are too few for data\.window = 3 and data\.horizon = 2"):
        windows(rows[:4], rows[:4], 3, 2)


# trainings


def run(tables, out, quiet, steps=2):
    tables = {"model": SMALL, "train": {"steps": steps, "steps_per_call": 2}, **tables}
    config = decode(Config, tables, "small.toml")
    return train(config, out, console=quiet)


@pytest.mark.exhaustive
def test_a_classifier_learns(tmp_path, quiet):
    """Which half of a sequence is higher; a shorter one is not read to its end."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 2, 200)
    inputs = rng.normal(0, 0.1, (200, 6)) + np.where(targets[:, None] == 1, 1, -1) + 50
    inputs[::2, 4:] = np.nan
    write_npz(tmp_path / "a.npz", inputs=inputs, targets=targets, lengths=np.where(np.arange(200) % 2, 6, 4))
    data = {"path": str(tmp_path / "a.npz"), "batch": 32}
    result = run(
        {"task": "classification", "data": data, "optimizer": {"learning_rate": 0.05}}, tmp_path / "r", quiet, 12
    )
    assert result.metrics["accuracy"] > 0.9
    assert result.unit == "nats"
    model = load_run(tmp_path / "r")
    with pytest.raises(ConfigError, match="a model of task 'classification' writes no text; jrnn predict"):
        model.sample()
    rows = [line.split(",") for line in model.predict().splitlines()]
    assert rows[0] == ["example", "class", "probability"] and len(rows) == 201
    predicted = np.array([int(row[1]) for row in rows[1:]])
    assert np.mean(predicted == targets) > 0.9 and all(0.5 <= float(row[2]) <= 1 for row in rows[1:])
    write_npz(tmp_path / "new.npz", inputs=inputs[:3], lengths=np.array([4, 6, 4]))  # no targets are needed
    assert [line.split(",")[1] for line in model.predict(tmp_path / "new.npz").splitlines()[1:]] == list(
        map(str, predicted[:3])
    )
    write_npz(tmp_path / "wide.npz", inputs=np.ones((3, 6, 2)))
    with pytest.raises(
        DataError, match="wide.npz: has 2 features and no lengths; the model was trained with 1 feature"
    ):
        model.predict(tmp_path / "wide.npz")


def test_a_forecast_is_in_the_units_of_the_file(tmp_path, quiet):
    """The scaling is that of the first part: the jump in the last rows does not show in it."""
    rows = 1000 + 100 * np.sin(np.arange(120) / 5)
    rows[100:] += 500
    (tmp_path / "x.csv").write_text("t,value\n" + "".join(f"{k},{x}\n" for k, x in enumerate(rows)))
    data = {"path": str(tmp_path / "x.csv"), "targets": ["value"], "window": 8, "horizon": 3, "batch": 16}
    result = run({"task": "forecast", "data": data}, tmp_path / "r", quiet)
    scaling = Scaling.fit(rows[:96, None])
    np.testing.assert_allclose(
        result.metrics["rmse_value"], result.validation_loss**0.5 * scaling.deviation[0], rtol=1e-5
    )
    told = list(csv.reader(io.StringIO(load_run(tmp_path / "r").predict())))
    assert [row[0] for row in told] == ["step", "1", "2", "3"]
    assert all(800 < float(row[1]) < 1800 for row in told[1:])
    (tmp_path / "later.csv").write_text("value\n" + "1700\n" * 8)
    later = load_run(tmp_path / "r").predict(tmp_path / "later.csv")
    assert later.startswith("step,value\n1,") and later != load_run(tmp_path / "r").predict()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"task": "forecast"}, r"needs data\.path, the path of a CSV file"),
        ({"task": "forecast", "data": {"path": "x.csv"}}, r"data\.targets must name at least one column"),
        ({"task": "forecast", "data": {"targets": [1]}}, r"data\.targets\[0\] must be a string, is 1"),
        ({"task": "forecast", "data": {"targets": "a"}}, r"data\.targets must be a list, is 'a'"),
        ({"task": "adding", "data": {"length": 1}}, r"data\.length must be at least 2"),
        ({"task": "classification", "data": {"source": "file"}}, r"needs data\.path, the path of a \.npz file"),
        ({"task": "adding", "sample": {}}, "unknown key 'sample'"),
        ({"task": "adding", "model": {"embedding": 3}}, r"unknown key 'model\.embedding'"),
    ],
)
def test_tables_of_a_task(tables, message):
    with pytest.raises(ConfigError, match=message):
        decode(Config, tables, "c.toml")
