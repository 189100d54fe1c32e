"""Where the time of a run goes: seconds by what they are spent on, and traces of JAX's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax


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
