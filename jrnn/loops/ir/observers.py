"""Observers of lowered loops: `explain` collects their plans, and `report` and the log subscribe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util

from jrnn.loops.ir.loop import strict_passes

OURS = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
source_info_util.register_exclusion(str(Path(__file__).parents[1]))  # plans show the user's lines instead
_FRAMES = 200  # of a traceback, from the loop outwards

# The list that collects the plans of lowered loops, or None.
_collector = jax.make_user_context(None)

# Functions of a plan or a note. They hear of all threads, and are called where JAX's source information is the loop's.
listeners: list[Callable[[Any], None]] = []


class Plans(list):
    """Plans, and notes: reasons why loops were differentiated step by step.

    It is hashed and compared by identity, because JAX uses it in keys of its caches.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


@contextmanager
def collected() -> Iterator[Plans]:
    """Collects the plans of the loops that are lowered in this context. Listeners do not hear of these."""
    plans = Plans()
    with _collector(plans):
        yield plans


def notify(plan: Any) -> None:
    """Adds the plan of a loop that is lowered."""
    if _collector.value is not None:
        _collector.value.append(plan)
    else:
        _tell(plan)


def note(text: str) -> None:
    """Adds a note, unless it was made before."""
    if _collector.value is None:
        _tell(text)
    elif text not in _collector.value.notes:
        _collector.value.notes.append(text)


def unexpected(error: Exception, where: str = "") -> str:
    """Returns an error of ours as the reason why a loop is left to JAX. Raises it in tests."""
    if strict_passes.value:
        raise error
    return f"{type(error).__name__}{where} (please report it): {error}"


def _tell(what: Any) -> None:
    for listener in tuple(listeners):
        listener(what)


def places() -> tuple[str, str]:
    """Returns where the loop is that JAX works on, and the line of the user's own code that led there, if that is elsewhere.

    A loop in an installed package has both; for a loop in the user's own code the second is "".
    """
    # As FILE:LINE (FUNCTION), the outermost first.
    text = source_info_util.summarize(source_info_util.current(), _FRAMES)
    inwards = text.splitlines()[::-1]
    frames = [frame for frame in inwards if not frame.startswith(OURS)]
    where = next(iter(frames or inwards), "")  # a line of jrnn itself in `jrnn train`
    own = next((frame for frame in frames if _INSTALLED not in frame), "") if _INSTALLED in where else ""
    return short(where), short(own)


def short(frame: str) -> str:
    """Returns a line of code relative to the working directory or to site-packages."""
    return frame.removeprefix(os.getcwd() + os.sep).rpartition(_INSTALLED)[2]
