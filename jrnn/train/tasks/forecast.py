"""Forecasts of time series from a CSV file: from a window of rows, the next values of some columns.

Shapes: R rows, W steps of a window, D columns read, O columns predicted, P steps ahead (the horizon), B examples.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from jrnn.errors import DataError
from jrnn.files import read_text
from jrnn.files.memory import free
from jrnn.train.models import FEATURE_MODELS, Model, Params, Signature, build_model
from jrnn.train.tasks.task import (
    Examples,
    HeldOutTask,
    Scaling,
    Shuffled,
    TaskKind,
    Trained,
    checksum,
    kept_value,
    predictor,
)
from jrnn.train.toml_codec import CONFIGS, Positive, check_bounds, hint, imply_file, require

DEMAND = CONFIGS / "data" / "demand.csv"  # the hourly load of the config `forecast`


@dataclass(frozen=True)
class ForecastData:
    """A CSV file whose first line names the columns; its rows are equally spaced in time.

    The source "demand" is a file that ships with jrnn: a generated hourly load with the temperature.
    """

    source: Literal["demand", "file"] = "file"
    path: str | None = None  # the file, relative to the working directory; it implies source = "file"
    targets: list[str] = field(default_factory=list)  # the columns to predict
    inputs: list[str] = field(default_factory=list)  # the columns to read; by default those to predict
    window: Positive = 48  # rows that a forecast is made from
    horizon: Positive = 1  # rows after them that it predicts
    validation: float = 0.2  # the share of the rows, at their end, that is never trained on
    batch: Positive = 64  # examples in a step

    def __post_init__(self):
        imply_file(self, "a CSV file")
        require(len(self.targets) > 0, "data.targets must name at least one column to predict", self.targets)
        require(0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation)
        check_bounds("data", self)

    @property
    def file(self) -> str | Path:
        return DEMAND if self.path is None else self.path

    @property
    def read(self) -> list[str]:
        return self.inputs or self.targets


def read_columns(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Returns columns of a CSV file by name, float64 [R, len(names)].

    Raises:
        DataError: for a file that is missing or not UTF-8, a column that it lacks, or a cell that is not a number.
    """
    text = read_text(path, DataError, free(), "; data.path must name a CSV file")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)  # a quote that is not closed is an error
    numbers = []
    try:
        header = [name.strip() for name in next(rows, [])]
        places = [_place(path, name, header) for name in names]
        for row in rows:
            if any(cell.strip() for cell in row[len(header) :]):
                raise DataError(f"{path}, line {rows.line_num}: has {len(row)} cells, and the first line {len(header)}")
            if row:  # not an empty line
                numbers.append([_number(path, rows.line_num, name, row, place) for name, place in zip(names, places)])
    except csv.Error as e:
        raise DataError(f"{path}, line {rows.line_num}: {e}; is a quote not closed?") from None
    return np.asarray(numbers, np.float64).reshape(len(numbers), len(names))


def _place(path: str | Path, name: str, header: list[str]) -> int:
    """Returns the position of a column."""
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise DataError(f"{path}: has {header.count(name)} columns {name!r}; give each a name of its own")
    for mark, what in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(header) == 1 and mark in header[0]:
            raise DataError(f"{path}: its cells are separated by {what}; a CSV file has commas: convert it")
    raise DataError(f"{path}: has no column {name!r}{hint(name, [h[:40] for h in header[:40]])}")


def _number(path: str | Path, line: int, name: str, row: list[str], place: int) -> float:
    cell = row[place] if place < len(row) else ""
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise DataError(
            f"{path}, line {line}: column {name!r} must be a number, is {cell!r:.80}; fill it, or drop the row"
        )
    return value


def windows(inputs: np.ndarray, targets: np.ndarray, window: int, horizon: int) -> Examples:
    """Returns every window of rows [W, B, D] with the rows after it [B, P O]; raises DataError if there is none."""
    count = len(inputs) - window - horizon + 1
    if count < 1:
        raise DataError(f"{len(inputs)} rows are too few for data.window = {window} and data.horizon = {horizon}")
    before = np.arange(window)[:, None] + np.arange(count)
    after = np.arange(count)[:, None] + window + np.arange(horizon)
    return Examples(inputs[before], targets[after].reshape(count, -1))


@dataclass(frozen=True)
class ForecastTask(HeldOutTask):
    """Windows of a scaled time series; see `Task`. The last rows are held out; their windows may start before them."""

    data: ForecastData

    unit: ClassVar[str] = "MSE, scaled"

    @classmethod
    def load(cls, config: Any) -> ForecastTask:
        data = config.data
        inputs, targets = read_columns(data.file, data.read), read_columns(data.file, data.targets)
        border = round(len(inputs) * (1 - data.validation))
        of_inputs, of_targets = Scaling.fit(inputs[:border]), Scaling.fit(targets[:border])
        kept = {"inputs": vars(of_inputs), "targets": vars(of_targets), "sha256": checksum(inputs, targets)}
        x, y = of_inputs.apply(inputs), of_targets.apply(targets)
        try:
            train = windows(x[:border], y[:border], data.window, data.horizon)
            start = max(border - data.window, 0)  # so that the first row held out is predicted too
            held_out = windows(x[start:], y[start:], data.window, data.horizon)
            batches = Shuffled.of(train, data.batch, config.seed)
        except DataError as e:
            raise e.at(data.file) from None
        return cls(batches, held_out, kept, _model(config, kept), data)

    def evaluate(self, params: Params, loss: float) -> dict[str, float]:
        """Returns the root of the mean squared error of each column, in its own units."""
        predicted = _unscaled(self.data, self.kept, self.predicted(params))
        truth = _unscaled(self.data, self.kept, self.held_out.targets)
        errors = np.sqrt(np.mean(np.square(predicted - truth), axis=(0, 1)))
        return {f"rmse_{name}": float(error) for name, error in zip(self.data.targets, errors)}


def _unscaled(data: ForecastData, kept: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """[B, P O] -> [B, P, O], in the file's units."""
    return kept_value(kept, "targets", Scaling).undo(values.reshape(-1, data.horizon, len(data.targets)))


def _model(config: Any, kept: Mapping[str, Any]) -> Model:
    data = config.data
    signature = Signature(False, len(data.read), data.horizon * len(data.targets), loss="squared_error")
    return build_model(config, signature)


def _predict(trained: Trained, path: str | Path | None) -> str:
    """Returns the forecast of the rows after the last ones of a file as CSV."""
    data, kept = trained.config.data, trained.fingerprint
    path = path or data.file
    rows = kept_value(kept, "inputs", Scaling).apply(read_columns(path, data.read))
    if len(rows) < data.window:
        raise DataError(f"{path}: has {len(rows)} rows; a forecast is made from data.window = {data.window}")
    last = Examples(rows[-data.window :, None], None)
    predicted = _unscaled(data, kept, predictor(trained.model)(trained.params, [last]))[0]
    lines = [",".join(["step", *data.targets])]
    lines += [",".join([str(k + 1), *(f"{value:.6g}" for value in row)]) for k, row in enumerate(predicted)]
    return "\n".join(lines) + "\n"


def _units(config: Any, kept: Mapping[str, Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Rows in the file's units -> the model's; [N, P O] -> [N, P, O] in the file's units."""
    data = config.data

    def after(y: Any) -> Any:
        return kept_value(kept, "targets", Scaling).unscaled(y.reshape(y.shape[0], data.horizon, len(data.targets)))

    return kept_value(kept, "inputs", Scaling).scaled, after


FORECAST = TaskKind("forecast", ForecastData, FEATURE_MODELS, ForecastTask.load, _model, predict=_predict, units=_units)
