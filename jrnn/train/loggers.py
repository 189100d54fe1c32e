"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, or a service of the user's choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jrnn.convert.named import load_named
from jrnn.errors import ConfigError, needs_extra, printable


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

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Called when the run ends, in whatever way."""
        ...


class TensorBoard:
    """Events for TensorBoard, in the folder `tensorboard` of the run; those after the step to continue from are hidden."""

    def __init__(self, run: Path, config: Any, resume_at: int | None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(needs_extra("train.loggers: tensorboard", "tensorboard")) from None
        purge = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(printable(name), value, step)

    def close(self) -> None:
        self._writer.close()


LOGGERS: dict[str, Callable[[Path, Any, int | None], Logger]] = {"tensorboard": TensorBoard}


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
