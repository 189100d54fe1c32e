"""The interface of tasks, each of which joins data, a model and metrics; and the record of a kind of task.

A batch is a NamedTuple of arrays, of the same shapes at every step. One member is `fresh`, bool []: whether the state that
is carried from batch to batch starts anew. Tasks of independent examples have an empty state, and `fresh` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jrnn.train.models.model import Model, Params


class Batch(Protocol):
    """A NamedTuple of arrays."""

    @property
    def fresh(self) -> Any: ...

    def _asdict(self) -> dict[str, Any]: ...


class Batches(Protocol):
    """What is trained on: a batch is a function of the step's number alone, so that resuming needs no state."""

    def at(self, step: int) -> Batch: ...


class Task(Protocol):
    """Data made ready, the model for them, and how both are measured."""

    model: Model
    train: Batches
    axes: Mapping[str, int]  # the axis of each member of a batch that holds the examples; the other members are shared
    items: int  # tokens or examples that a step reads, for the report of speed
    item: str  # what those are: "tokens", "examples"
    unit: str  # what a loss is measured in: "nats a character", "mean squared error"

    def validation(self) -> Sequence[Batch]:
        """Batches that are never trained on, the same each time; the state is carried from one to the next."""
        ...

    def evaluate(self, params: Params, loss: float) -> dict[str, float]:
        """The task's own metrics on the validation data, besides the validation loss, which is given."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What a run must keep to use its model later, and to tell whether the data are the same: plain JSON."""
        ...


@dataclass(frozen=True)
class Trained:
    """A trained model: the `Config` and the fingerprint of its run, and its parameters."""

    config: Any
    fingerprint: Mapping[str, Any]
    model: Model
    params: Params


@dataclass(frozen=True)
class TaskKind:
    """A kind of task. A configuration chooses it with `task = "name"`, or `task = "MODULE:NAME"` for one of your own.

    Attributes:
        data: the dataclass of its table [data], which has at least `batch`: the examples side by side in a batch.
        models: the dataclasses of its table [model], by `model.kind`; the first is the default.
        load: makes the task from a `Config`; raises DataError where the data cannot be used.
        model: the same task's model alone, from the `Config` and the fingerprint, without the data.
        sample: the dataclass of its table [sample]; None where its models write nothing.
        write: what a trained model writes, as the table [sample] of its config says, drawn with a seed. Raises DataError
            where [sample] cannot be followed.
    """

    name: str
    data: type
    models: Mapping[str, type]
    load: Callable[[Any], Task]
    model: Callable[[Any, Mapping[str, Any]], Model]
    sample: type | None = None
    write: Callable[[Trained, int], str] | None = None
