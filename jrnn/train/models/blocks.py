"""Models of the layers of `jrnn.nn.families`: residual blocks, each a norm and a layer.

Shapes: T steps, B examples side by side, E embedding, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrnn import nn
from jrnn.errors import ConfigError
from jrnn.nn.families import CELLS
from jrnn.nn.span import rms_norm
from jrnn.train.models.interface import Carry, LayersModel, Params, dropout, no_times


@dataclass(frozen=True)
class BlocksModel(LayersModel):
    """(Embedding ->) a product -> L times x + layer(norm(x)) -> norm -> output layer -> loss.

    The parameters of layer k are named `layers.K.NAME`. Carry: the leaves of the layers' states, [1, B, ...] each; empty if
    the signature carries no state.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.signature.dt and not self._layer._timed:
            raise ConfigError(no_times(self.config.cell))

    @cached_property
    def _layer(self) -> nn.RecurrentLayer:
        """The layer, for its sizes and formula; its parameters have no values."""
        return nnx.eval_shape(lambda: self._new(nnx.Rngs(0)))

    def _new(self, rngs: nnx.Rngs) -> nn.RecurrentLayer:
        cell = CELLS[self.config.cell]
        c = self.config
        options = {"dtype": self._dtype, "rngs": rngs}
        if "num_heads" in inspect.signature(cell).parameters:
            options["num_heads"] = c.heads
        return cell(c.hidden, **options)

    def init(self, key: Any) -> Params:
        of_layers, of_embedding, of_input, of_output = jax.random.split(key, 4)
        params: Params = {}
        for k in range(self.config.layers):
            layer = self._new(nnx.Rngs(params=jax.random.fold_in(of_layers, k)))
            for name, value in layer.params().items():
                params[f"layers.{k}.{name}"] = value
            params[f"norms.{k}"] = jnp.ones(self.config.hidden)
        initial = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=0)
        params["input_w"] = initial(of_input, (self.config.hidden, self._inputs))
        params["norm"] = jnp.ones(self.config.hidden)
        return params | self._ends(of_embedding, of_output, self.config.hidden)

    def _start(self, examples: int) -> list[Any]:
        dtype = jnp.dtype(jnp.float32)
        return [self._layer._fresh(examples, dtype) for _ in range(self.config.layers)]

    def initial_carry(self, examples: int) -> Carry:
        return _carry(self._start(examples)) if self.signature.carried else {}

    def _run(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        c = self.config
        ragged = self._ragged(batch)
        keys = [None] * (c.layers + 2) if key is None else jax.random.split(key, c.layers + 2)
        x = self._embedded(params, batch, keys[0]) @ params["input_w"].T
        start = self._start(x.shape[1])
        if carry:
            leaves = [carry[f"state{k}"][0] for k in range(len(carry))]
            start = jax.tree.unflatten(jax.tree.structure(start), leaves)
        states = []
        for k, state in enumerate(start):
            own = _params_of(f"layers.{k}.", params)
            y, state = self._layer.apply(own, rms_norm(x, params[f"norms.{k}"]), state, **ragged)
            ratio = c.layer_dropout if k + 1 < c.layers else 0.0
            x = x + dropout(y.astype(x.dtype), ratio, keys[k + 1])
            states.append(state)
        x = rms_norm(x, params["norm"])
        if not self.signature.every_step:
            x = jnp.take_along_axis(x, _last_step(x.shape, ragged)[None, :, None], axis=0)[0]
        output = self._output(params, dropout(x, c.dropout, keys[-1]))
        return output, _carry(states) if carry else {}


def _carry(states: list[Any]) -> Carry:
    """Returns the states of all layers as a carry."""
    return {f"state{k}": leaf[None] for k, leaf in enumerate(jax.tree.leaves(states))}


def _params_of(prefix: str, params: Params) -> Params:
    """Returns the parameters whose names have a prefix, by the rest of their names."""
    rest = {}
    for name, value in params.items():
        if name.startswith(prefix):
            rest[name.removeprefix(prefix)] = value
    return rest


def _last_step(shape: tuple[int, ...], ragged: Mapping[str, Any]) -> Any:
    """The last step of each of B sequences that counts, [B]; 0 if there is none."""
    steps = jnp.arange(shape[0])[:, None]
    counts = jnp.ones(shape[:2], bool)
    if "lengths" in ragged:
        counts &= steps < jnp.asarray(ragged["lengths"])[None]
    if "mask" in ragged:
        counts &= ragged["mask"]
    return jnp.max(jnp.where(counts, steps, 0), axis=0)
