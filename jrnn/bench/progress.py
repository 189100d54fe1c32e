"""What a measurement is doing: a bar on a terminal, and elsewhere a line whenever nothing was printed for some seconds."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jrnn.printable import printable
from jrnn.train.progress import Heartbeat


class Bar:
    """Shows how many of `total` parts of some work are done."""

    def __init__(self, console: Console, total: int):
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._beat = None if console.is_terminal else Heartbeat(console, "starting")

    def doing(self, what: str) -> None:
        """Shows what goes on."""
        self._bar.update(self._task, description=printable(what))
        if self._beat is not None:
            self._beat.doing(what)

    def advance(self, parts: int = 1) -> None:
        """Counts parts that are done."""
        self._bar.advance(self._task, parts)

    def extend(self, parts: int) -> None:
        """Adds parts that are to be done."""
        self._bar.update(self._task, total=self._bar.tasks[0].total + parts)

    def __enter__(self) -> Bar:
        self._bar.start()
        if self._beat is not None:
            self._beat.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._beat is not None:
            self._beat.__exit__(*exc)
        self._bar.stop()
