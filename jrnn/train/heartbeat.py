"""Signs of life: a line where nothing else was printed for a while, and the time that a run will take, measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

SILENCE = 7.0  # seconds without a word, after which one is said
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
