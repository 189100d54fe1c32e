"""What a run prints: a progress line, a heartbeat, the time left, and where the time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SILENCE = 7.0  # seconds without a line, after which a sign of life is printed
MEASURED = 3.0  # seconds of steps from which the time of a run is predicted


class Heartbeat:
    """Prints what goes on, from a thread of its own, where nothing else was printed for some seconds."""

    def __init__(self, console: Console, what: str, silence: float | None = None):
        """`what` goes on; see `doing`. silence: seconds without a word, by default SILENCE."""
        self.console = console
        self._silence = SILENCE if silence is None else silence
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jrnn-heartbeat", daemon=True)
        self.doing(what)
        self.heard()

    def doing(self, what: str | Callable[[], str]) -> None:
        """Says from now on that this goes on, and for how long; or what the function returns."""
        self._what, self._since = what, time.monotonic()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Says so within a `with` block, and afterwards what was said before."""
        before, since = self._what, self._since
        self.doing(what)
        try:
            yield
        finally:
            self._what, self._since = before, since

    def heard(self) -> None:
        """Something was printed."""
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line."""
        with self._lock:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            self.heard()

    def _run(self) -> None:
        while not self._end.wait(min(0.5, self._silence / 4)):
            if time.monotonic() - self._last >= self._silence:
                what = self._what
                self.say(what() if callable(what) else f"{what}: {time.monotonic() - self._since:.0f} s so far")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


class Forecast:
    """How long a run will take, from the time that its steps took so far, with what stands between them."""

    def __init__(self, step: int, steps: int):
        """The run is at `step` of `steps`."""
        self._steps = steps
        self._from = self._at = step
        self._begun: float | None = None
        self._now = 0.0

    def update(self, step: int, now: float) -> None:
        """Step `step` has been done at the time `now`; the first one to be told compiled, and is not counted."""
        if self._begun is None:
            self._begun, self._from = now, step
        self._at, self._now = step, now

    @property
    def measured(self) -> float:
        """Seconds of steps that were measured."""
        return 0.0 if self._begun is None else self._now - self._begun

    def remaining(self) -> float | None:
        """Seconds until the last step; None where nothing has been measured.

        >>> forecast = Forecast(0, 100)
        >>> forecast.update(10, 5.0), forecast.update(20, 7.0)
        (None, None)
        >>> forecast.remaining()
        16.0
        """
        done = self._at - self._from
        return self.measured / done * (self._steps - self._at) if done else None


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> [duration(s) for s in (4.4, 89.0, 91.0, 3600.0, 9000.0)]
    ['4 s', '89 s', '2 min', '60 min', '2.5 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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


class Clock:
    """Seconds by what they are spent on; time that nothing else claims is that of `otherwise`.

    >>> clock = Clock("steps")
    >>> with clock("validation"):
    ...     pass
    >>> sorted(clock.seconds())
    ['steps', 'validation']
    """

    def __init__(self, otherwise: str):
        self._otherwise = otherwise
        self._begun = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Counts the time of a `with` block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - begun)

    def add(self, what: str, seconds: float) -> None:
        """Counts time that has been measured."""
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def claim(self, what: str) -> None:
        """Counts as `what` the time that nothing else has claimed so far."""
        self.add(what, self.seconds()[self._otherwise])

    def seconds(self) -> dict[str, float]:
        """What was spent since the clock was made."""
        total = time.perf_counter() - self._begun
        return {self._otherwise: total - sum(self._spent.values()), **self._spent}

    def table(self, *once: str) -> str:
        """A line for each thing, with its share of the time that is not spent on what happens only `once`."""
        found = self.seconds()
        total = sum(spent for name, spent in found.items() if name not in once)
        rows = []
        for name, spent in found.items():
            share = "" if name in once or not total else f"{spent / total:8.2%}"
            rows.append(f"  {name:28} {spent:8.2f} s{share}")
        return "\n".join(rows)


class Trace:
    """A trace by JAX's profiler of a few calls, for TensorBoard, XProf or ui.perfetto.dev.

    The first call compiles, and the second may still find cold caches: the trace begins after both.
    """

    BEGIN, END = 2, 4  # calls

    def __init__(self, folder: Path):
        self.folder = folder
        self._calls = 0
        self._runs = False

    def after_call(self, result: Any) -> bool:
        """To be told after each call; `result` is what the call computes. True where it was waited for."""
        self._calls += 1
        if self._calls not in (self.BEGIN, self.END):
            return False
        jax.block_until_ready(result)
        if self._calls == self.BEGIN:
            jax.profiler.start_trace(str(self.folder))
            self._runs = True
        else:
            self._stop()
        return True

    def _stop(self) -> None:
        if self._runs:
            jax.profiler.stop_trace()
            self._runs = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()  # a run may be shorter
