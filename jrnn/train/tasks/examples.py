"""Independent examples: their batches, their scaling, and a model's predictions for all of them.

Shapes: T steps, B examples in a batch, D features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jrnn.errors import DataError
from jrnn.train.models import Model, Params


class Examples(NamedTuple):
    """A batch of independent examples.

    Attributes:
        inputs: float32 [T, B, D].
        targets: int32 classes [B], or float32 values [B, ...].
        fresh: True: every batch starts with the initial state.
        lengths: int32 [B], how many steps of each example are valid; None where all are.
    """

    inputs: Any
    targets: Any
    fresh: Any = np.asarray(True)
    lengths: Any = None


AXES = {"inputs": 1, "targets": 0, "lengths": 0}


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
        """Raises DataError where there are fewer examples than one batch holds."""
        count = len(examples.targets)
        if count < batch:
            raise DataError(f"there are {count} examples to train on, but data.batch = {batch}; make it smaller")
        return cls(examples, batch, seed, noise)

    def at(self, step: int) -> Examples:
        """The batch of step `step`, counted from 0 through all passes; what is over at the end of a pass is left out."""
        number, index = divmod(step, len(self.all.targets) // self.batch)
        order = _order(self.seed, number, len(self.all.targets))
        found = take(self.all, order[index * self.batch : (index + 1) * self.batch])
        if not self.noise:
            return found
        drawn = np.random.default_rng((self.seed, step, 1)).standard_normal(found.inputs.shape, np.float32)
        return found._replace(inputs=found.inputs + np.float32(self.noise) * drawn)


@lru_cache(maxsize=4)
def _order(seed: int, number: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).permutation(count)


def take(examples: Examples, which: Any) -> Examples:
    """Some of the examples, by number."""
    lengths = None if examples.lengths is None else examples.lengths[which]
    return Examples(examples.inputs[:, which], examples.targets[which], examples.fresh, lengths)


def in_batches(examples: Examples, size: int) -> tuple[Examples, ...]:
    """All the examples in their order; the last batch may be smaller."""
    count = len(examples.targets)
    return tuple(take(examples, slice(k, min(k + size, count))) for k in range(0, count, size))


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Splits examples into those to train on and a share to validate with, drawn by the seed."""
    count = len(examples.targets)
    held = round(count * share)
    if not 0 < held < count:
        raise DataError(
            f"data.validation = {share} of {count} examples leaves none to train on, or none to validate with"
        )
    order = np.random.default_rng(seed).permutation(count)
    return take(examples, order[held:]), take(examples, order[:held])


@dataclass(frozen=True)
class Scaling:
    """(x - mean) / deviation, feature by feature [D]; fitted on the examples to train on alone.

    >>> scaling = Scaling.fit(np.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> scaling.apply(np.array([[2.0, 6.0]])).tolist(), scaling.undo(np.array([[1.0, 1.0]])).tolist()
    ([[0.0, 1.0]], [[3.0, 6.0]])
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def fit(cls, values: np.ndarray) -> Scaling:
        """From values [N, D]; a feature that is always the same is only shifted."""
        wide = np.asarray(values, np.float64)
        deviation = wide.std(axis=0)
        return cls(tuple(wide.mean(axis=0).tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist()))

    def apply(self, values: np.ndarray) -> np.ndarray:
        """[..., D] -> float32 [..., D]."""
        return ((values - np.asarray(self.mean)) / np.asarray(self.deviation)).astype(np.float32)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """[..., D] -> float64 [..., D]."""
        return np.asarray(values, np.float64) * np.asarray(self.deviation) + np.asarray(self.mean)


def checksum(*arrays: Any) -> str:
    """SHA-256 of arrays, with their shapes and types; None counts as nothing."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            array = np.ascontiguousarray(array)
            digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def predictor(model: Model) -> Callable[[Params, Sequence[Examples]], np.ndarray]:
    """The function from parameters and batches to what the model puts out for all of them, one after the other."""

    @jax.jit
    def compiled(params: Params, batch: Examples) -> Any:
        return model.predict(params, model.initial_carry(batch.inputs.shape[1]), batch)[0]

    return lambda params, batches: np.concatenate([compiled(params, batch) for batch in batches])


@dataclass(frozen=True)
class HeldOutTask:
    """What tasks share whose examples are at hand, some to train on and the others held out; see `Task`."""

    train: Shuffled
    held_out: Examples
    kept: Mapping[str, Any]
    model: Model

    axes: ClassVar[Mapping[str, int]] = AXES
    item: ClassVar[str] = "examples"

    @property
    def items(self) -> int:
        return self.train.batch

    def validation(self) -> Sequence[Examples]:
        return in_batches(self.held_out, self.train.batch)

    @cached_property
    def _predict(self) -> Callable[[Params, Sequence[Examples]], np.ndarray]:
        return predictor(self.model)

    def predicted(self, params: Params) -> np.ndarray:
        """What the model puts out for the held-out examples."""
        return self._predict(params, self.validation())

    def fingerprint(self) -> dict[str, Any]:
        return dict(self.kept)
