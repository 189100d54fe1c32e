"""What a family of models is: how its config is read, which tensors it has, and what it computes.

Shapes: T time, N batch, D the model's width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrnn.models.config import read_config
from jrnn.nn.span import Span

Shapes = dict[str, tuple[int, ...]]
State = dict[str, jax.Array]


def zeros(layers: int, shapes: Shapes, dtype: Any) -> State:
    """Zeros of these shapes for each layer, named as `of_layer` does."""
    return {f"{k}.{name}": jnp.zeros(shape, dtype) for k in range(layers) for name, shape in shapes.items()}


def of_layer(layer: int, own: State) -> State:
    """The arrays of one layer by their names in the whole state, as `3.conv`."""
    return {f"{layer}.{name}": leaf for name, leaf in own.items()}


def in_layer(layer: int, state: State) -> State:
    """The arrays of one layer, by the rest of their names."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): leaf for name, leaf in state.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Family:
    """A family of models, by the `model_type` of config.json.

    Attributes:
        name: the `model_type`.
        config: a frozen dataclass, whose fields are the keys of config.json that count.
        ignored: further keys, which have no effect here.
        check: raises a ConfigError if the config is not supported; gets the config and the place for messages.
        tensors: the shape of each tensor of the files but the output layer, by the files' names.
        embedding, head: the names of the embedding [V, D] and of the output layer [V, D].
        fresh: `(config, batch, dtype)` -> the state before the first token: arrays [N, ...] by name. If the family
            `remembers` all tokens, with a fourth argument: how many tokens the state has room for.
        run: `(config, weights, x [T, N, D], state, span)` -> hidden values [T, N, D] and the next state.
        logits: what follows the output layer, such as a soft cap; `(config, logits) -> logits`.
        stacked: names of parameters, each of which stacks tensors of the files, for experts.
        renamed: beginnings of names in older files, and what they are now.
        unused: beginnings of names of tensors that are not read.
        remembers: whether the state grows with the tokens, because a layer attends to all of them.
    """

    name: str
    config: type
    tensors: Callable[[Any], Shapes]
    embedding: str
    head: str
    fresh: Callable[..., State]
    run: Callable[[Any, Weights, jax.Array, State, Span], tuple[jax.Array, State]]
    ignored: str = ""
    check: Callable[[Any, str], None] = lambda config, where: None
    logits: Callable[[Any, jax.Array], jax.Array] = lambda config, logits: logits
    stacked: Callable[[Any], dict[str, list[str]]] = lambda config: {}
    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    remembers: bool = False

    def read(self, given: Mapping[str, Any], where: str) -> Any:
        """The config from the keys of config.json."""
        config = read_config(self.config, given, self.ignored, where)
        self.check(config, where)
        return config

    def shapes(self, config: Any) -> Shapes:
        """The shape of every tensor of the files, with the output layer if it is not the embedding."""
        tied = {} if config.tie_word_embeddings else {self.head: (config.vocab_size, config.hidden_size)}
        return self.tensors(config) | tied

    def parameters(self, config: Any) -> dict[str, list[str]]:
        """The names of parameters, and of the tensors of the files that each stacks, or its own name alone."""
        stacked = self.stacked(config)
        inside = {name for parts in stacked.values() for name in parts}
        return {name: [name] for name in self.shapes(config) if name not in inside} | stacked


class Weights(NamedTuple):
    """The parameters whose names begin with a prefix, by the rest of their names."""

    params: Mapping[str, jax.Array]
    prefix: str = ""

    def __getitem__(self, name: str) -> jax.Array:  # type: ignore[override]
        return self.params[self.prefix + name]

    def get(self, name: str) -> jax.Array | None:
        return self.params.get(self.prefix + name)

    def at(self, more: str) -> Weights:
        return Weights(self.params, f"{self.prefix}{more}.")

    def linear(self, span: Span, name: str, x: jax.Array) -> jax.Array:
        """x weight^T + bias, where the bias is optional."""
        return span.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))
