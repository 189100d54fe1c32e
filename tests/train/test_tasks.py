"""Tasks of independent examples: what they read, how they cut and scale it, and short trainings of each."""

import csv
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.errors import ConfigError, DataError, LayerError
from jrnn.train import Config, load_run, train
from jrnn.train.models.interface import FunctionModel, Signature, mean_loss
from jrnn.train.tasks.adding import Adding
from jrnn.train.tasks.classification import ClassificationData, read_examples
from jrnn.train.tasks.forecast import windows
from jrnn.train.tasks.series import Series, read_columns, read_series
from jrnn.train.tasks.task import Examples, Scaling, Shuffled, Trained, in_batches, split
from jrnn.train.toml_codec import decode

SMALL = {"kind": "nn", "cell": "gru", "hidden": 4}


def examples(count, steps=3):
    inputs = np.arange(steps * count, dtype=np.float32).reshape(steps, count, 1)
    return Examples(inputs, np.arange(count), lengths=np.arange(count))


def test_a_pass_shows_every_example_once_in_an_order_of_its_own():
    shuffled = Shuffled.of(examples(10), 5, seed=3)
    passes = [
        [t for step in (2 * k, 2 * k + 1) for t in shuffled.at(step).targets.tolist()]
        for k in range(3)
    ]
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
    assert (read.inputs.dtype, read.targets.dtype, read.lengths.dtype) == (
        np.float32,
        np.int32,
        np.int32,
    )
    assert read_examples(
        write_npz(tmp_path / "b.npz", inputs=np.zeros((30, 5), np.uint8))
    ).inputs.shape == (5, 30, 1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"targets": None}, "a.npz: lacks the array 'targets'; it holds inputs"),
        (
            {"targets": np.zeros(30)},
            r"'targets' is float64\[30\]; it must be integers >= 0, \[30\]",
        ),
        ({"targets": np.full(30, -1)}, "must be integers >= 0"),
        (
            {"inputs": np.zeros(30)},
            r"'inputs' is float64\[30\]; it must be numbers \[N, T, D\] or \[N, T\]",
        ),
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
    assert digits.inputs[:8, 0, 0].tolist() == [
        0,
        0,
        5,
        13,
        9,
        1,
        0,
        0,
    ]  # the first row of the first digit


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
        (
            "a,value\n1,2\n3,x\n",
            r"x\.csv, line 3: column 'value' must be a number, or empty where nothing was",
        ),
        ("value\n1\ninf\n", r"line 3: column 'value' must be a number, or empty .*, is 'inf'"),
        ("", r"has no column 'value'"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_columns(tmp_path / "x.csv", ["value"])


def test_columns_by_name(tmp_path):
    (tmp_path / "x.csv").write_text(
        '\ufeffday, value,"other, one"\r\nmon,1,2\r\n\r\ntue,3.5,4e1\r\n', newline=""
    )
    np.testing.assert_array_equal(
        read_columns(tmp_path / "x.csv", ["other, one", "value"]), [[2, 1], [40, 3.5]]
    )


def test_windows_and_what_follows_them():
    rows = np.arange(6.0)[:, None]
    series = Series(rows, np.ones(6, bool))
    cut = windows(series, np.concatenate([rows, rows * 10], axis=1), window=3, horizon=2)
    np.testing.assert_array_equal(cut.inputs[..., 0].T, [[0, 1, 2], [1, 2, 3]])
    np.testing.assert_array_equal(cut.targets, [[3, 30, 4, 40], [4, 40, 5, 50]])
    assert cut.mask is None and cut.dt is None
    with pytest.raises(
        DataError, match=r"4 rows are too few for data\.window = 3 and data\.horizon = 2"
    ):
        windows(series[:4], rows[:4], 3, 2)


def test_empty_cells_and_times_of_windows(tmp_path):
    """A row with an empty cell does not count; times are counted from the last row that does, in the usual spacing."""
    hours = [0, 1, 2, 4, 5, 6]
    values = ["1", "", "3", "4", "NA", "6"]
    rows = "".join(f"2026-11-27T{h:02}:00,{v}\n" for h, v in zip(hours, values))
    (tmp_path / "x.csv").write_text(f"at,value\n{rows}")
    series = read_series(tmp_path / "x.csv", ["value"], "at")
    assert series.spacing == 3600
    cut = windows(series, series.inputs, window=2, horizon=1)
    np.testing.assert_array_equal(
        cut.targets[:, 0], [3, 4, 6]
    )  # two windows end where no target is known
    np.testing.assert_array_equal(cut.inputs[..., 0].T, [[1, 0], [0, 3], [4, 0]])
    np.testing.assert_array_equal(cut.mask.T, [[True, False], [False, True], [True, False]])
    np.testing.assert_array_equal(cut.dt.T, [[1, 1], [1, 2], [2, 1]])
    np.testing.assert_array_equal(in_batches(cut, 2)[1].dt, cut.dt[:, 2:])
    (tmp_path / "y.csv").write_text("at,value\n1,1\n2,2\n3,3\n")
    assert read_series(tmp_path / "y.csv", ["value"], "at").times is None  # equally spaced
    for text, message in (
        ("1,1\n3,2\n2,3\n", "column 'at' does not increase at row 3 of the data; sort the rows"),
        (
            "monday,1\n",
            "line 2: column 'at' must be a number or a date, as 2026-11-27 or 2026-11-27T10:30, is 'monday'",
        ),
    ):
        (tmp_path / "y.csv").write_text(f"at,value\n{text}")
        with pytest.raises(DataError, match=message):
            read_series(tmp_path / "y.csv", ["value"], "at")


def test_targets_that_are_not_known_have_no_loss():
    signature = Signature(False, 1, 2, loss="squared_error")
    outputs, targets = (
        jnp.array([[1.0, 2.0], [3.0, 5.0]]),
        jnp.array([[0.0, jnp.nan], [jnp.nan, 3.0]]),
    )
    loss, gradient = jax.value_and_grad(lambda y: mean_loss(signature, y, targets))(outputs)
    assert float(loss) == (1 + 4) / 2
    np.testing.assert_array_equal(gradient, [[1, 0], [0, 2]])


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
    write_npz(
        tmp_path / "a.npz",
        inputs=inputs,
        targets=targets,
        lengths=np.where(np.arange(200) % 2, 6, 4),
    )
    data = {"path": str(tmp_path / "a.npz"), "batch": 32}
    result = run(
        {"task": "classification", "data": data, "optimizer": {"learning_rate": 0.05}},
        tmp_path / "r",
        quiet,
        12,
    )
    assert result.metrics["accuracy"] > 0.9
    assert result.unit == "nats"
    model = load_run(tmp_path / "r")
    with pytest.raises(
        ConfigError, match="a model of task 'classification' writes no text; use jrnn predict"
    ):
        model.sample()
    rows = [line.split(",") for line in model.predict().splitlines()]
    assert rows[0] == ["example", "class", "probability"] and len(rows) == 201
    predicted = np.array([int(row[1]) for row in rows[1:]])
    assert np.mean(predicted == targets) > 0.9 and all(
        0.5 <= float(row[2]) <= 1 for row in rows[1:]
    )
    write_npz(
        tmp_path / "new.npz", inputs=inputs[:3], targets=None, lengths=np.array([4, 6, 4])
    )  # no targets are needed
    assert [
        line.split(",")[1] for line in model.predict(tmp_path / "new.npz").splitlines()[1:]
    ] == list(map(str, predicted[:3]))
    write_npz(tmp_path / "wide.npz", inputs=np.ones((3, 6, 2)), targets=None)
    with pytest.raises(
        DataError,
        match="wide.npz: has 2 features and no lengths; the model was trained with 1 feature",
    ):
        model.predict(tmp_path / "wide.npz")


def test_a_forecast_is_in_the_units_of_the_file(tmp_path, quiet):
    """The scaling is that of the first part: the jump in the last rows does not show in it."""
    rows = 1000 + 100 * np.sin(np.arange(120) / 5)
    rows[100:] += 500
    (tmp_path / "x.csv").write_text("t,value\n" + "".join(f"{k},{x}\n" for k, x in enumerate(rows)))
    data = {
        "path": str(tmp_path / "x.csv"),
        "targets": ["value"],
        "window": 8,
        "horizon": 3,
        "batch": 16,
    }
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


def hourly(path, hours, values, name="x.csv"):
    (path / name).write_text(
        "at,value\n" + "".join(f"{h * 3600},{v}\n" for h, v in zip(hours, values))
    )
    return {"path": str(path / name), "targets": ["value"], "window": 6, "horizon": 2, "batch": 16}


def test_a_forecast_from_rows_with_holes_is_that_of_the_rows_that_count(tmp_path, quiet):
    values = [f"{np.sin(k / 3):.6f}" if k % 7 else "" for k in range(80)]
    data = hourly(tmp_path, range(80), values)
    result = run({"task": "forecast", "data": data, "model": SMALL}, tmp_path / "r", quiet)
    assert np.isfinite(result.metrics["rmse_value"])
    model = load_run(tmp_path / "r")
    last = np.array([float(v) if v else np.nan for v in values[-6:]])
    predicted = [float(line.split(",")[1]) for line in model.predict().splitlines()[1:]]
    some = last[~np.isnan(last)]
    assert len(some) == 5
    np.testing.assert_allclose(
        model(jnp.asarray(some)[None, :, None])[0][0, :, 0], predicted, rtol=1e-4
    )
    masked, _ = model(jnp.asarray(last)[None, :, None], mask=~np.isnan(last)[None])
    np.testing.assert_allclose(masked[0, :, 0], predicted, rtol=1e-4)
    with pytest.raises(ConfigError, match='use model.kind = "nn"'):
        run({"task": "forecast", "data": data, "model": {"kind": "cells"}}, tmp_path / "c", quiet)


def test_a_forecast_reads_the_times_of_its_rows(tmp_path, quiet):
    hours = np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 3], 80))
    data = {**hourly(tmp_path, hours, np.sin(hours / 3)), "time": "at"}
    with pytest.raises(
        ConfigError, match='not equally spaced, and model.cell = "gru" reads no times: use "lru"'
    ):
        run({"task": "forecast", "data": data, "model": SMALL}, tmp_path / "r", quiet)
    assert not (tmp_path / "r").exists()
    run(
        {"task": "forecast", "data": data, "model": {**SMALL, "cell": "lru"}}, tmp_path / "r", quiet
    )
    model = load_run(tmp_path / "r")
    hourly(tmp_path, range(6), range(6), "even.csv")
    hourly(tmp_path, [0, 1, 2, 3, 4, 9], range(6), "late.csv")
    even, late = (
        [
            float(line.split(",")[1])
            for line in model.predict(tmp_path / f"{name}.csv").splitlines()[1:]
        ]
        for name in ("even", "late")
    )
    x = jnp.arange(6.0)[None, :, None]
    np.testing.assert_allclose(model(x)[0][0, :, 0], even, rtol=1e-4)
    np.testing.assert_allclose(
        model(x, dt=jnp.ones((1, 6)).at[0, 5].set(5.0))[0][0, :, 0], late, rtol=1e-4
    )
    assert even != late
    with pytest.raises(LayerError, match=r"dt is \[6\] but must be \[1, 6\]"):
        model(x, dt=jnp.ones(6))


def forecasts(path, times, **data):
    """Returns the function from a file's name to the lines that are predicted from it, by a model that repeats rows."""
    (path / "x.csv").write_text("at,value\n" + "".join(f"{t},{k}\n" for k, t in enumerate(times)))
    data = {"path": str(path / "x.csv"), "targets": ["value"], "time": "at"} | data
    data |= {"window": 4, "horizon": 2, "batch": 4}
    config = decode(Config, {"task": "forecast", "data": data, "model": SMALL}, "x.toml")
    task = config.kind.load(config)
    model = FunctionModel(
        lambda key: {}, lambda p, x, key: x.inputs[-2:, :, 0].T, task.model.signature
    )

    def predict(name="x.csv"):
        text = config.kind.predict(Trained(config, task.kept, model, {}), path / name)
        return text.splitlines()

    return predict


@pytest.mark.parametrize(
    ("times", "later"),
    [
        ([f"2026-01-{day:02}" for day in range(1, 29)], ["2026-01-29", "2026-01-30"]),
        ([f"2026-01-01 {h:02}:30" for h in range(24)], ["2026-01-02 00:30", "2026-01-02 01:30"]),
        ([f"2026-01-01T00:00:{s:02}Z" for s in range(20)], ["2026-01-01T00:00:20Z", "2026-01-01T00:00:21Z"]),
        ([f"2026-01-01T{h:02}:00-05:00" for h in range(23)], ["2026-01-01T23:00-05:00", "2026-01-02T00:00-05:00"]),
        (range(0, 90, 3), ["90", "93"]),
        ([k / 10 for k in range(30)], ["3", "3.1"]),
    ],
)  # fmt: skip
def test_a_forecast_says_at_which_times(tmp_path, times, later):
    lines = forecasts(tmp_path, times)()
    assert lines[0] == "at,value" and [line.split(",")[0] for line in lines[1:]] == later
    assert forecasts(tmp_path, times, time=None)()[0] == "step,value"


def test_a_forecast_is_made_from_rows_without_a_gap(tmp_path):
    predict = forecasts(tmp_path, range(30))
    for name, times in (("gap", [*range(20), 25, 26]), ("before", [*range(5), *range(9, 30)])):
        rows = "".join(f"{t},{t}\n" for t in times)
        (tmp_path / f"{name}.csv").write_text(f"at,value\n{rows}")
    with pytest.raises(
        DataError, match=r"gap\.csv: its last 4 rows are not equally spaced in 'at'"
    ):
        predict("gap.csv")
    assert [line.split(",")[0] for line in predict("before.csv")] == ["at", "30", "31"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"task": "forecast"}, r"needs data\.path, the path of a CSV file"),
        (
            {"task": "forecast", "data": {"path": "x.csv"}},
            r"data\.targets must name at least one column",
        ),
        (
            {"task": "forecast", "data": {"targets": [1]}},
            r"data\.targets\[0\] must be a string, is 1",
        ),
        ({"task": "forecast", "data": {"targets": "a"}}, r"data\.targets must be a list, is 'a'"),
        ({"task": "adding", "data": {"length": 1}}, r"data\.length must be at least 2"),
        (
            {"task": "classification", "data": {"source": "file"}},
            r"needs data\.path, the path of a \.npz file",
        ),
        ({"task": "adding", "sample": {}}, "unknown key 'sample'"),
        ({"task": "adding", "model": {"embedding": 3}}, r"unknown key 'model\.embedding'"),
    ],
)
def test_tables_of_a_task(tables, message):
    with pytest.raises(ConfigError, match=message):
        decode(Config, tables, "c.toml")
