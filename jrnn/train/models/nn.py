"""Models whose recurrent layers come from `jrnn.nn`, as pure functions.

Shapes: T steps, B examples side by side, E embedding, H hidden, L layers, K directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.nn import Layout, functional
from jrnn.nn.units import GRU, LSTM, RNN_TANH
from jrnn.train.models.blocks import BlocksModel
from jrnn.train.models.interface import (
    DEFAULT,
    Carry,
    Compute,
    Embedding,
    LayersConfig,
    LayersModel,
    Params,
    Signature,
    dropout,
    no_times,
)
from jrnn.train.toml_codec import require

UNITS = {
    "lstm": (LSTM, functional.lstm),
    "gru": (GRU, functional.gru),
    "rnn": (RNN_TANH, functional.rnn),
}


@dataclass(frozen=True)
class NnConfig(LayersConfig):
    """Recurrent layers of `jrnn.nn` and an output layer."""

    kind: Literal["nn"] = "nn"
    cell: Literal[
        "lstm", "gru", "rnn", "min_gru", "min_lstm", "ind_rnn", "lru", "s5", "rg_lru", "slstm", "mlstm", "mamba", "mamba2",
        "retnet", "gla", "deltanet", "gated_deltanet", "rwkv7",
    ] = "lstm"  # fmt: skip
    heads: int = 1  # of the cells that have heads; it divides hidden
    bidirectional: bool = False  # only if the state is not carried on
    layer_norm: bool = False  # of the products inside the gates
    forget_bias: float = 1.0  # of an LSTM: the initial bias of the forget gate
    memory: int = 0  # initial biases of the gates make units forget within 1 to this number of steps; 0: no such biases

    def __post_init__(self):
        super().__post_init__()
        require(
            self.memory == 0 or self.memory > 2, "model.memory must be 0 or above 2", self.memory
        )
        require(
            not (self.memory and self.cell == "rnn"),
            "model.memory is for gates, which an rnn lacks",
            self.memory,
        )
        require(
            self.heads >= 1 and self.hidden % self.heads == 0,
            "model.heads must divide model.hidden",
            self.heads,
        )
        for name in () if self.cell in UNITS else ("bidirectional", "layer_norm", "memory"):
            require(
                not getattr(self, name),
                f"model.{name} is for the cells {', '.join(UNITS)}",
                getattr(self, name),
            )


@dataclass(frozen=True)
class TokenNnConfig(NnConfig, Embedding):
    """Embedding -> recurrent layers of `jrnn.nn` -> output layer."""


def nn_model(config: NnConfig, signature: Signature, compute: Compute = DEFAULT) -> Any:
    """Returns the model of a table [model] of kind `nn`."""
    return (NnModel if config.cell in UNITS else BlocksModel)(config, signature, compute)


@dataclass(frozen=True)
class NnModel(LayersModel):
    """(Embedding ->) layers -> output layer -> loss; the layers' parameters have PyTorch's names.

    Carry: `h` and, of an LSTM, `c`, [L, B, H]; empty if the signature carries no state.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.signature.dt:
            raise ConfigError(no_times(self.config.cell))
        if self.config.bidirectional and self.signature.carried:
            raise ConfigError(
                "model.bidirectional must be false if the state is carried on from batch to batch"
            )

    @cached_property
    def _layout(self) -> Layout:
        c = self.config
        unit, _ = UNITS[c.cell]
        options = {"bidirectional": c.bidirectional, "layer_norm": c.layer_norm}
        return Layout(unit, self._inputs, c.hidden, c.layers, **options)

    def init(self, key: Any) -> Params:
        of_layers, of_embedding, of_output, of_memory = jax.random.split(key, 4)
        params = self._layout.init(of_layers)
        for k, suffix in enumerate(self._layout.suffixes()):
            params |= self._gate_biases(suffix, params, jax.random.fold_in(of_memory, k))
        size = self.config.hidden * self._layout.directions
        return params | self._ends(of_embedding, of_output, size)

    def _gate_biases(self, suffix: str, params: Params, key: Any) -> Params:
        """Returns initial biases of the gates that keep the state: the forget bias, or the chrono initialization.

        Source: Tallec and Ollivier, Can recurrent neural networks warp time?, 2018: b_f = log u, b_i = -b_f, where u is
        uniform in [1, memory - 1]. A GRU's z, which keeps the state, has log u.
        """
        c = self.config
        h = self.config.hidden
        if c.cell == "rnn" or (c.cell == "gru" and not c.memory):
            return {}
        name = f"bias_ih{suffix}"
        zeros = jnp.zeros_like(params[f"bias_hh{suffix}"])
        gate = slice(h, 2 * h)  # an LSTM's f, a GRU's z
        if not c.memory:
            return {name: params[name].at[gate].set(c.forget_bias), f"bias_hh{suffix}": zeros}
        keep = jnp.log(jax.random.uniform(key, (h,), minval=1.0, maxval=c.memory - 1.0))
        bias = params[name].at[gate].set(keep)
        if c.cell == "lstm":
            bias = bias.at[:h].set(-keep)
        return {name: bias, f"bias_hh{suffix}": zeros}

    def initial_carry(self, examples: int) -> Carry:
        names = ("h", "c")[: self._layout.unit.states] if self.signature.carried else ()
        shape = (self.config.layers, examples, self.config.hidden)
        return {name: jnp.zeros(shape) for name in names}

    def _run(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        c = self.config
        dtype = self._dtype
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        looks_up = isinstance(c, Embedding) and (keys[0] is None or not c.embedding_dropout)
        x = batch.tokens if looks_up else self._embedded(params, batch, keys[0])
        of_layers = {name: params[name] for name in self._layout.shapes()}
        _, run = UNITS[c.cell]
        options = {"key": keys[1], "dropout": c.layer_dropout, "dtype": dtype}
        options["embedding"] = params["embedding"] if looks_up else None
        y, states = run(of_layers, x, _state(carry), **self._ragged(batch), **options)
        states = states if isinstance(states, tuple) else (states,)
        read = y if self.signature.every_step else _last(states[0], self._layout.directions)
        read = dropout(read, c.dropout, keys[2])
        output = self._output(params, read if dtype is None else read.astype(dtype))
        # By name: a carry that went through `jax.jit` has its names in alphabetical order, `c` before `h`.
        after = {}
        for name, leaf in carry.items():
            after[name] = states["hc".index(name)].astype(leaf.dtype)
        return output, after


def _state(carry: Carry) -> Any:
    """Returns the initial state as the functions of `jrnn.nn` take it."""
    if not carry:
        return None
    return (carry["h"], carry["c"]) if "c" in carry else carry["h"]


def _last(h: Any, directions: int) -> Any:
    """Returns the top layer's last hidden states, [L K, B, H] -> [B, K H]."""
    top = jnp.swapaxes(h[-directions:], 0, 1)
    return top.reshape(top.shape[0], -1)
