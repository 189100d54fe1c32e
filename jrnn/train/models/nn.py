"""Models whose recurrent layers are those of `jrnn.nn`, as pure functions.

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
from jrnn.train.models.model import (
    DEFAULT,
    Carry,
    Compute,
    Embedding,
    LayersConfig,
    Outcome,
    Params,
    Signature,
    dropout,
    gradients_of,
    mean_loss,
)
from jrnn.train.toml_codec import require

UNITS = {"lstm": (LSTM, functional.lstm), "gru": (GRU, functional.gru), "rnn": (RNN_TANH, functional.rnn)}


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
    memory: int = 0  # initial biases of the gates make units forget within 1 to so many steps; 0: no such biases

    def __post_init__(self):
        super().__post_init__()
        require(self.memory == 0 or self.memory > 2, "model.memory must be 0 or above 2", self.memory)
        require(not (self.memory and self.cell == "rnn"), "model.memory is for gates, which an rnn lacks", self.memory)
        require(self.heads >= 1 and self.hidden % self.heads == 0, "model.heads must divide model.hidden", self.heads)
        for name in () if self.cell in UNITS else ("bidirectional", "layer_norm", "memory"):
            require(not getattr(self, name), f"model.{name} is for the cells {', '.join(UNITS)}", getattr(self, name))


@dataclass(frozen=True)
class TokenNnConfig(NnConfig, Embedding):
    """Embedding -> recurrent layers of `jrnn.nn` -> output layer."""


def nn_model(config: NnConfig, signature: Signature, compute: Compute = DEFAULT) -> Any:
    """Returns the model of a table [model] of kind `nn`."""
    return (NnModel if config.cell in UNITS else BlocksModel)(config, signature, compute)


@dataclass(frozen=True)
class NnModel:
    """(Embedding ->) layers -> output layer -> loss; the layers' parameters have PyTorch's names.

    Carry: `h` and, of an LSTM, `c`, [L, B, H]; empty if the signature carries no state.
    """

    config: NnConfig
    signature: Signature
    compute: Compute = DEFAULT

    def __post_init__(self):
        if self.compute.gradient != "jax":
            raise ConfigError('gradient.source = "net" needs a model that is a net: use model.kind = "cells"')
        if self.config.bidirectional and self.signature.carried:
            raise ConfigError("model.bidirectional must be false if the state is carried on from batch to batch")

    @cached_property
    def _layout(self) -> Layout:
        c = self.config
        size = c.embedding if isinstance(c, Embedding) else self.signature.inputs
        unit, _ = UNITS[c.cell]
        return Layout(unit, size, c.hidden, c.layers, bidirectional=c.bidirectional, layer_norm=c.layer_norm)

    def init(self, key: Any) -> Params:
        of_layers, of_embedding, of_output, of_memory = jax.random.split(key, 4)
        params = self._layout.init(of_layers)
        for k, suffix in enumerate(self._layout.suffixes()):
            params |= self._gate_biases(suffix, params, jax.random.fold_in(of_memory, k))
        if isinstance(self.config, Embedding):
            params["embedding"] = jax.random.normal(of_embedding, (self.signature.inputs, self.config.embedding))
        size = self.config.hidden * self._layout.directions
        initial = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=0)
        params["output_w"] = initial(of_output, (self.signature.outputs, size))
        params["output_b"] = jnp.zeros(self.signature.outputs)
        return params

    def _gate_biases(self, suffix: str, params: Params, key: Any) -> Params:
        """Returns initial biases of the gates that keep the state: the forget bias, or the chrono initialization.

        Source: Tallec and Ollivier, Can recurrent neural networks warp time?, 2018: b_f = log u, b_i = -b_f, where u is
        uniform in [1, memory - 1]. A GRU's z, which keeps the state, has log u.
        """
        c, h = self.config, self.config.hidden
        if c.cell == "rnn" or (c.cell == "gru" and not c.memory):
            return {}
        name, zeros = f"bias_ih{suffix}", jnp.zeros_like(params[f"bias_hh{suffix}"])
        gate = slice(h, 2 * h)  # an LSTM's f, a GRU's z
        if not c.memory:
            return {name: params[name].at[gate].set(c.forget_bias), f"bias_hh{suffix}": zeros}
        keep = jnp.log(jax.random.uniform(key, (h,), minval=1.0, maxval=c.memory - 1.0))
        bias = params[name].at[gate].set(keep)
        return {name: bias.at[:h].set(-keep) if c.cell == "lstm" else bias, f"bias_hh{suffix}": zeros}

    def initial_carry(self, examples: int) -> Carry:
        names = ("h", "c")[: self._layout.unit.states] if self.signature.carried else ()
        return {name: jnp.zeros((self.config.layers, examples, self.config.hidden)) for name in names}

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        output, carry = self._run(params, carry, batch, key)
        return mean_loss(self.signature, output, batch.targets), carry

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        return gradients_of(self.loss, params, carry, batch, key)

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        return self._run(params, carry, batch, None)

    def _run(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        c, signature = self.config, self.signature
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        if isinstance(c, Embedding):
            x = dropout(params["embedding"][batch.tokens], c.embedding_dropout, keys[0])
        else:
            x = jnp.asarray(batch.inputs)
        dtype = None if self.compute.precision == "float32" else jnp.dtype(self.compute.precision)
        of_layers = {name: params[name] for name in self._layout.shapes()}
        _, run = UNITS[c.cell]
        lengths = batch.lengths if signature.lengths else None
        resets = batch.resets if signature.resets else None
        options = {"key": keys[1], "dropout": c.layer_dropout, "dtype": dtype}
        y, states = run(of_layers, x, _state(carry), lengths=lengths, resets=resets, **options)
        states = states if isinstance(states, tuple) else (states,)
        read = y if signature.every_step else _last(states[0], self._layout.directions)
        read = dropout(read, c.dropout, keys[2])
        w = params["output_w"]
        if dtype is not None:
            read, w = read.astype(dtype), w.astype(dtype)
        output = jnp.matmul(read, w.T, preferred_element_type=None if dtype is None else jnp.float32)
        bias = jnp.expand_dims(params["output_b"], tuple(range(output.ndim - 1)))
        return output + bias, {name: states[k].astype(carry[name].dtype) for k, name in enumerate(carry)}


def _state(carry: Carry) -> Any:
    """Returns the initial state as the functions of `jrnn.nn` take it."""
    if not carry:
        return None
    return (carry["h"], carry["c"]) if "c" in carry else carry["h"]


def _last(h: Any, directions: int) -> Any:
    """Returns the top layer's last hidden states, [L K, B, H] -> [B, K H]."""
    return jnp.concatenate(list(h[-directions:]), axis=-1)
