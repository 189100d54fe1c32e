"""The kinds of tasks, by the name that a config gives: a new kind is one file, and one line here."""

from .adding import ADDING
from .classification import CLASSIFICATION
from .forecast import FORECAST
from .language import CHARACTERS, WORDS
from .seq2seq import SEQ2SEQ
from .task import Batch, Batches, Task, TaskKind, Trained

KINDS: dict[str, TaskKind] = {
    kind.name: kind for kind in (CHARACTERS, WORDS, CLASSIFICATION, ADDING, FORECAST, SEQ2SEQ)
}

__all__ = [
    "ADDING",
    "CHARACTERS",
    "CLASSIFICATION",
    "FORECAST",
    "KINDS",
    "SEQ2SEQ",
    "WORDS",
    "Batch",
    "Batches",
    "Task",
    "TaskKind",
    "Trained",
]
