"""What a training run can be told: one frozen dataclass a table of the TOML file, every default visible here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .settings import decode, override, read_toml


def _require(true: bool, rule: str, value: Any) -> None:
    if not true:
        raise ConfigError(f"{rule}, is {value!r}")


@dataclass(frozen=True)
class DataConfig:
    """The text: the documentation inside Python itself, or a UTF-8 file."""

    source: Literal["python-docs", "file"] = "python-docs"
    path: str | None = None  # the file's path, from the working directory; giving one means source = "file"
    validation: float = 0.1  # the share of the text, at its end, that is never trained on
    batch: int = 32  # streams read side by side
    chunk: int = 64  # characters between truncations of backpropagation; the state is carried on

    def __post_init__(self):
        _require(0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation)
        _require(self.batch >= 1, "data.batch must be at least 1", self.batch)
        _require(self.chunk >= 1, "data.chunk must be at least 1", self.chunk)
        if self.path is not None:
            object.__setattr__(self, "source", "file")
        elif self.source == "file":
            raise ConfigError('data.source = "file" needs data.path, the path of a UTF-8 text')


@dataclass(frozen=True)
class ModelConfig:
    """Embedding -> LSTM layers -> logits, all of them operators of one net."""

    embedding: int = 64
    hidden: int = 256
    layers: int = 1
    forget_bias: float = 1.0

    def __post_init__(self):
        for name in ("embedding", "hidden", "layers"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1", getattr(self, name))


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer by name, after clipping of the gradient's norm, with a learning rate that follows a schedule."""

    name: str = "adam"
    learning_rate: float = 3e-3
    schedule: Literal["constant", "cosine", "linear"] = (
        "cosine"  # from learning_rate down to final_rate at the last step
    )
    final_rate: float = 0.0
    warmup: int = 0  # steps of linear growth from 0 before the schedule starts
    clip: float = 1.0  # the greatest norm of the gradient; 0 leaves it as it is
    options: dict = field(default_factory=dict)  # further arguments of the optax optimizer, such as b2 or weight_decay

    def __post_init__(self):
        _require(self.learning_rate > 0, "optimizer.learning_rate must be positive", self.learning_rate)
        _require(self.final_rate >= 0, "optimizer.final_rate must not be negative", self.final_rate)
        _require(self.warmup >= 0, "optimizer.warmup must not be negative", self.warmup)
        _require(self.clip >= 0, "optimizer.clip must not be negative", self.clip)


@dataclass(frozen=True)
class GradientConfig:
    """Which gradient trains the model: JAX's of the lowered net, or the generated backward net's."""

    source: Literal["jax", "net"] = "jax"
    check: bool = False  # compare both in float64 on the first batch, and stop where they disagree


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1500
    steps_per_call: int = 10  # steps in one call of the compiled function
    validate_every: int = 250
    checkpoint_every: int = 250
    keep: int = 2  # checkpoints kept

    def __post_init__(self):
        for name in ("steps", "steps_per_call", "validate_every", "checkpoint_every", "keep"):
            _require(getattr(self, name) >= 1, f"train.{name} must be at least 1", getattr(self, name))


@dataclass(frozen=True)
class SampleConfig:
    """The text that is written when training ends."""

    length: int = 400
    temperature: float = 0.7
    prompt: str = "The "

    def __post_init__(self):
        _require(self.length >= 1, "sample.length must be at least 1", self.length)
        _require(self.temperature >= 0, "sample.temperature must not be negative (0: the likeliest)", self.temperature)
        _require(self.prompt != "", "sample.prompt must hold at least one character", self.prompt)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


def load_config(path: str | Path, assignments: Iterable[str] = ()) -> Config:
    """The configuration of a TOML file, with `a.b=value` assignments on top.

    Raises:
        ConfigError: for a missing file, a key that does not exist (with the near name), or an impossible value.
    """
    path = Path(path)
    tables = read_toml(path)
    decode(Config, tables, str(path))  # so that a mistake in the file is not blamed on the assignments
    assignments = tuple(assignments)
    where = f"{path} with --set {' '.join(assignments)}" if assignments else str(path)
    return decode(Config, override(tables, assignments), where)
