"""The work of a pass, counted: questions about primitives, which all passes ask of each equation that they read.

A count is the same on every machine, where seconds are not. `metered` bounds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OFTEN = 1024  # questions between two calls of `observe`


class TooMuchWork(Exception):
    """Raised by the question after the last one that a meter allows, and by each one that follows."""


class _Meter(threading.local):
    """The questions of a thread.

    Attributes:
        limit: how many are allowed, or None where they are not counted.
        asked: how many were asked.
        observe: is called now and then.
    """

    limit: int | None = None
    asked: int = 0
    observe: Callable[[], None] | None = None


_meter = _Meter()


def count() -> None:
    """Counts a question."""
    limit = _meter.limit
    if limit is None:
        return
    _meter.asked += 1
    if _meter.asked > limit:
        raise TooMuchWork(f"planning it takes more than {limit} steps")
    if _meter.asked % _OFTEN == 0 and _meter.observe is not None:
        _meter.observe()


@contextmanager
def metered(limit: int, observe: Callable[[], None]) -> Iterator[None]:
    """Bounds the questions in this context. In a context inside of another one, the outer bound holds.

    Args:
        limit: how many questions are allowed.
        observe: is called now and then, for example to look at a clock.
    """
    if _meter.limit is not None:
        yield
        return
    _meter.limit = limit
    _meter.asked = 0
    _meter.observe = observe
    try:
        yield
    finally:
        _meter.limit = None
        _meter.observe = None
