"""Where the numbers of a run go next to metrics.jsonl: files, services that track experiments, or a class of the user's."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from jrnn.convert.named import load_named
from jrnn.errors import ConfigError, TrainError, needs_extra, printable
from jrnn.files import append_to, kind_of, read_file, write_whole
from jrnn.files.reading import free

Values = Mapping[str, float]
LONGEST_PARAMETER = 6000  # characters of a parameter in MLflow


class Logger(Protocol):
    """Gets the numbers of each step and each validation, in their order.

    A key `train.loggers` of a config names functions `(run, config, resume_at) -> Logger`, `"MODULE:NAME"`: of the run
    directory, the whole `Config`, and the step that a run is continued from, or None. Steps after it are measured again.

    >>> class Printed:
    ...     def write(self, step, values):
    ...         print(step, values)
    ...
    ...     def close(self):
    ...         pass
    >>> Printed().write(10, {"loss": 2.5})
    10 {'loss': 2.5}
    """

    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None:
        """Called when the run ends, in whatever way."""
        ...


class TensorBoard:
    """Events for TensorBoard, in the folder `tensorboard` of the run; events after the step to continue from are hidden."""

    def __init__(self, run: Path, config: Any, resume_at: int | None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(needs_extra("train.loggers: tensorboard", "tensorboard")) from None
        purge = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(printable(name), value, step)

    def close(self) -> None:
        self._writer.close()


class Csv:
    """The file metrics.csv of the run: step, name, value; rows after the step to continue from are dropped."""

    def __init__(self, run: Path, config: Any, resume_at: int | None):
        self._path = run / "metrics.csv"
        kept = [["step", "name", "value"]]
        if resume_at is not None:
            kept += [row for row in _rows(self._path) if int(row[0]) <= resume_at]
        text = io.StringIO(newline="")
        csv.writer(text).writerows(kept)
        write_whole(self._path, text.getvalue().encode(), TrainError)
        self._file = append_to(self._path, TrainError)
        self._rows = csv.writer(self._file)

    def write(self, step: int, values: Values) -> None:
        try:
            for name, value in values.items():
                self._rows.writerow((step, name, value))
            self._file.flush()
        except OSError as e:
            raise TrainError(
                f"{self._path}: cannot be written: {e.strerror}; the last checkpoint is safe"
            ) from None

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _rows(path: Path) -> list[list[str]]:
    """Returns the whole rows of a file; none if there is no file."""
    text = read_file(path, TrainError, free()).decode("utf-8", "replace") if kind_of(path) else ""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error:
        return []
    return [row for row in rows if len(row) == 3 and re.fullmatch("[0-9]{1,18}", row[0])]


class Service:
    """A run of a service that tracks experiments: Weights & Biases, Trackio or MLflow.

    The service's own environment variables say where numbers go, and name the project or experiment (default: "jrnn").
    Steps of a service only grow. So a continued run is another run of it, with the step from which it continues in its
    name.
    """

    def __init__(self, write: Callable[[int, Values], object], close: Callable[[], object]) -> None:
        self._write = write
        self._close = close

    def write(self, step: int, values: Values) -> None:
        self._write(step, {printable(name): value for name, value in values.items()})

    def close(self) -> None:
        self._close()


def _name(run: Path, resume_at: int | None) -> str:
    return run.name if resume_at is None else f"{run.name} from step {resume_at}"


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of nested tables with their values: `train.steps`, 100."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(needs_extra(f"train.loggers: {name}", name)) from None


def _wandb(run: Path, config: Any, resume_at: int | None) -> Logger:
    """A run of Weights & Biases; its files are in the folder `wandb` of the run directory."""
    session = _package("wandb").init(
        project=os.environ.get("WANDB_PROJECT", "jrnn"),
        name=_name(run, resume_at),
        group=run.name,
        dir=run,
        config=dataclasses.asdict(config),
    )
    return Service(lambda step, values: session.log(values, step=step), session.finish)


def _trackio(run: Path, config: Any, resume_at: int | None) -> Logger:
    """A run of Trackio; its files are in the folder TRACKIO_DIR."""
    session = _package("trackio").init(
        project=os.environ.get("TRACKIO_PROJECT", "jrnn"),
        name=_name(run, resume_at),
        group=run.name,
        config=dataclasses.asdict(config),
        embed=False,
    )
    return Service(lambda step, values: session.log(values, step=step), session.finish)


def _mlflow(run: Path, config: Any, resume_at: int | None) -> Logger:
    """A run of MLflow, at MLFLOW_TRACKING_URI; its parameters are the keys of the config."""
    mlflow = _package("mlflow")
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "jrnn"))
    client = mlflow.MlflowClient()
    session = client.create_run(experiment.experiment_id, run_name=_name(run, resume_at))
    run_id = session.info.run_id
    for key, value in _keys(dataclasses.asdict(config)):
        client.log_param(run_id, key, json.dumps(value, default=str)[:LONGEST_PARAMETER])

    def write(step: int, values: Values) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    return Service(write, lambda: client.set_terminated(run_id))


LOGGERS: dict[str, Callable[[Path, Any, int | None], Logger]] = {
    "tensorboard": TensorBoard,
    "csv": Csv,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def open_loggers(run: Path, config: Any, resume_at: int | None) -> list[Logger]:
    """Returns the loggers of `train.loggers`.

    Raises:
        ConfigError: if there is no such logger, or it lacks `write` or `close`.
    """
    loggers: list[Logger] = []
    for name in config.train.loggers:
        if ":" not in name and name not in LOGGERS:
            raise ConfigError(
                f"train.loggers: there is no logger {name!r}; known are {', '.join(LOGGERS)}, and MODULE:NAME"
            )
        make = LOGGERS.get(name) or load_named(name, ConfigError)
        logger = make(run, config, resume_at)
        missing = [part for part in ("write", "close") if not callable(getattr(logger, part, None))]
        if missing:
            raise ConfigError(
                f"train.loggers: {name} returned a {type(logger).__name__} without {' and '.join(missing)}"
            )
        loggers.append(logger)
    return loggers
