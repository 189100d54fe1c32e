"""Forecasts of time series from a CSV file: from a window of rows, the next values of some columns.

Shapes: R rows, W steps of a window, D columns read, O columns predicted, P steps ahead (the horizon), B examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from jrnn.errors import ConfigError, DataError
from jrnn.train.models import FEATURE_MODELS, Model, Params, Signature, build_model
from jrnn.train.tasks.series import Series, read_columns, read_series, times_after
from jrnn.train.tasks.task import (
    Examples,
    HeldOutTask,
    Kept,
    Metrics,
    Scaling,
    Shuffled,
    TaskKind,
    Trained,
    Units,
    checksum,
    kept_value,
    predictor,
)
from jrnn.train.toml_codec import CONFIGS, Positive, check_bounds, imply_file, require

DEMAND = CONFIGS / "data" / "demand.csv"  # the hourly load of the config `forecast`


@dataclass(frozen=True)
class ForecastData:
    """A CSV file whose first line names the columns; its rows are equally spaced, or a column has their times.

    A row with an empty cell among its inputs is a step that does not count. An empty target is left out of the loss.
    The source "demand" is a file that ships with jrnn: a generated hourly load with the temperature.
    """

    source: Literal["demand", "file"] = "file"
    # the file, relative to the working directory; it implies source = "file"
    path: str | None = None
    targets: list[str] = field(default_factory=list)  # the columns to predict
    # the columns to read; by default those to predict
    inputs: list[str] = field(default_factory=list)
    # the column of times, dates or numbers; without it rows are equally spaced
    time: str | None = None
    window: Positive = 48  # rows that a forecast is made from
    horizon: Positive = 1  # rows after them that it predicts
    validation: float = 0.2  # the share of the rows, at their end, that is never trained on
    batch: Positive = 64  # examples in a step

    def __post_init__(self):
        imply_file(self, "a CSV file")
        require(
            len(self.targets) > 0,
            "data.targets must name at least one column to predict",
            self.targets,
        )
        require(
            0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation
        )
        check_bounds("data", self)

    @property
    def file(self) -> str | Path:
        return DEMAND if self.path is None else self.path

    @property
    def read(self) -> list[str]:
        return self.inputs or self.targets


def windows(series: Series, targets: np.ndarray, window: int, horizon: int) -> Examples:
    """Returns every window of rows [W, B, D] with the rows after it [B, P O].

    Leaves out windows in which no row counts, and windows after which no target is known.

    Raises:
        DataError: if there is none.
    """
    count = len(targets) - window - horizon + 1
    if count < 1:
        raise DataError(
            f"{len(targets)} rows are too few for data.window = {window} and data.horizon = {horizon}"
        )
    before = np.arange(window)[:, None] + np.arange(count)
    after = np.arange(count)[:, None] + window + np.arange(horizon)
    goals = targets[after].reshape(count, -1)
    usable = series.counts[before].any(axis=0) & ~np.isnan(goals).all(axis=1)
    if not usable.any():
        raise DataError(
            "no window of data.window rows has a row without empty cells, and a known target after it"
        )
    return series.at(before[:, usable])._replace(targets=goals[usable])


def _check_known(names: list[str], values: np.ndarray) -> None:
    """Raises DataError for a column without any number."""
    for name, column in zip(names, values.T):
        if np.isnan(column).all():
            raise DataError(f"column {name!r} has no number in the rows to train on")


@dataclass(frozen=True)
class ForecastTask(HeldOutTask):
    """Windows of a scaled time series; see `Task`. The last rows are held out; their windows may start before them."""

    data: ForecastData

    unit: ClassVar[str] = "(MSE, scaled)"

    @classmethod
    def load(cls, config: Any) -> ForecastTask:
        data = config.data
        series = read_series(data.file, data.read, data.time)
        targets = read_columns(data.file, data.targets)
        border = round(len(targets) * (1 - data.validation))
        try:
            _check_known(data.read, series.inputs[:border])
            _check_known(data.targets, targets[:border])
            of_inputs = Scaling.fit(series.inputs[:border])
            of_targets = Scaling.fit(targets[:border])
            kept = {
                "inputs": vars(of_inputs),
                "targets": vars(of_targets),
                "mask": not series.counts.all(),
                "spacing": [] if series.spacing is None else [series.spacing],
                "sha256": checksum(series.inputs, targets, series.times),
            }
            series = series.scaled(of_inputs)
            y = of_targets.apply(targets)
            train = windows(series[:border], y[:border], data.window, data.horizon)
            start = max(border - data.window, 0)  # so that the first row held out is predicted too
            held_out = windows(series[start:], y[start:], data.window, data.horizon)
            missing = np.isnan(train.targets).any() or np.isnan(held_out.targets).any()
            if missing and config.model.kind in ("cells", "net"):
                raise ConfigError(
                    f"{data.file}: has empty cells among the targets, which the loss of a model of kind "
                    f'{config.model.kind!r} does not leave out: use model.kind = "nn"'
                )
            batches = Shuffled.of(train, data.batch, config.seed)
        except DataError as e:
            raise e.at(data.file) from None
        return cls(batches, held_out, kept, _model(config, kept), data)

    def evaluate(self, params: Params, loss: float) -> Metrics:
        """Returns the root of the mean squared error of each column, in its own units."""
        predicted = _unscaled(self.data, self.kept, self.predicted(params))
        truth = _unscaled(self.data, self.kept, self.held_out.targets)
        errors = np.sqrt(np.nanmean(np.square(predicted - truth), axis=(0, 1)))
        names = map("rmse_{}".format, self.data.targets)
        return dict(zip(names, errors.tolist()))


def _unscaled(data: ForecastData, kept: Kept, values: np.ndarray) -> np.ndarray:
    """[B, P O] -> [B, P, O], in the file's units."""
    by_row = values.reshape(-1, data.horizon, len(data.targets))
    return kept_value(kept, "targets", Scaling).undo(by_row)


def _model(config: Any, kept: Kept) -> Model:
    data = config.data
    outputs = data.horizon * len(data.targets)
    mask = kept_value(kept, "mask", bool)
    dt = bool(kept_value(kept, "spacing", list[float]))
    if (mask or dt) and config.model.kind != "nn":
        raise ConfigError(
            f"{data.file}: has empty cells or rows that are not equally spaced, which a model of kind {config.model.kind!r} "
            'does not read: use model.kind = "nn"'
        )
    signature = Signature(
        tokens=False, inputs=len(data.read), outputs=outputs, loss="squared_error", mask=mask, dt=dt
    )
    return build_model(config, signature)


def _predict(trained: Trained, path: str | Path | None) -> str:
    """Returns the forecast of the rows after the last ones of a file as CSV."""
    data = trained.config.data
    kept = trained.fingerprint
    path = path or data.file
    spacing = kept_value(kept, "spacing", list[float])
    series = read_series(path, data.read, data.time, *spacing)
    if len(series.inputs) < data.window:
        raise DataError(
            f"{path}: has {len(series.inputs)} rows; a forecast is made from data.window = {data.window}"
        )
    series = series.scaled(kept_value(kept, "inputs", Scaling))[-data.window :]
    if not trained.model.signature.dt:
        equal = series.equally_spaced()
        if equal is None:
            raise DataError(
                f"{path}: its last {data.window} rows are not equally spaced in {data.time!r}, but the rows that the model "
                "was trained on are: give a file whose last rows have no gap, or train on rows with gaps"
            )
        series = equal
    if not series.counts.any():
        raise DataError(
            f"{path}: each of the last {data.window} rows has an empty cell; a forecast needs one without"
        )
    model = trained.model
    if not series.counts.all() and not model.signature.mask:
        if trained.config.model.kind != "nn":
            raise DataError(
                f"{path}: its last rows have empty cells, which the model does not read; fill them"
            )
        model = model.with_signature(replace(model.signature, mask=True))
    last = series.at(np.arange(data.window)[:, None])
    predicted = _unscaled(data, kept, predictor(model)(trained.params, [last]))[0]
    rows = list(map(str, range(1, len(predicted) + 1)))
    if data.time is not None:
        rows = times_after(path, data.time, len(predicted), *spacing)
    lines = [",".join([data.time or "step", *data.targets])]
    for row, values in zip(rows, predicted):
        lines.append(",".join([row, *map("{:.6g}".format, values)]))
    return "\n".join(lines) + "\n"


def _units(config: Any, kept: Kept) -> Units:
    """Rows in the file's units -> the model's; [N, P O] -> [N, P, O] in the file's units."""
    data = config.data

    def after(y: Any) -> Any:
        by_row = y.reshape(y.shape[0], data.horizon, len(data.targets))
        return kept_value(kept, "targets", Scaling).unscaled(by_row)

    return kept_value(kept, "inputs", Scaling).scaled, after


FORECAST = TaskKind(
    "forecast",
    ForecastData,
    FEATURE_MODELS,
    ForecastTask.load,
    _model,
    predict=_predict,
    units=_units,
)
