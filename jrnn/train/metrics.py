"""The metrics of a run: their files, loggers, steps that are not finite, and early stopping."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np

from jrnn.errors import DataError, TrainError, describe_value
from jrnn.files import AtLeast, append_to, checked, kind_of, parse_json, read_file, write_whole
from jrnn.files.reading import free
from jrnn.train.config import TrainConfig
from jrnn.train.loggers import Logger, Values
from jrnn.train.step import Measured
from jrnn.train.tasks import Task
from jrnn.train.tasks.task import Metrics
from jrnn.train.toml_codec import Tables

_OF_TRAINING = ("step", "loss", "gradient_norm", "items_per_second", "refused", "validation_loss")
Step = Annotated[int, AtLeast(0, 2**63 - 1)]  # the number of a step in a file
SAFE = "what the last checkpoint holds is safe"  # how the message of a failed write ends
LIMIT = "train.loss_limit"
MOST_SKIPS = 100  # steps skipped in a row, after which a run ends


class MetricsFile:
    """Appends one JSON object a line; each has its step. `loggers` get the same numbers."""

    def __init__(self, path: Path, resume_at: int | None = None, loggers: Sequence[Logger] = ()):
        """Starts a new file, or keeps the lines up to step `resume_at`: the steps after it will be measured again."""
        self._loggers = loggers
        kept = []
        if resume_at is not None:
            for line, record in _whole_lines(path):
                if record["step"] <= resume_at:
                    kept.append(f"{line}\n")
        write_whole(path, "".join(kept).encode(), TrainError)
        self._file: TextIO = append_to(path, TrainError)

    def write(self, step: int, **values: Any) -> None:
        """Writes a line; raises TrainError if it cannot."""
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as e:
            raise TrainError(
                f"{self._file.name}: cannot be written: {e.strerror}; {SAFE}"
            ) from None
        numbers = {}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                numbers[name] = float(value)
        for logger in self._loggers if numbers else ():
            logger.write(step, numbers)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # `write` has raised it already
            self._file.close()
        for logger in self._loggers:
            logger.close()


def read_metrics(path: Path) -> list[Tables]:
    """Returns the complete lines of a metrics file; none if there is no file. Raises DataError if it cannot be read."""
    return [record for _, record in _whole_lines(path)]


def read_validations(path: Path) -> dict[int, float]:
    """Returns the validation losses of a metrics file by their steps, ascending."""
    losses = {}
    for record in read_metrics(path):
        loss = record.get("validation_loss")
        if isinstance(loss, (int, float)):
            losses[record["step"]] = float(loss)
    return dict(sorted(losses.items()))


def best_first(steps: Iterable[int], losses: Mapping[int, float]) -> list[int]:
    """Returns steps by their validation losses, the smallest and earliest first; steps without a loss come last.

    >>> best_first([10, 20, 30, 40, 50], {10: 2.0, 20: 1.0, 30: 1.0, 40: float("nan")})
    [20, 30, 10, 50, 40]
    """

    def rank(step: int) -> tuple[float, int]:
        loss = losses.get(step, math.inf)
        return (loss, step) if loss < math.inf else (math.inf, -step)

    return sorted(steps, key=rank)


def _whole_lines(path: Path) -> Iterator[tuple[str, Tables]]:
    """Yields lines and their records, except for lines that were cut off when the process was killed."""
    if not kind_of(path):
        return
    for line in read_file(path, DataError, free()).decode("utf-8", "replace").split("\n"):
        try:
            values = parse_json(line, "", DataError, finite=False)
            checked(Step, values["step"], "", DataError)
        except (DataError, LookupError, TypeError):
            continue
        yield line, values


def own(values: Any, where: str) -> Metrics:
    """Returns the metrics that a function of a user returned, as Python numbers.

    Raises:
        DataError: if they are no dict of numbers by name, or a name is one that training itself measures.

    >>> own({"accuracy": np.float32(0.5)}, "mine")
    {'accuracy': 0.5}
    """
    if not isinstance(values, Mapping):
        raise DataError(
            f"{where}: returned a {type(values).__name__}; it must return a dict of numbers by name"
        )
    for name, value in values.items():
        if not isinstance(name, str) or name in _OF_TRAINING:
            raise DataError(
                f"{where}: a metric cannot be named {name!r}; give it a str that is not in {_OF_TRAINING}"
            )
        if np.ndim(value) or np.asarray(value).dtype.kind not in "biuf":
            raise DataError(
                f"{where}: the metric {name!r} is {describe_value(value)}; it must be one number"
            )
    return {name: float(value) for name, value in values.items()}


def describe(loss: float, unit: str, metrics: Values) -> str:
    """Returns a validation in words.

    >>> describe(0.25, "nats", {"accuracy": 0.9})
    'validation loss 0.2500 nats, accuracy 0.9'
    """
    text = f"validation loss {loss:.4f} {unit}"
    for name, value in metrics.items():
        text += f", {name.replace('_', ' ')} {value:.4g}"
    return text


@dataclass
class Patience:
    """Counts validations without a better loss.

    >>> patience = Patience(2)
    >>> [patience.see(loss) for loss in (3.0, 2.0, 2.5, 2.1)], patience.is_over
    ([True, True, False, False], True)
    """

    limit: int  # the number of validations without a better loss after which patience is over; 0: never
    best: float = math.inf
    since: int = 0

    @classmethod
    def after(cls, limit: int, validations: Mapping[int, float], step: int) -> Patience:
        """Returns the patience of a run that has the parameters of the validation at `step`.

        If a later one was better, its parameters were not kept: patience was off then, and starts anew.

        >>> Patience.after(3, {10: 2.0, 20: 1.0, 30: 1.5}, 20)
        Patience(limit=3, best=1.0, since=1)
        """
        best = validations[step]
        later = [loss for at, loss in validations.items() if at > step]
        is_missed = any(loss < best for loss in later)
        return cls(limit, best, 0 if is_missed else len(later))

    def see(self, loss: float) -> bool:
        """Counts a validation, and returns whether its loss is the best so far."""
        if loss < self.best:
            self.best = loss
            self.since = 0
            return True
        self.since += 1
        return False

    @property
    def is_over(self) -> bool:
        return 0 < self.limit <= self.since


class NotFinite(Exception):
    """A step measured something that is not finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"step {step}: {what}")
        self.step = step


class Recorder:
    """Writes what each call measured while the next one runs, because fetching a result waits for its call."""

    def __init__(self, metrics: Any, report: Any, task: Task, config: TrainConfig):
        self._metrics = metrics
        self._report = report
        self._task = task
        self._config = config
        self._pending: tuple[int, int, Measured] | None = None
        self.skipped = self._in_a_row = 0
        self.refused = ""  # what was wrong with the latest step that was refused
        self.restart_clock()

    def restart_clock(self) -> None:
        self._since = time.perf_counter()

    def idle(self) -> float:
        """Returns an upper bound of the seconds for which the devices have been idle; 0 while a call runs."""
        running = self._pending is not None and not self._pending[2].loss.is_ready()
        return 0.0 if running else time.perf_counter() - self._since

    def record(self, step: int, n: int, measured: Measured) -> None:
        """Keeps the measurements of steps `step + 1` to `step + n`, and writes the previous ones."""
        self.flush()
        self._pending = (step, n, measured)

    def flush(self) -> None:
        """Writes the measurements that are kept; raises NotFinite for a step that ends the run."""
        if self._pending is None:
            return
        step, n, measured = self._pending
        self._pending = None
        losses, norms, bad = (np.asarray(values)[:n] for values in measured)  # waits for the call
        now = time.perf_counter()
        speed = n * self._task.items / (now - self._since)
        self._since = now
        for k in range(n):
            loss = float(losses[k])
            norm = float(norms[k])
            timing = {"items_per_second": round(speed)} if k == n - 1 else {}
            if bad[k]:
                self._refuse(step + k + 1, loss, norm)
            else:
                self._in_a_row = 0
                self._metrics.write(step + k + 1, loss=loss, gradient_norm=norm, **timing)
        if not bad.all():
            self._report.update(
                step + n, float(np.mean(losses[~bad])), f"{speed:,.0f} {self._task.item}/s"
            )

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        limit = self._config.loss_limit
        is_above = 0 < limit < loss < math.inf
        above = f", above {LIMIT} = {limit:g}" if is_above else ""
        what = f"the loss is {loss:g}{above}, the gradient's norm {norm:g}"
        if math.isfinite(norm) and math.isfinite(loss) and not is_above:
            what += ", the update of the parameters not finite"
        self.refused = what
        self._metrics.write(step, refused=what)
        self.skipped = self.skipped + 1
        self._in_a_row = self._in_a_row + 1
        if self._config.on_nan == "stop":
            raise NotFinite(step, what)
        self._report.say(f"step {step}: {what}; skipped")
        if self._in_a_row == MOST_SKIPS:
            raise NotFinite(step, f"{what}, and so were the {MOST_SKIPS - 1} steps before it")
