"""What is heard of the loops that are lowered: the plans that `explain` collects, and what reports and the log are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

# The list that collects the plans of lowered loops, or None.
_recorder = jax.make_user_context(None)

# Functions of a plan or a note. They hear of all threads, and are called where JAX's source information is the loop's.
listeners: list[Callable[[Any], None]] = []


class Plans(list):
    """A list that is hashed and compared by identity, because JAX uses it in keys of its caches.

    Attributes:
        notes: reasons why loops were differentiated step by step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@contextmanager
def recorded() -> Iterator[Plans]:
    """Collects the plans of the loops that are lowered in this context. Listeners do not hear of these."""
    plans = Plans()
    with _recorder(plans):
        yield plans


def record(plan: Any) -> None:
    """Adds the plan of a loop that is lowered."""
    if _recorder.value is not None:
        _recorder.value.append(plan)
    else:
        _tell(plan)


def note(text: str) -> None:
    """Adds a note, unless it was made before."""
    if _recorder.value is None:
        _tell(text)
    elif text not in _recorder.value.notes:
        _recorder.value.notes.append(text)


def _tell(what: Any) -> None:
    for listener in tuple(listeners):
        listener(what)
