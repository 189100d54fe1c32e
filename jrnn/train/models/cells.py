"""Models whose recurrent layers come from `jrnn.cells`: nets from the input to the loss.

Shapes: T steps, B examples, V tokens known, E embedding, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...builder import NetBuilder
from ...cells import LSTM, LSTMOptions
from ..settings import require
from .net import NetModel


@dataclass(frozen=True)
class CellsConfig:
    """Embedding -> LSTM layers -> logits, all of them operators of one net."""

    embedding: int = 64
    hidden: int = 256
    layers: int = 1
    forget_bias: float = 1.0

    def __post_init__(self):
        for name in ("embedding", "hidden", "layers"):
            require(getattr(self, name) >= 1, f"model.{name} must be at least 1", getattr(self, name))


def language_model(config: CellsConfig, tokens_known: int, gradient: str = "jax") -> NetModel:
    """A language model as one net: Gather -> LSTM layers -> FC -> SoftmaxWithLoss.

    Blobs: `tokens` and `targets` int32 [T, B] -> `logits` [T, B, V], `loss` []; the state of layer k goes in as
    `hidden_k` and `cell_k`, [1, B, H].
    """
    b = NetBuilder("language_model")
    tokens, targets = b.input("tokens"), b.input("targets")
    embedding = b.param("embedding", [tokens_known, config.embedding], "GaussianFill", std=1.0)
    initial = [b.input(f"{kind}_{k}") for k in range(config.layers) for kind in ("hidden", "cell")]
    lstm = LSTM(
        b,
        b.Gather([embedding, tokens], "embedded"),
        None,
        initial,
        config.embedding,
        [config.hidden] * config.layers,
        "lstm",
        LSTMOptions(forget_bias=config.forget_bias),
    )
    w = b.param("output_w", [tokens_known, config.hidden])
    bias = b.param("output_b", [tokens_known], "ConstantFill", value=0.0)
    logits = b.FC([lstm.hidden_all, w, bias], "logits", axis=2)
    b.SoftmaxWithLoss([logits, targets], ["probabilities", "loss"], axis=2)
    last = [name for layer in lstm.layers for name in (layer.hidden_last, layer.cell_last)]
    states = {first: (name, config.hidden) for first, name in zip(initial, last)}
    feeds = {"tokens": "tokens", "targets": "targets"}
    return NetModel(b.build(outputs=["loss", *last]), b.build_init(), states, feeds, gradient)
