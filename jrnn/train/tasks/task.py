"""The interface of tasks, which join data, a model and metrics; and the shared part of tasks of independent examples.

A batch is a NamedTuple of arrays, of the same shapes at every step. Its member `fresh`, bool [], says whether the state that
is carried from batch to batch restarts. Tasks of independent examples carry no state, and `fresh` is true.

Shapes: T steps, B examples in a batch, D features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import CheckpointError, DataError
from jrnn.files import checked
from jrnn.nn.span import along_last
from jrnn.train.models import Model, Params

# What a run keeps of its data, as plain JSON; see `Task.fingerprint`.
Kept = dict[str, Any]
# Functions from inputs in the data's units to the model's, and from the model's outputs to the data's units.
Units = tuple[Callable[[Any], Any], Callable[[Any], Any]]
# A key of fingerprints: texts of files next to the weights; they may change.
COMPANIONS = "companion files"
Axes = Mapping[str, int]  # the axis of the examples in each member of a batch that has one
Metrics = dict[str, float]


class Batch(Protocol):
    """A NamedTuple of arrays."""

    @property
    def fresh(self) -> Any: ...

    def _asdict(self) -> Kept: ...


class Batches(Protocol):
    """The batches to train on. A batch is a function of the step's number alone, so that resuming needs no state."""

    def at(self, step: int) -> Batch: ...


class Task(Protocol):
    """Data made ready, the model for them, and how both are measured."""

    model: Model
    train: Batches
    # The axis of the examples in each member of a batch; the other members are shared.
    axes: Axes
    item: str = "examples"  # or "tokens"
    unit: str  # the unit of the loss, as "nats a character" or "mean squared error"

    @property
    def items(self) -> int:
        """Tokens or examples that a step reads, for the report of speed."""
        return self.train.batch  # type: ignore[attr-defined]

    def validation(self) -> Sequence[Batch]:
        """Returns batches that are never trained on, the same each time; the state is carried from one to the next."""
        ...

    def evaluate(self, params: Params, loss: float) -> Metrics:
        """Returns the task's own metrics on the validation data; `loss` is the validation loss."""
        return {}

    def fingerprint(self) -> Kept:
        """Returns what a run must keep to use its model later and to detect changed data, as plain JSON."""
        return {}


def check_task(config: Any, task: Any) -> None:
    """Raises DataError if a task lacks a part of `Task`, or its examples do not fit it; for tasks of users."""
    known = (
        "model",
        "train",
        "axes",
        "items",
        "item",
        "unit",
        "validation",
        "evaluate",
        "fingerprint",
    )
    missing = [name for name in known if not hasattr(task, name)]
    if missing:
        raise DataError(
            f"task {config.task!r} lacks {', '.join(missing)}; a task has {', '.join(known)}"
        )
    first = task.train.at(0)
    members = first._asdict()
    for name, axis in task.axes.items():
        value = members.get(name)
        shape = np.shape(value)
        if value is not None and (len(shape) <= axis or shape[axis] != config.data.batch):
            raise DataError(
                f"task {config.task!r}: {name} of the first batch is {list(shape)}; axis {axis}, which task.axes "
                f"names, must have data.batch = {config.data.batch} examples"
            )
    for name, value in members.items():
        if value is not None and np.asarray(value).dtype.kind in "OSU":
            raise DataError(
                f"task {config.task!r}: {name} are {np.asarray(value).dtype}; they must be numbers"
            )
    signature = getattr(task.model, "signature", None)
    if signature is None:
        return
    losses = ("cross_entropy", "squared_error")
    if signature.loss not in losses:
        raise DataError(
            f"task {config.task!r}: signature.loss is {signature.loss!r}; it must be one of {', '.join(losses)}"
        )
    if signature.loss == "cross_entropy":
        everything = getattr(task.train, "all", None)
        for batch in (first, everything, *task.validation()):
            targets = getattr(batch, "targets", None)
            if targets is not None:
                _check_classes(f"task {config.task!r}", np.asarray(targets), signature.outputs)


def _check_classes(where: str, targets: np.ndarray, count: int) -> None:
    if targets.dtype.kind not in "iu":
        raise DataError(
            f"{where}: targets are {targets.dtype}; cross_entropy needs integers, the classes"
        )
    if targets.size and not 0 <= targets.min() <= targets.max() < count:
        raise DataError(
            f"{where}: targets hold {targets.min()} to {targets.max()}; they must be classes below "
            f"signature.outputs = {count}"
        )


@dataclass(frozen=True)
class Trained:
    """A trained model: the `Config` and the fingerprint of its run, its parameters, and `TrainedModel.generate`."""

    config: Any
    fingerprint: Kept
    model: Model
    params: Params
    generate: Callable[..., Any] | None = None


@dataclass(frozen=True)
class TaskKind:
    """A kind of task. A configuration chooses it with `task = "name"`, or `task = "MODULE:NAME"` for one of your own.

    Attributes:
        data: the dataclass of its table [data], which has at least `batch`: the examples side by side in a batch.
        models: the dataclasses of its table [model], by `model.kind`; the first is the default.
        load: makes the task from a `Config`; raises DataError if the data cannot be used.
        model: makes the task's model alone, from the `Config` and the fingerprint, without the data.
        sample: the dataclass of its table [sample]; None if its models write nothing.
        write: returns the text that a trained model writes, as the table [sample] of its config says, from a seed. Raises
            DataError for values of [sample] that cannot be used.
        predict: returns what a trained model predicts from a file of data, by default the one that it was trained on, as
            CSV: what `jrnn predict` prints. Raises DataError for a file that cannot be used.
        units: of a task that scales its data, two functions, made from the `Config` and the fingerprint: from inputs in the
            data's units to the model's, and from the model's outputs to the data's units; `jrnn.load_run` applies them.
    """

    name: str
    data: type
    models: Mapping[str, type]
    load: Callable[[Any], Task]
    model: Callable[[Any, Kept], Model]
    sample: type | None = None
    write: Callable[[Trained, int], str] | None = None
    predict: Callable[[Trained, str | Path | None], str] | None = None
    units: Callable[[Any, Kept], Units] | None = None


class Examples(NamedTuple):
    """A batch of independent examples.

    Attributes:
        inputs: float32 [T, B, D].
        targets: int32 classes [B], or float32 values [B, ...].
        fresh: True: every batch starts with the initial state.
        lengths: int32 [B], the number of valid steps of each example; None if all are valid.
        mask: bool [T, B], True where a step counts; None if all do.
        dt: float32 [T, B], the time since the last step that counts; None if steps are equally spaced.
    """

    inputs: Any
    targets: Any
    fresh: Any = np.asarray(True)
    lengths: Any = None
    mask: Any = None
    dt: Any = None


AXES = {"inputs": 1, "targets": 0, "lengths": 0, "mask": 1, "dt": 1}


@dataclass(frozen=True)
class Shuffled:
    """Batches of examples. Each example appears once in a pass, in an order that is a function of the pass's number.

    Attributes:
        all: the examples.
        batch: B.
        seed: of the order and of the noise.
        noise: the standard deviation of normal noise that is added to the inputs, drawn by the step's number.
    """

    all: Examples
    batch: int
    seed: int
    noise: float = 0.0

    @classmethod
    def of(cls, examples: Examples, batch: int, seed: int, noise: float = 0.0) -> Shuffled:
        """Raises DataError if there are fewer examples than in one batch."""
        count = len(examples.targets)
        if count < batch:
            raise DataError(
                f"there are {count} examples to train on, but data.batch = {batch}; make it smaller"
            )
        return cls(examples, batch, seed, noise)

    def at(self, step: int) -> Examples:
        """Returns the batch of a step, counted from 0 through all passes; a pass leaves out an incomplete last batch."""
        number, index = divmod(step, len(self.all.targets) // self.batch)
        order = _order(self.seed, number, len(self.all.targets))
        batch = take(self.all, order[index * self.batch : (index + 1) * self.batch])
        if not self.noise:
            return batch
        rng = np.random.default_rng((self.seed, step, 1))
        drawn = rng.standard_normal(batch.inputs.shape, np.float32)
        return batch._replace(inputs=batch.inputs + np.float32(self.noise) * drawn)


@lru_cache(maxsize=4)
def _order(seed: int, number: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).permutation(count)


def take(examples: Examples, which: Any) -> Examples:
    """Returns the examples of these indices."""
    taken = {}
    for name, axis in AXES.items():
        value = getattr(examples, name)
        if value is not None:
            taken[name] = value[which] if axis == 0 else value[:, which]
    return examples._replace(**taken)


def in_batches(examples: Examples, size: int) -> tuple[Examples, ...]:
    """Returns all examples in their order; the last batch may be smaller."""
    count = len(examples.targets)
    return tuple(take(examples, slice(k, min(k + size, count))) for k in range(0, count, size))


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Splits examples into those to train on and a share to validate with, drawn by the seed."""
    count = len(examples.targets)
    held = round(count * share)
    if not 0 < held < count:
        raise DataError(
            f"data.validation = {share} of {count} examples leaves none for training or validation"
        )
    order = np.random.default_rng(seed).permutation(count)
    return take(examples, order[held:]), take(examples, order[:held])


@dataclass(frozen=True)
class Scaling:
    """(x - mean) / deviation, feature by feature [D]; fitted on the training examples alone.

    >>> scaling = Scaling.fit(np.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> scaling.apply(np.array([[2.0, 6.0]])).tolist(), scaling.undo(np.array([[1.0, 1.0]])).tolist()
    ([[0.0, 1.0]], [[3.0, 6.0]])
    """

    mean: list[float]
    deviation: list[float]

    @classmethod
    def fit(cls, values: np.ndarray) -> Scaling:
        """Fits values [N, D], ignoring NaN; a constant feature is only shifted."""
        wide = np.asarray(values, np.float64)
        deviation = np.nanstd(wide, axis=0)
        return cls(
            np.nanmean(wide, axis=0).tolist(), np.where(deviation > 0, deviation, 1.0).tolist()
        )

    def scaled(self, values: Any) -> Any:
        """As `apply`, in JAX."""
        return (values - self._along(self.mean, values)) / self._along(self.deviation, values)

    def unscaled(self, values: Any) -> Any:
        """As `undo`, in JAX, in the type of the values."""
        return values * self._along(self.deviation, values) + self._along(self.mean, values)

    @staticmethod
    def _along(numbers: Sequence[float], like: Any) -> Any:
        return along_last(jnp.asarray(numbers, like.dtype), like)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """[..., D] -> float32 [..., D]."""
        return ((values - np.asarray(self.mean)) / np.asarray(self.deviation)).astype(np.float32)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """[..., D] -> float64 [..., D]."""
        return np.asarray(values, np.float64) * np.asarray(self.deviation) + np.asarray(self.mean)


def checksum(*arrays: Any) -> str:
    """Returns the SHA-256 of arrays with their shapes and types; None adds nothing."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            array = np.ascontiguousarray(array)
            digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def predictor(model: Model) -> Callable[[Params, Sequence[Examples]], np.ndarray]:
    """Returns a function of parameters and batches that concatenates the model's outputs for all batches."""

    @jax.jit
    def compiled(params: Params, batch: Examples) -> Any:
        return model.predict(params, model.initial_carry(batch.inputs.shape[1]), batch)[0]

    def predicted(params: Params, batches: Sequence[Examples]) -> np.ndarray:
        return np.concatenate([compiled(params, batch) for batch in batches])

    return predicted


@dataclass(frozen=True)
class HeldOutTask(Task):
    """The shared part of tasks with a fixed set of examples, some to train on and the others held out; see `Task`."""

    train: Shuffled
    held_out: Examples
    kept: Kept
    model: Model

    axes: ClassVar[Axes] = AXES

    def validation(self) -> Sequence[Examples]:
        return in_batches(self.held_out, self.train.batch)

    @cached_property
    def _predict(self) -> Callable[[Params, Sequence[Examples]], np.ndarray]:
        return predictor(self.model)

    def predicted(self, params: Params) -> np.ndarray:
        """Returns the model's outputs for the held-out examples."""
        return self._predict(params, self.validation())

    def fingerprint(self) -> Kept:
        return dict(self.kept)


def kept_value(kept: Kept, key: str, kind: Any) -> Any:
    """Returns a value of data.json, which the task kept of its data; raises a CheckpointError if it is none of this kind.

    >>> kept_value({"classes": 3}, "classes", int)
    3
    """
    if key not in kept:
        raise CheckpointError(
            f"data.json: lacks {key!r}, which the model is made from; train a new one, or restore the file"
        )
    return checked(kind, kept[key], f"data.json: {key}", CheckpointError)
