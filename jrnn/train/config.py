"""The configuration of a training run: one frozen dataclass for each table of the TOML file, with all defaults.

The tables that all tasks share are here. The tables [data] and [sample] are the task's own, and [model] is the model's: they
stand next to what reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jrnn.errors import ConfigError, near
from jrnn.named import load_named
from jrnn.train.models import MAKERS, model_table
from jrnn.train.shipped import find_config
from jrnn.train.tasks import KINDS, TaskKind
from jrnn.train.toml_codec import decode, override, read_toml, require


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer by name, after clipping of the gradient's norm, with a learning rate that follows a schedule."""

    name: str = "adam"  # any of optax's, as adamw or contrib.muon
    learning_rate: float = 3e-3
    schedule: str = "cosine"  # constant; cosine, linear: from learning_rate to final_rate; or any of optax's by name
    schedule_options: dict = field(default_factory=dict)  # arguments of a schedule by its optax name, as decay_rate
    schedule_steps: int = 0  # the schedule's length; 0: train.steps
    final_rate: float = 0.0  # of the schedules cosine and linear, at the schedule's last step
    warmup: int = 0  # steps of linear growth from 0 before the schedule starts
    clip: float = 1.0  # the greatest norm of the gradient; 0 leaves it as it is
    options: dict = field(default_factory=dict)  # further arguments of the optax optimizer, such as b2 or weight_decay
    decay: Literal["all", "matrices"] = "all"  # what weight decay acts on: all parameters, or none that is a vector
    accumulate: int = (
        1  # parts that a batch is read in, one after the other, for one step: less memory, the same result
    )
    ema: float = 0.0  # decay of a running mean of the parameters, which is validated, sampled and exported; 0: none

    def __post_init__(self):
        require(self.learning_rate > 0, "optimizer.learning_rate must be positive", self.learning_rate)
        require(self.final_rate >= 0, "optimizer.final_rate must not be negative", self.final_rate)
        require(self.schedule_steps >= 0, "optimizer.schedule_steps must not be negative", self.schedule_steps)
        require(self.warmup >= 0, "optimizer.warmup must not be negative", self.warmup)
        require(self.clip >= 0, "optimizer.clip must not be negative", self.clip)
        require(self.accumulate >= 1, "optimizer.accumulate must be at least 1", self.accumulate)
        require(0 <= self.ema < 1, "optimizer.ema must lie in [0, 1)", self.ema)


@dataclass(frozen=True)
class GradientConfig:
    """Which gradient trains the model: JAX's of the lowered net, or the generated backward net's."""

    source: Literal["jax", "net"] = "jax"
    check: bool = False  # compare in float64 on the first batch, and stop where they disagree
    check_every: int = 0  # the same again after every so many steps, with the parameters of then; 0: not again

    def __post_init__(self):
        require(self.check_every >= 0, "gradient.check_every must not be negative", self.check_every)


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, and what happens on the way."""

    steps: int = 1500
    steps_per_call: int = 10  # steps in one call of the compiled function
    validate_every: int = 250
    patience: int = (
        0  # validations without a better loss after which training stops, with the best parameters; 0: never
    )
    checkpoint_every: int = 250
    keep: int = 2  # checkpoints kept
    devices: int = 1  # that share each batch; 0: all that there are
    tensorboard: bool = False  # also write the metrics as TensorBoard's events, into the run directory
    precision: Literal["float32", "bfloat16"] = "float32"  # of products and activations; parameters stay float32
    on_nan: Literal["stop", "skip"] = "stop"  # what a step does whose loss, gradient or update is not finite
    loss_limit: float = 0.0  # a greater loss counts as not finite; 0: none does
    metrics: list[str] = field(default_factory=list)  # functions of one's own, MODULE:FUNCTION, called at validations

    def __post_init__(self):
        for name in ("steps", "steps_per_call", "validate_every", "checkpoint_every", "keep"):
            require(getattr(self, name) >= 1, f"train.{name} must be at least 1", getattr(self, name))
        require(self.devices >= 0, "train.devices must not be negative", self.devices)
        require(self.patience >= 0, "train.patience must not be negative", self.patience)
        require(self.loss_limit >= 0, "train.loss_limit must not be negative", self.loss_limit)


@dataclass(frozen=True)
class Config:
    """A whole configuration: `task` chooses the tables `data` and `sample`, and `model.kind` the table `model`.

    `sample` is None where the task's models write nothing.
    """

    task: str = "characters"
    seed: int = 0
    data: Any = None
    model: Any = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: Any = None

    def __post_init__(self):
        if self.train.precision != "float32" and self.gradient.source != "jax":
            raise ConfigError(f'train.precision = "{self.train.precision}" needs gradient.source = "jax"')
        for name, table in self.choose({"task": self.task}).items():
            if getattr(self, name) is None and table is not None:
                object.__setattr__(self, name, table())
        parts = self.optimizer.accumulate
        require(
            self.data.batch % parts == 0,
            f"data.batch must be a multiple of optimizer.accumulate = {parts}",
            self.data.batch,
        )

    @property
    def kind(self) -> TaskKind:
        return _kind(self.task)

    def metrics(self) -> dict[str, Callable[..., float]]:
        """The functions of `train.metrics`, by their names."""
        return {name.rpartition(":")[2]: _function(name) for name in self.train.metrics}

    @staticmethod
    def choose(given: Mapping[str, Any]) -> dict[str, type | None]:
        """The dataclasses of the tables that depend on the task, from what a file says; None for a table it lacks."""
        kind = _kind(given.get("task", Config.task))
        return {"data": kind.data, "model": _model_table(kind, given.get("model", {})), "sample": kind.sample}


def _function(name: str) -> Callable[..., float]:
    found = load_named(name, ConfigError, "FUNCTION")
    if not callable(found):
        raise ConfigError(f"train.metrics: {name} is a {type(found).__name__}; it must be a function")
    return found


def _kind(task: Any) -> TaskKind:
    if isinstance(task, str) and ":" in task:
        return _own_kind(task)
    if task not in KINDS:
        raise ConfigError(f"there is no task {task!r}{_hint(task, KINDS)}")
    return KINDS[task]


def _own_kind(task: str) -> TaskKind:
    found = load_named(task, ConfigError)
    if not isinstance(found, TaskKind):
        raise ConfigError(f"task: {task} is a {type(found).__name__}; it must be a jrnn.train.TaskKind")
    if not is_dataclass(found.data) or "batch" not in {f.name for f in fields(found.data)}:
        raise ConfigError(
            f"task: the `data` of {task} must be a dataclass with a field `batch`, the examples of a step"
        )
    return found


def _model_table(kind: TaskKind, given: Any) -> type:
    named = given.get("kind") if isinstance(given, Mapping) else None
    if named is None and isinstance(given, Mapping) and given.get("net") is not None:
        named = "net"
    if named is None:
        return next(iter(kind.models.values()))
    if isinstance(named, str) and ":" in named and set(kind.models) & set(MAKERS):
        return model_table(named)
    if named not in kind.models:
        raise ConfigError(f"model.kind: task {kind.name!r} has no models of kind {named!r}{_hint(named, kind.models)}")
    return kind.models[named]


def _hint(name: Any, known: Mapping[str, Any]) -> str:
    return (near(name, known) if isinstance(name, str) else "") or f"; known are {', '.join(known)}"


def load_config(path: str | Path, assignments: Iterable[str] = ()) -> Config:
    """Loads the configuration of a TOML file, or one that ships, by its name, with `a.b=value` assignments applied.

    >>> load_config("char_lstm", ["train.steps=20"]).train.steps
    20

    Raises:
        ConfigError: for a missing file, a key that does not exist (with the near name), or an impossible value.
    """
    path = find_config(path)
    tables = read_toml(path)
    decode(Config, tables, str(path))  # so that a mistake in the file is not blamed on the assignments
    assignments = tuple(assignments)
    where = f"{path} with --set {' '.join(assignments)}" if assignments else str(path)
    return decode(Config, override(tables, assignments), where)
