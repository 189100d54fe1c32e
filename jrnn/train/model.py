"""What the training loop asks of a model, and the model that is a net.

Shapes: T characters in a chunk, B streams, V characters known, E embedding, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..autodiff import GradientSlice, add_gradients
from ..builder import NetBuilder
from ..cells import LSTM, LSTMOptions
from ..ir import Net
from ..lowering import to_jax
from .config import ModelConfig
from .text import Chunk

Params = dict[str, Any]
Carry = dict[str, Any]


class Outcome(NamedTuple):
    """A chunk's loss in nats a character, the state after it, and the gradient of each parameter."""

    loss: Any
    carry: Carry
    gradients: Params


class Model(Protocol):
    """Pure functions of parameters, of a state that is carried from chunk to chunk, and of a chunk."""

    def init(self, key: Any) -> Params: ...

    def initial_carry(self, streams: int) -> Carry:
        """The state at the start of `streams` texts."""
        ...

    def loss(self, params: Params, carry: Carry, chunk: Chunk, key: Any) -> tuple[Any, Carry]: ...

    def gradients(self, params: Params, carry: Carry, chunk: Chunk, key: Any) -> Outcome: ...

    def predict(self, params: Params, carry: Carry, tokens: Any) -> tuple[Any, Carry]:
        """Logits [T, B, V] of the characters that follow `tokens` [T, B], and the state after them."""
        ...


@dataclass(frozen=True)
class NetModel:
    """A model that is a net: `init_net` makes its parameters, and both gradients of `net` are at hand.

    states: for each initial-state blob, the blob that holds the state after the chunk, and its size.
    gradient: "jax" differentiates the lowered net, "net" runs the backward operators that `add_gradients` appends.
    """

    net: Net
    init_net: Net
    states: Mapping[str, tuple[str, int]]
    gradient: str = "jax"
    loss_blob: str = "loss"
    logits_blob: str = "logits"

    def init(self, key: Any) -> Params:
        return to_jax(self.init_net)({}, key=key)

    def initial_carry(self, streams: int) -> Carry:
        return {name: jnp.zeros((1, streams, size)) for name, (_, size) in self.states.items()}

    @property
    def _last_states(self) -> list[str]:
        return [last for last, _ in self.states.values()]

    def _carry(self, blobs: Mapping[str, Any]) -> Carry:
        return {name: blobs[last] for name, (last, _) in self.states.items()}

    @cached_property
    def _forward(self) -> Callable:
        return to_jax(self.net, [self.loss_blob, *self._last_states])

    @cached_property
    def _predict(self) -> Callable:
        return to_jax(self.net, [self.logits_blob, *self._last_states])

    @cached_property
    def _backward(self) -> tuple[Callable, dict[str, Any]]:
        with_gradients, found = add_gradients(self.net, [self.loss_blob])
        gradients = {name: found[name] for name in self.init_net.external_outputs}
        blobs = [b for g in gradients.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
        return to_jax(with_gradients, [self.loss_blob, *self._last_states, *dict.fromkeys(blobs)]), gradients

    def loss(self, params: Params, carry: Carry, chunk: Chunk, key: Any) -> tuple[Any, Carry]:
        blobs = self._forward({**params, **carry, "tokens": chunk.tokens, "targets": chunk.targets}, key=key)
        return blobs[self.loss_blob], self._carry(blobs)

    def gradients(self, params: Params, carry: Carry, chunk: Chunk, key: Any) -> Outcome:
        if self.gradient == "jax":
            by_params = jax.value_and_grad(self.loss, has_aux=True)
            (loss, carry), gradients = by_params(params, carry, chunk, key)
            return Outcome(loss, carry, gradients)
        backward, names = self._backward
        blobs = backward({**params, **carry, "tokens": chunk.tokens, "targets": chunk.targets}, key=key)
        gradients = {p: _dense(params[p], names[p], blobs) for p in params}
        return Outcome(blobs[self.loss_blob], self._carry(blobs), gradients)

    def predict(self, params: Params, carry: Carry, tokens: Any) -> tuple[Any, Carry]:
        blobs = self._predict({**params, **carry, "tokens": tokens})
        return blobs[self.logits_blob], self._carry(blobs)


def _dense(param: Any, gradient: str | GradientSlice, blobs: Mapping[str, Any]) -> Any:
    """A gradient blob, or the rows of a sparse one added up in place."""
    if not isinstance(gradient, GradientSlice):
        return blobs[gradient]
    rows = jnp.reshape(blobs[gradient.values], (-1, *param.shape[1:]))
    return jnp.zeros_like(param).at[jnp.reshape(blobs[gradient.indices], -1)].add(rows)


def char_lstm(config: ModelConfig, characters: int, gradient: str = "jax") -> NetModel:
    """A character language model as one net: Gather -> LSTM layers -> FC -> SoftmaxWithLoss.

    Blobs: `tokens` and `targets` int32 [T, B] -> `logits` [T, B, V], `loss` []; the state of layer k goes in as
    `hidden_k` and `cell_k`, [1, B, H].
    """
    b = NetBuilder("char_lstm")
    tokens, targets = b.input("tokens"), b.input("targets")
    embedding = b.param("embedding", [characters, config.embedding], "GaussianFill", std=1.0)
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
    w = b.param("output_w", [characters, config.hidden])
    bias = b.param("output_b", [characters], "ConstantFill", value=0.0)
    logits = b.FC([lstm.hidden_all, w, bias], "logits", axis=2)
    b.SoftmaxWithLoss([logits, targets], ["probabilities", "loss"], axis=2)
    last = [name for layer in lstm.layers for name in (layer.hidden_last, layer.cell_last)]
    states = {first: (name, config.hidden) for first, name in zip(initial, last)}
    return NetModel(b.build(outputs=["loss", *last]), b.build_init(), states, gradient)
