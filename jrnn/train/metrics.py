"""What a run reports: metrics.jsonl for programs, events for TensorBoard, a progress line for people."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jrnn.errors import ConfigError, TrainError
from jrnn.train.heartbeat import MEASURED, Forecast, Heartbeat, duration
from jrnn.train.settings import parse_json


class MetricsFile:
    """Appends one JSON object a line; every line carries the step it belongs to."""

    def __init__(self, path: Path, resume_at: int | None = None, board: Board | None = None):
        """Starts anew, or (`resume_at`) keeps the lines up to that step: the rest is about to be measured again."""
        self._board = board
        kept = []
        if resume_at is not None and path.exists():
            kept = [line for line in _lines(path) if _step(line) <= resume_at]
        with _reporting(path):
            path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: Any) -> None:
        """Writes a line.

        Raises:
            TrainError: where it cannot be written.
        """
        with _reporting(Path(self._file.name)):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            self._board.write(step, **values)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # what could not be written has been told
            self._file.close()
        if self._board is not None:
            self._board.close()


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise TrainError(f"{path}: cannot be written: {e.strerror}; what the last checkpoint holds is safe") from None


class Board:
    """Writes scalars as TensorBoard's events, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, resume_at: int | None = None):
        """`resume_at`: what is there of later steps is no longer shown.

        Raises:
            ConfigError: where tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "train.tensorboard needs tensorboardX: pip install 'jrnn[tensorboard]', or leave it out"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)

    def write(self, step: int, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _step(line: str) -> float:
    """The step of a line; infinite for one that was cut off when the process was killed."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, (int, float)) else math.inf


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file."""
    return [json.loads(line) for line in _lines(path) if _step(line) < math.inf]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def describe(loss: float, unit: str, metrics: Mapping[str, float]) -> str:
    """A validation in words.

    >>> describe(0.25, "nats", {"accuracy": 0.9})
    'validation loss 0.2500 nats, accuracy 0.9'
    """
    others = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
    return f"validation loss {loss:.4f} {unit}{others}"


class Report:
    """The progress line, and the lines that stay above it."""

    def __init__(self, beat: Heartbeat, steps: int, done: int):
        console = beat.console
        self._beat = beat
        self._is_shown = console.is_terminal  # the progress line
        self._steps = steps
        self._forecast = Forecast(done, steps)
        self._last = f"step {done} of {steps}"
        self._predicted = False
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,  # in a log file, only the lines that stay
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, loss="-", speed="-")

    def __enter__(self) -> Report:
        self._beat.doing(self._status)
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float, speed: str) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
        self._forecast.update(step, time.monotonic())
        self._last = f"step {step} of {self._steps}: loss {loss:.3f}, {speed}"
        if self._is_shown:
            self._beat.heard()
        if not self._predicted and self._forecast.measured >= MEASURED:
            self.say(self._status())

    def _status(self) -> str:
        left = self._forecast.remaining()
        self._predicted |= left is not None
        return self._last if left is None else f"{self._last}, about {duration(left)} to go"

    def say(self, text: str) -> None:
        self._beat.say(text)
