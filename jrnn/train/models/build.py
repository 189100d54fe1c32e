"""The kinds of models, by the name that a config gives in `model.kind`."""

from __future__ import annotations

from typing import Any

from .cells import CellsConfig, TokenCellsConfig, cells_model
from .model import Compute, Model, Signature
from .netdef import NetDefConfig, netdef_model
from .nn import NnConfig, NnModel, TokenNnConfig

# The tables [model] by kind: of models of tokens, and of features.
TOKEN_MODELS: dict[str, type] = {"cells": TokenCellsConfig, "nn": TokenNnConfig, "net": NetDefConfig}
FEATURE_MODELS: dict[str, type] = {"cells": CellsConfig, "nn": NnConfig, "net": NetDefConfig}

MAKERS = {"cells": cells_model, "nn": NnModel, "net": netdef_model}


def build_model(config: Any, signature: Signature) -> Model:
    """The model that a whole `Config` asks for, of a task that needs `signature`."""
    return MAKERS[config.model.kind](config.model, signature, Compute(config.gradient.source, config.train.precision))
