"""Models: pure functions that a task trains. `model.kind` of a config names a kind of model.

In: a table `model` of a config, and the `Signature` of a task. Out: a `Model`: parameters and a pure function. Read
`interface.py` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from jrnn.convert.named import load_named
from jrnn.errors import ConfigError
from jrnn.train.models.cells import CellsConfig, TokenCellsConfig, cells_model
from jrnn.train.models.interface import (
    Carry,
    Compute,
    FunctionModel,
    Model,
    Outcome,
    Params,
    Signature,
)
from jrnn.train.models.net_from_disk import NetDefConfig, netdef_model
from jrnn.train.models.nn import NnConfig, TokenNnConfig, nn_model
from jrnn.train.models.pretrained import PretrainedConfig

T = TypeVar("T")

# The tables [model] by kind: of models of tokens, and of features.
TOKEN_MODELS: dict[str, type] = {
    "cells": TokenCellsConfig,
    "nn": TokenNnConfig,
    "net": NetDefConfig,
}
FEATURE_MODELS: dict[str, type] = {"cells": CellsConfig, "nn": NnConfig, "net": NetDefConfig}
MAKERS = {"cells": cells_model, "nn": nn_model, "net": netdef_model}


@dataclass(frozen=True)
class ModelKind:
    """A kind of model of your own. A configuration names it by `model.kind = "MODULE:NAME"`.

    Attributes:
        table: the dataclass of its table [model]. Every field has a default, and one is `kind: str`.
        make: makes the model from that table, the task's signature, and how it is computed.
    """

    table: type
    make: Callable[[Any, Signature, Compute], Model]


def load_kind(key: str, target: str, cls: type[T], table: str, field: str) -> T:
    """Loads the TaskKind or ModelKind that `target`, MODULE:NAME, names.

    Args:
        key: the key of the config, for messages.
        target: as the user wrote it.
        cls: TaskKind or ModelKind.
        table: its attribute that must be a dataclass.
        field: a field that this dataclass must have.

    Raises:
        ConfigError: if there is no such object, or it breaks a rule.
    """
    loaded = load_named(target, ConfigError)
    if not isinstance(loaded, cls):
        kind = "type" if isinstance(loaded, type) else type(loaded).__name__
        raise ConfigError(f"{key}: {target} is a {kind}; it must be a jrnn.train.{cls.__name__}")
    given = getattr(loaded, table)
    if not is_dataclass(given) or field not in {f.name for f in fields(given)}:
        raise ConfigError(
            f"{key}: the `{table}` of {target} must be a dataclass with a field `{field}`"
        )
    return loaded


def build_model(config: Any, signature: Signature) -> Model:
    """Returns the model that a whole `Config` asks for, for a task that needs `signature`."""
    kind = config.model.kind
    make = MAKERS.get(kind) or load_kind("model.kind", kind, ModelKind, "table", "kind").make
    return make(config.model, signature, Compute(config.gradient.source, config.train.precision))
