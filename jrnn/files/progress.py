"""What a long work shows while it runs: a heartbeat, a progress line, the time left, and where the time went."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from jrnn.errors import printable

SILENCE = 7.0  # seconds without a line, after which the heartbeat prints one
MEASURED = 3.0  # seconds of steps after which the time of a run is predicted


class Heartbeat:
    """Prints what goes on, from its own thread, whenever nothing else was printed for some seconds."""

    def __init__(self, console: Console, what: str):
        """`what`: see `doing`."""
        self.console = console
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jrnn-heartbeat", daemon=True)
        self.heard()
        self.doing(what)

    def doing(self, what: str | Callable[[], str]) -> None:
        """Sets what the heartbeat prints: what goes on and for how long, or what the function returns."""
        self._what = what
        self._since = monotonic()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Replaces what goes on within a `with` block."""
        before = self._what
        since = self._since
        self.doing(what)
        try:
            yield
        finally:
            self._what = before
            self._since = since

    def heard(self) -> None:
        """Notes that something was printed."""
        self._last = monotonic()

    def say(self, text: str) -> None:
        """Prints a line."""
        with self._lock:
            self.console.print(
                printable(text, lines=True), markup=False, highlight=False, soft_wrap=True
            )
            self.heard()

    def _run(self) -> None:
        while not self._end.wait(0.5):
            self.check()

    def check(self) -> None:
        """Prints what goes on if nothing was printed for too long."""
        if monotonic() - self._last >= SILENCE:
            what = self._what
            if callable(what):
                self.say(what())
            else:
                self.say(f"{what}: {monotonic() - self._since:.0f} s so far")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def duration(seconds: float) -> str:
    """Returns seconds in words.

    >>> [duration(s) for s in (4.4, 89.0, 91.0, 3600.0, 9000.0)]
    ['4 s', '89 s', '2 min', '60 min', '2.5 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class RunProgress:
    """The progress line of a run, and the lines that stay above it."""

    def __init__(self, beat: Heartbeat, steps: int, done: int):
        console = beat.console
        self._beat = beat
        self._steps = steps
        self._last = f"step {done} of {steps}"
        # The first step whose end was measured, and when that was.
        self._first: tuple[int, float] | None = None
        self._left = math.nan  # seconds
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
            disable=not console.is_terminal,  # a log file has only the lines that stay
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=done, loss="-", speed="-"
        )

    def __enter__(self) -> RunProgress:
        self._beat.doing(self._status)
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float, speed: str) -> None:
        now = monotonic()
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
        if self._first is None:
            self._first = step, now  # the first call compiles, and is not counted
        begun, since = self._first
        if step > begun:
            self._left = (now - since) / (step - begun) * (self._steps - step)
        self._last = f"step {step} of {self._steps}: loss {loss:.3f}, {speed}"
        if self._beat.console.is_terminal:
            self._beat.heard()
        if not self._predicted and now - since >= MEASURED:
            self.say(self._status())

    def _status(self) -> str:
        self._predicted |= not math.isnan(self._left)
        if math.isnan(self._left):
            return self._last
        return f"{self._last}, about {duration(self._left)} to go"

    def say(self, text: str) -> None:
        self._beat.say(text)


class Clock:
    """Counts seconds by activity; `otherwise` gets the time outside of all activities.

    >>> clock = Clock("steps")
    >>> with clock("validation"):
    ...     pass
    >>> sorted(clock.seconds())
    ['steps', 'validation']
    """

    def __init__(self, otherwise: str):
        self._otherwise = otherwise
        self._begun = perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Counts the time of a `with` block."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.add(what, perf_counter() - begun)

    def add(self, what: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def claim(self, what: str) -> None:
        """Counts as `what` all time that nothing else has claimed so far."""
        self.add(what, self.seconds()[self._otherwise])

    def seconds(self) -> dict[str, float]:
        """Returns what was spent since the clock was made."""
        total = perf_counter() - self._begun
        return {self._otherwise: total - sum(self._spent.values()), **self._spent}

    def table(self, *once: str) -> str:
        """Returns a line for each name, with its share of the time; the names `once` do not count for shares."""
        seconds = self.seconds()
        total = sum(spent for name, spent in seconds.items() if name not in once)
        rows = []
        for name, spent in seconds.items():
            share = "" if name in once or not total else f"{spent / total:8.2%}"
            rows.append(f"  {name:28} {spent:8.2f} s{share}")
        return "\n".join(rows)


class Trace:
    """A trace of a few calls by JAX's profiler, for TensorBoard, XProf or ui.perfetto.dev; none without a folder.

    The first call compiles, and the second may still find cold caches: the trace begins after both.
    """

    # calls
    BEGIN = 2
    END = 4

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._calls = 0
        self._runs = False

    def is_due(self) -> bool:
        """Counts a call; returns whether the trace begins or ends after it: wait for its result, then `begin_or_end`."""
        self._calls += 1
        return self.folder is not None and self._calls in (self.BEGIN, self.END)

    def begin_or_end(self) -> None:
        if self._runs:
            self._stop()
        else:
            jax.profiler.start_trace(str(self.folder))
            self._runs = True

    def _stop(self) -> None:
        if self._runs:
            jax.profiler.stop_trace()
            self._runs = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()  # a run may be shorter
