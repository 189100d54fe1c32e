"""The kinds of tasks, by the name that a config gives: a new kind is one file, and one line here."""

from .language import CHARACTERS
from .task import Batch, Batches, Task, TaskKind, Trained

KINDS: dict[str, TaskKind] = {kind.name: kind for kind in (CHARACTERS,)}
