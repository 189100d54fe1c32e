"""The kinds of models, by the name that a config gives in `model.kind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from jrnn.errors import ConfigError
from jrnn.named import load_named
from jrnn.train.models.cells import CellsConfig, TokenCellsConfig, cells_model
from jrnn.train.models.model import Compute, Model, Signature
from jrnn.train.models.netdef import NetDefConfig, netdef_model
from jrnn.train.models.nn import NnConfig, NnModel, TokenNnConfig

# The tables [model] by kind: of models of tokens, and of features.
TOKEN_MODELS: dict[str, type] = {"cells": TokenCellsConfig, "nn": TokenNnConfig, "net": NetDefConfig}
FEATURE_MODELS: dict[str, type] = {"cells": CellsConfig, "nn": NnConfig, "net": NetDefConfig}


@dataclass(frozen=True)
class ModelKind:
    """A kind of model of your own. A configuration names it by `model.kind = "MODULE:NAME"`.

    Attributes:
        table: the dataclass of its table [model]. Every field has a default, and one is `kind: str`.
        make: the model, from that table, what the task needs, and how it is computed.
    """

    table: type
    make: Callable[[Any, Signature, Compute], Model]


MAKERS = {"cells": cells_model, "nn": NnModel, "net": netdef_model}


def model_table(name: str) -> type:
    """The table [model] of a kind of one's own.

    Raises:
        ConfigError: where there is none of that name, or it is something else.
    """
    return _own_kind(name).table


def _own_kind(name: str) -> ModelKind:
    found = load_named(name, ConfigError)
    if not isinstance(found, ModelKind):
        raise ConfigError(f"model.kind: {name} is a {type(found).__name__}; it must be a jrnn.train.ModelKind")
    if not is_dataclass(found.table) or "kind" not in {f.name for f in fields(found.table)}:
        raise ConfigError(f'model.kind: the table of {name} must be a dataclass with a field `kind: str = ""`')
    return found


def build_model(config: Any, signature: Signature) -> Model:
    """The model that a whole `Config` asks for, of a task that needs `signature`."""
    kind = config.model.kind
    make = MAKERS[kind] if kind in MAKERS else _own_kind(kind).make
    return make(config.model, signature, Compute(config.gradient.source, config.train.precision))
