"""Observers of lowered loops: `explain` collects their plans or subscribes to them, and the log `jrnn.loops` subscribes."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import current_lines, hide_lines_of
from jrnn.jaxprs.work import TooMuchWork
from jrnn.loops.ir.loop import strict_passes

OURS = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
for _folder in ("loops", "jaxprs"):  # plans show the user's lines instead
    hide_lines_of(str(Path(__file__).parents[2] / _folder))
MAX_FRAMES = 200  # of a traceback, from the loop outwards

LOG = logging.getLogger("jrnn.loops")
_logged: set[Hashable] = set()  # the kinds of reasons that were warnings

# The list that collects the plans of lowered loops, or None.
_collector = jax.make_user_context(None)

_INSIDE = "inside of JAX, such as the rounds of jax.random"

Plan = Any  # `jrnn.loops.plan.Plan`, which is defined in terms of this module
PlanOrNote = Any
Place = tuple[str, str]  # see `current_place`
_NOWHERE = ("", "")  # of a note from a step: it is of the loop that is lowered next


class Plans(list[Plan]):
    """Plans of lowered loops.

    It is hashed and compared by identity, because JAX uses it in keys of its caches.

    Attributes:
        places: where each loop is.
        notes_at: by place, reasons why loops were differentiated step by step, and the like.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self) -> None:
        super().__init__()
        self.caller: Place = _NOWHERE  # the place of loops that are called by nobody's code
        self.places: list[Place] = []
        self.notes_at: dict[Place, list[str]] = {}
        self.lock = threading.Lock()

    @property
    def notes(self) -> list[str]:
        """All notes, each once."""
        return list(dict.fromkeys(note for notes in self.notes_at.values() for note in notes))

    def record(self, what: PlanOrNote) -> None:
        """Adds a plan or a note, where JAX's source information is the loop's."""
        place = current_place()
        with self.lock:
            if not isinstance(what, str):
                place = place if any(place) else self.caller
                self.append(what)
                self.places.append(place)
                unplaced = self.notes_at.pop(_NOWHERE, [])
                self.notes_at.setdefault(place, []).extend(unplaced)
            elif what not in self.notes_at.setdefault(place, []):
                self.notes_at[place].append(what)


def _log(what: PlanOrNote) -> None:
    if LOG.isEnabledFor(logging.DEBUG):
        text = what if isinstance(what, str) else what.text()
        LOG.debug("%s: %s", place_text(current_place()), text)


# Functions of a plan or a note. They are called from all threads, where JAX's source information is the loop's.
subscribers: list[Callable[[PlanOrNote], None]] = [_log]


@contextmanager
def collected() -> Iterator[Plans]:
    """Collects the plans of the loops that are lowered in this context. Subscribers do not get them."""
    plans = Plans()
    with _collector(plans):
        yield plans


def has_observers() -> bool:
    """Returns whether anything records what is lowered."""
    return _collector.value is not None or len(subscribers) > 1 or LOG.isEnabledFor(logging.DEBUG)


def notify(what: PlanOrNote) -> None:
    """Adds the plan of a loop that is lowered, or a note."""
    plans = _collector.value
    if plans is not None:
        plans.record(what)
        return
    for subscriber in tuple(subscribers):
        subscriber(what)


def notify_plan(plan: Plan) -> None:
    """Notifies observers of a plan, if there are any, with how long it compiles."""
    if has_observers():
        notify(plan.with_compilation())


def attempt(where: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function of ours returns, or None if it raises what it should not. A ScanError is for the caller."""
    try:
        return fn(*args)
    except ScanError:
        raise
    except TooMuchWork as why:
        notify(f"left to JAX{where}: {why}")
        return None
    except Exception as error:
        report_unexpected(error, where)
        return None


def report_unexpected(error: Exception, where: str = "") -> str:
    """Returns an error of ours as the reason why a loop is left to JAX. Raises it in tests.

    The first of its kind is a warning in the log `jrnn.loops`: a version of JAX that jrnn does not know may make it slow.
    """
    if strict_passes.value:
        raise error
    reason = f"{type(error).__name__}{where} (please report it): {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    warn_once((type(error), *((f.filename, f.lineno) for f in frame)), reason)
    return reason


def warn_once(kind: Hashable, reason: str) -> None:
    """Logs why a loop falls back to what JAX does, where that was not foreseen, unless it was logged for another loop."""
    if kind not in _logged:
        _logged.add(kind)
        LOG.warning(
            "%s: a loop falls back to what JAX does (jax %s): %s",
            place_text(current_place()),
            jax.__version__,
            reason,
        )


def place_text(place: Place) -> str:
    """Returns a place as text."""
    where, caller = place
    where = where or _INSIDE
    return f"{where}, from {caller}" if caller else where


def current_place() -> Place:
    """Returns where the loop is that JAX works on, and the line of the user's own code that led there, if that is elsewhere.

    A loop in an installed package has both; for a loop in the user's own code the second is "".
    """
    inwards = current_lines(MAX_FRAMES)
    frames = [frame for frame in inwards if not frame.startswith(OURS)]
    where = next(iter(frames or inwards), "")  # a line of jrnn itself in `jrnn train`
    user_line = ""
    if _INSTALLED in where:
        user_line = next((frame for frame in frames if _INSTALLED not in frame), "")
    return short_path(where), short_path(user_line)


def short_path(frame: str) -> str:
    """Returns a line of code relative to the working directory or to site-packages."""
    return frame.removeprefix(os.getcwd() + os.sep).rpartition(_INSTALLED)[2]
