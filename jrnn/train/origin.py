"""What a trained model has besides its parameters: where it comes from, its configuration, and the model of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jrnn.errors import ConfigError
from jrnn.train.config import Config
from jrnn.train.models.interface import Model, Signature
from jrnn.train.tasks.task import Kept, Units


class Asked(NamedTuple):
    """A batch to predict from, with the members that models of tasks read; time comes first."""

    tokens: Any = None
    inputs: Any = None
    lengths: Any = None
    resets: Any = None
    mask: Any = None
    dt: Any = None
    targets: None = None
    fresh: Any = False


@dataclass(
    frozen=True, eq=False
)  # compared by identity: part of what compiled functions are cached by
class Origin:
    """What a `TrainedModel` has besides parameters.

    Attributes:
        path: the run directory.
        config: the configuration of the run.
        kept: what the task kept of its data, such as a vocabulary.
        model: the model as it was trained.
    """

    path: Path
    config: Config
    kept: Kept
    model: Model

    @property
    def signature(self) -> Signature:
        """The inputs and outputs. Raises ConfigError for a model that has others, such as an encoder-decoder."""
        signature = getattr(self.model, "signature", None)
        if not isinstance(signature, Signature):
            raise ConfigError(
                f"{self.path}: a {type(self.model).__name__} of task {self.config.task!r} does not map one sequence to "
                "outputs; use model.sample(...), or its own functions: model.origin.model and model.params"
            )
        return signature

    def variant(self, **changes: Any) -> Model:
        """The model for a changed signature, with the same parameters. Raises ConfigError if it has none."""
        wanted = replace(self.signature, **changes)
        if wanted == self.signature:
            return self.model
        change = getattr(self.model, "with_signature", None)
        if change is None:
            raise ConfigError(
                f"{self.path}: a model of kind {self.config.model.kind!r} has no {' and '.join(changes)}"
            )
        return change(wanted)

    @cached_property
    def carried(self) -> bool:
        """Whether the model has a state to go on from."""
        return self._has(carried=True)

    @cached_property
    def takes_lengths(self) -> bool:
        """Whether the model, going on from a state, takes the lengths of sequences."""
        return self._has(carried=True, lengths=True)

    def _has(self, **changes: Any) -> bool:
        try:
            self.variant(**changes)
        except ConfigError:
            return False
        return True

    @cached_property
    def units(self) -> Units:
        """What inputs and outputs go through, between the data's units and the model's."""
        convert = self.config.kind.units
        return (lambda x: x, lambda y: y) if convert is None else convert(self.config, self.kept)
