"""The configuration of a training run: one frozen dataclass for each table of the TOML file, with all defaults.

This file has the tables that all tasks share, finds the configs that ship, and writes the keys of tables as text. The task
defines the tables [data] and [sample], and the model defines [model], each next to the code that reads it.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jrnn.convert.named import load_named, target_in
from jrnn.errors import ConfigError, near
from jrnn.files import read_text
from jrnn.train.models import MAKERS, ModelKind, load_kind
from jrnn.train.tasks import KINDS, TaskKind
from jrnn.train.toml_codec import (
    CONFIGS,
    Natural,
    NonNegative,
    Positive,
    Tables,
    check_bounds,
    decode,
    hint,
    override,
    read_toml,
    require,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer by name, after clipping of the gradient's norm, with a learning rate that follows a schedule."""

    name: str = "adam"  # any of optax's optimizers, such as adamw or contrib.muon
    learning_rate: float = 3e-3  # the greatest rate of the schedule
    schedule: str = "cosine"  # constant; cosine, linear: from learning_rate to final_rate; or any of optax's by name
    # arguments of a schedule by its optax name, as decay_rate
    schedule_options: dict = field(default_factory=dict)
    schedule_steps: Natural = 0  # the schedule's length; 0: train.steps
    final_rate: NonNegative = 0.0  # of the schedules cosine and linear, at the schedule's last step
    warmup: Natural = 0  # steps of linear growth from 0 before the schedule starts
    clip: NonNegative = 1.0  # the greatest norm of the gradient; 0: no clipping
    # further arguments of the optax optimizer, such as b2 or weight_decay
    options: dict = field(default_factory=dict)
    # what weight decay acts on: all parameters, or none that is a vector
    decay: Literal["all", "matrices"] = "all"
    accumulate: Positive = 1  # parts in which a step reads its batch, one after the other: less memory, the same result
    # patterns of names of the parameters to train, as "layers.1.*"; []: all
    only: list[str] = field(default_factory=list)
    ema: float = 0.0  # decay of a running mean of the parameters, which is validated, sampled and exported; 0: none

    def __post_init__(self):
        require(
            self.learning_rate > 0, "optimizer.learning_rate must be positive", self.learning_rate
        )
        check_bounds("optimizer", self)
        require(0 <= self.ema < 1, "optimizer.ema must lie in [0, 1)", self.ema)


@dataclass(frozen=True)
class GradientConfig:
    """Which gradient trains the model: JAX's of the lowered net, or the generated backward net's."""

    # of the lowered net, or by operators that add_gradients makes
    source: Literal["jax", "net"] = "jax"
    check: bool = False  # compare both in float64 on the first batch, and stop if they disagree
    check_every: Natural = 0  # steps between further comparisons; 0: none

    def __post_init__(self):
        check_bounds("gradient", self)


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, and what happens on the way."""

    steps: Positive = 1500  # steps of the optimizer in all
    steps_per_call: Positive = 10  # steps in one call of the compiled function
    validate_every: Positive = 250  # steps between validations
    patience: Natural = 0  # validations without a better loss until training stops with the best parameters; 0: never
    checkpoint_every: Positive = 250  # steps between checkpoints
    keep: Positive = 2  # checkpoints kept
    devices: Natural = 1  # devices that share each batch; 0: all that there are
    # of additional metrics next to metrics.jsonl: tensorboard, csv, wandb, trackio, mlflow, MODULE:NAME
    loggers: list[str] = field(default_factory=list)
    # of products and activations; parameters stay float32
    precision: Literal["float32", "bfloat16"] = "float32"
    # what to do if a step's loss, gradient or update is not finite
    on_nan: Literal["stop", "skip"] = "stop"
    loss_limit: NonNegative = 0.0  # a greater loss counts as not finite; 0: no limit
    # your functions, MODULE:FUNCTION, called at validations
    metrics: list[str] = field(default_factory=list)

    def __post_init__(self):
        check_bounds("train", self)
        require(self.steps < 2**31, "train.steps must be below 2147483648", self.steps)


@dataclass(frozen=True)
class Config:
    """A whole configuration: `task` chooses the tables `data` and `sample`, and `model.kind` the table `model`.

    `sample` is None if the task's models write nothing.
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
        require(0 <= self.seed < 2**32, "seed must lie between 0 and 4294967295", self.seed)
        if self.train.precision != "float32" and self.gradient.source != "jax":
            raise ConfigError(
                f'train.precision = "{self.train.precision}" needs gradient.source = "jax"'
            )
        for name, table in self.choose({"task": self.task}).items():
            if getattr(self, name) is None and table is not None:
                object.__setattr__(self, name, table())
        if (patterns := getattr(self.model, "trained", [])) and not self.optimizer.only:
            object.__setattr__(self, "optimizer", replace(self.optimizer, only=patterns))
        batch = self.data.batch
        parts = self.optimizer.accumulate
        require(
            batch % parts == 0,
            f"data.batch must be a multiple of optimizer.accumulate = {parts}",
            batch,
        )

    @property
    def kind(self) -> TaskKind:
        return _task_kind(self.task)

    def metrics(self) -> dict[str, Callable[..., float]]:
        """Returns the functions of `train.metrics` by their names."""
        functions = {}
        for name in self.train.metrics:
            function = load_named(name, ConfigError, "FUNCTION")
            if not callable(function):
                raise ConfigError(
                    f"train.metrics: {name} is a {type(function).__name__}; it must be a function"
                )
            functions[name.rpartition(":")[2]] = function
        return functions

    @staticmethod
    def choose(given: Mapping[str, Any]) -> dict[str, type | None]:
        """Returns the dataclasses of the tables that depend on what a file says; None for a table that the task lacks."""
        kind = _task_kind(given.get("task", Config.task))
        return {
            "data": kind.data,
            "model": _model_table(kind, given.get("model", {})),
            "sample": kind.sample,
        }


def _task_kind(task: Any) -> TaskKind:
    if isinstance(task, str) and ":" in task:
        return load_kind("task", task, TaskKind, "data", "batch")
    if not isinstance(task, str) or task not in KINDS:
        raise ConfigError(f"there is no task {task!r}{hint(task, KINDS)}")
    return KINDS[task]


def _model_table(kind: TaskKind, model: Any) -> type:
    """Returns the dataclass of the table [model]; `model` is that table in the file."""
    given = model if isinstance(model, Mapping) else {}
    implied = next((kind for kind in ("net", "pretrained") if given.get(kind) is not None), None)
    named = given.get("kind", implied)
    if named is None:
        return next(iter(kind.models.values()))
    if isinstance(named, str) and ":" in named and set(kind.models) & set(MAKERS):
        return load_kind("model.kind", named, ModelKind, "table", "kind").table
    if not isinstance(named, str) or named not in kind.models:
        raise ConfigError(
            f"model.kind: task {kind.name!r} has no models of kind {named!r}{hint(named, kind.models)}"
        )
    return kind.models[named]


def config_names() -> list[str]:
    """Returns the names of the configs that ship, in alphabetical order.

    >>> "char_lstm" in config_names()
    True
    """
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def find_config(given: str | Path) -> Path:
    """Returns the file `given` if it exists, else the shipped config of that name.

    >>> find_config("char_lstm").name
    'char_lstm.toml'
    """
    path = Path(given)
    if not path.exists() and str(given) in config_names():
        return CONFIGS / f"{given}.toml"
    return path


def nearest_config(path: Path) -> str:
    """Returns how an error about a missing config ends: with the nearest name, or with where the names are listed."""
    names = []
    if path.parent.is_dir():
        for there in path.parent.glob("*.toml"):
            if near(path.stem, [there.stem]):
                names.append(there.name)
    meant = near(path.name, names) or near(path.stem, config_names())
    return meant or "; `jrnn configs` lists the configs that ship"


def describe_config(name: str) -> str:
    """Returns the comment that opens a shipped config, without its first line, which is the command."""
    lines = []
    for line in read_text(CONFIGS / f"{name}.toml", ConfigError).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines[1:])


def _with_code_of(folder: Path, tables: Tables) -> Tables:
    """Returns the tables of a file in `folder`; FILE:NAME and MODULE:NAME in them are looked up there, too."""

    def located(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(located, value))
        return target_in(value, folder) if isinstance(value, str) else value

    for table, keys in (("", ("task",)), ("model", ("kind",)), ("train", ("metrics", "loggers"))):
        values = tables.get(table) if table else tables
        if isinstance(values, dict):
            for key in values.keys() & set(keys):
                values[key] = located(values[key])
    return tables


def load_config(path: str | Path, assignments: Iterable[str] = ()) -> Config:
    """Loads the configuration of a TOML file, or one that ships, by its name, with `a.b=value` assignments applied.

    Code that the file names, as FILE.py:NAME or MODULE:NAME, is looked up in the working directory, then next to the file.

    >>> load_config("char_lstm", ["train.steps=20"]).train.steps
    20

    Raises:
        ConfigError: for a missing file, a key that does not exist (with the near name), or an impossible value.
    """
    path = find_config(path)
    tables = _with_code_of(path.parent, read_toml(path, nearest_config(path)))
    # First, so that a mistake in the file is not blamed on the assignments.
    config = decode(Config, tables, str(path))
    assignments = tuple(assignments)
    if not assignments:
        return config
    where = f"{path} with --set {' '.join(assignments)}"
    return decode(Config, override(tables, assignments), where)


@dataclass(frozen=True)
class Key:
    """A key of a table: its name, its default as TOML has it (None: no default), its choices and its meaning."""

    name: str
    default: str | None
    choices: tuple[str, ...]
    meaning: str


def keys_of(table: type) -> list[Key]:
    """Returns the keys of a table, which are the fields of its dataclass; their comments say what they mean.

    >>> from jrnn.train.config import GradientConfig
    >>> [key.name for key in keys_of(GradientConfig)]
    ['source', 'check', 'check_every']
    """
    meanings: dict[str, str] = {}
    for kind in filter(is_dataclass, table.__mro__):
        meanings |= _comments(kind)
    types = typing.get_type_hints(table)
    keys = []
    for f in fields(table):
        if f.name == "kind":
            continue
        kind = types[f.name]
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        default = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc]
        text = None if default is None else json.dumps(default)
        keys.append(Key(f.name, text, choices, meanings.get(f.name, "")))
    return keys


def _comments(table: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass that has one: above the field, or on its lines."""
    source = textwrap.dedent(inspect.getsource(table))
    texts: dict[int, str] = {}  # by line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "fmt:" not in token.string:
            texts[token.start[0]] = token.string.strip("# ")
    comments = {}
    last_line = 0  # of the statement before
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        lines = range(last_line + 1, node.end_lineno + 1)
        last_line = node.end_lineno
        text = " ".join(texts[line] for line in lines if line in texts)
        if text and isinstance(node, ast.AnnAssign):
            comments[node.target.id] = text
    return comments


def reference_of_keys(config: Config | None = None) -> str:
    """Returns the tables of a configuration, or of all tasks for None, with a line for each key."""
    own: list[tuple[type, str]] = []
    if config is None:
        for name, kind in KINDS.items():
            own += _tables_of(name, kind)
    else:
        for name in ("data", "model", "sample"):
            if table := getattr(config, name):
                own.append((type(table), f"[{name}]"))
    titles: dict[type, str] = {}
    for table, title in own:
        titles[table] = f"{titles[table]}, {title.rpartition(' ')[2]}" if table in titles else title
    for name in ("optimizer", "gradient", "train"):
        titles[type(getattr(config or Config(), name))] = f"[{name}]"
    return "\n\n".join("\n".join(_lines(title, table)) for table, title in titles.items())


def _tables_of(name: str, kind: TaskKind) -> Iterator[tuple[type, str]]:
    """Yields the tables of a task with their titles, which end with the task's name."""
    yield kind.data, f"[data] of {name}"
    for model, table in kind.models.items():
        yield table, f'[model] with kind = "{model}", of {name}'
    if kind.sample is not None:
        yield kind.sample, f"[sample] of {name}"


def _lines(title: str, table: type) -> Iterator[str]:
    yield title
    for key in keys_of(table):
        said = "; ".join(filter(None, [" | ".join(key.choices), key.meaning]))
        comment = f"  # {said}" if said else ""
        line = f"  {key.name} = {key.default or '(none)'}{comment}"
        yield textwrap.fill(line, 118, subsequent_indent=" " * 6)
