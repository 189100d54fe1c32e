"""The adding problem: regression of one value from a whole sequence, as a measure of memory.

Shapes: T steps, B examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from jrnn.files import AtLeast
from jrnn.train.models import FEATURE_MODELS, Model, Signature, build_model
from jrnn.train.tasks.task import AXES, Axes, Examples, Kept, Task, TaskKind, in_batches
from jrnn.train.toml_codec import Positive, check_bounds

VALIDATION = 2**32 - 1  # the number of the validation batch; no step reaches it


@dataclass(frozen=True)
class AddingData:
    """Predict the sum of the two marked numbers of a sequence of numbers in [0, 1).

    Every step draws new examples. The constant answer 1 has a mean squared error of 1/6.
    Source: Hochreiter and Schmidhuber, Long short-term memory, 1997, as in Le, Jaitly and Hinton, 2015.
    """

    length: Annotated[int, AtLeast(2)] = 200  # steps of a sequence
    validation: Positive = 1000  # examples to validate with
    batch: Positive = 64  # examples in a step

    def __post_init__(self):
        check_bounds("data", self)


@dataclass(frozen=True)
class Adding(AddingData):
    """Examples of the adding problem; a batch is a function of the seed and its number.

    Inputs are [T, B, 2]: numbers, and marks with one 1 in either half. Targets are [B, 1].
    """

    seed: int = 0

    def at(self, step: int) -> Examples:
        return self.draw(step, self.batch)

    def draw(self, number: int, count: int) -> Examples:
        rng = np.random.default_rng((self.seed, number))
        numbers = rng.random((self.length, count), np.float32)
        half = self.length // 2
        marked = np.stack(
            [rng.integers(half, size=count), rng.integers(half, self.length, size=count)]
        )
        marks = np.zeros_like(numbers)
        marks[marked, np.arange(count)] = 1
        total = np.take_along_axis(numbers, marked, axis=0).sum(axis=0)
        return Examples(np.stack([numbers, marks], axis=-1), total[:, None])


@dataclass(frozen=True)
class AddingTask(Task):
    """See `Task`."""

    train: Adding
    model: Model

    axes: ClassVar[Axes] = AXES
    unit: ClassVar[str] = "mean squared error"

    @classmethod
    def load(cls, config: Any) -> AddingTask:
        return cls(Adding(**vars(config.data), seed=config.seed), _model(config, {}))

    def validation(self) -> Sequence[Examples]:
        return in_batches(self.train.draw(VALIDATION, self.train.validation), self.train.batch)


def _model(config: Any, kept: Kept) -> Model:
    return build_model(config, Signature(tokens=False, inputs=2, outputs=1, loss="squared_error"))


ADDING = TaskKind("adding", AddingData, FEATURE_MODELS, AddingTask.load, _model)
