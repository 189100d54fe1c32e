"""A model that is a net, with both of its gradients at hand.

Shapes: B examples side by side, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ...autodiff import GradientSlice, add_gradients
from ...ir import Net
from ...lowering import to_jax
from .model import Carry, Outcome, Params


@dataclass(frozen=True)
class NetModel:
    """A model that is a net: `init_net` makes its parameters, and both gradients of `net` are at hand.

    states: for each initial-state blob, the blob that holds the state after the batch, and its size.
    feeds: for each further input of the net, the member of the batch that it is.
    gradient: "jax" differentiates the lowered net, "net" runs the backward operators that `add_gradients` appends.
    """

    net: Net
    init_net: Net
    states: Mapping[str, tuple[str, int]]
    feeds: Mapping[str, str]
    gradient: str = "jax"
    loss_blob: str = "loss"
    output_blob: str = "logits"

    def init(self, key: Any) -> Params:
        return to_jax(self.init_net)({}, key=key)

    def initial_carry(self, examples: int) -> Carry:
        return {name: jnp.zeros((1, examples, size)) for name, (_, size) in self.states.items()}

    @property
    def _last_states(self) -> list[str]:
        return [last for last, _ in self.states.values()]

    def _carry(self, blobs: Mapping[str, Any]) -> Carry:
        return {name: blobs[last] for name, (last, _) in self.states.items()}

    def _blobs(self, params: Params, carry: Carry, batch: Any) -> dict[str, Any]:
        fed = {blob: getattr(batch, member) for blob, member in self.feeds.items()}
        return {**params, **carry, **{blob: value for blob, value in fed.items() if value is not None}}

    @cached_property
    def _forward(self) -> Callable:
        return to_jax(self.net, [self.loss_blob, *self._last_states])

    @cached_property
    def _predict(self) -> Callable:
        return to_jax(self.net, [self.output_blob, *self._last_states])

    @cached_property
    def _backward(self) -> tuple[Callable, dict[str, Any]]:
        with_gradients, found = add_gradients(self.net, [self.loss_blob])
        gradients = {name: found[name] for name in self.init_net.external_outputs}
        blobs = [b for g in gradients.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
        return to_jax(with_gradients, [self.loss_blob, *self._last_states, *dict.fromkeys(blobs)]), gradients

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        blobs = self._forward(self._blobs(params, carry, batch), key=key)
        return blobs[self.loss_blob], self._carry(blobs)

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        if self.gradient == "jax":
            by_params = jax.value_and_grad(self.loss, has_aux=True)
            (loss, carry), gradients = by_params(params, carry, batch, key)
            return Outcome(loss, carry, gradients)
        backward, names = self._backward
        blobs = backward(self._blobs(params, carry, batch), key=key)
        gradients = {p: _dense(params[p], names[p], blobs) for p in params}
        return Outcome(blobs[self.loss_blob], self._carry(blobs), gradients)

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        blobs = self._predict(self._blobs(params, carry, batch))
        return blobs[self.output_blob], self._carry(blobs)


def _dense(param: Any, gradient: str | GradientSlice, blobs: Mapping[str, Any]) -> Any:
    """A gradient blob, or the rows of a sparse one added up in place."""
    if not isinstance(gradient, GradientSlice):
        return blobs[gradient]
    rows = jnp.reshape(blobs[gradient.values], (-1, *param.shape[1:]))
    return jnp.zeros_like(param).at[jnp.reshape(blobs[gradient.indices], -1)].add(rows)
