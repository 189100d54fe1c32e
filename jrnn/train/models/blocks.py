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
        takes_heads = "num_heads" in inspect.signature(cell).parameters
        return cell(
            c.hidden,
            dtype=self._dtype,
            rngs=rngs,
            **({"num_heads": c.heads} if takes_heads else {}),
        )

    def init(self, key: Any) -> Params:
        of_layers, of_embedding, of_input, of_output = jax.random.split(key, 4)
        params: Params = {}
        for k in range(self.config.layers):
            layer = self._new(nnx.Rngs(params=jax.random.fold_in(of_layers, k)))
            params |= {f"layers.{k}.{name}": value for name, value in layer.params().items()}
            params[f"norms.{k}"] = jnp.ones(self.config.hidden)
        initial = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=0)
        params["input_w"] = initial(of_input, (self.config.hidden, self._inputs))
        params["norm"] = jnp.ones(self.config.hidden)
        return params | self._ends(of_embedding, of_output, self.config.hidden)

    def _start(self, examples: int) -> list[Any]:
        return [
            self._layer._fresh(examples, jnp.dtype(jnp.float32)) for _ in range(self.config.layers)
        ]

    def initial_carry(self, examples: int) -> Carry:
        if not self.signature.carried:
            return {}
        leaves = jax.tree.leaves(self._start(examples))
        return {f"state{k}": leaf[None] for k, leaf in enumerate(leaves)}

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
            prefix = f"layers.{k}."
            own = {
                name.removeprefix(prefix): v
                for name, v in params.items()
                if name.startswith(prefix)
            }
            y, state = self._layer.apply(own, rms_norm(x, params[f"norms.{k}"]), state, **ragged)
            x = x + dropout(
                y.astype(x.dtype), c.layer_dropout if k + 1 < c.layers else 0.0, keys[k + 1]
            )
            states.append(state)
        x = rms_norm(x, params["norm"])
        if not self.signature.every_step:
            x = jnp.take_along_axis(x, _last_step(x.shape, ragged)[None, :, None], axis=0)[0]
        output = self._output(params, dropout(x, c.dropout, keys[-1]))
        return output, {
            f"state{k}": leaf[None] for k, leaf in enumerate(jax.tree.leaves(states)[: len(carry)])
        }


def _last_step(shape: tuple[int, ...], ragged: Mapping[str, Any]) -> Any:
    """The last step of each of B sequences that counts, [B]; 0 if there is none."""
    steps = jnp.arange(shape[0])[:, None]
    counts = jnp.ones(shape[:2], bool)
    if "lengths" in ragged:
        counts &= steps < jnp.asarray(ragged["lengths"])[None]
    if "mask" in ragged:
        counts &= ragged["mask"]
    return jnp.max(jnp.where(counts, steps, 0), axis=0)
