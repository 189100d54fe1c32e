"""A user's model from two functions, and the loss that a signature requires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrnn.train.models.model import Carry, Outcome, Params, Signature


def mean_loss(signature: Signature, outputs: Any, targets: Any) -> Any:
    """The loss [] that a signature asks for; see `Signature.loss`."""
    if signature.loss == "cross_entropy":
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))
    return jnp.mean(jnp.square(outputs - targets))


@dataclass(frozen=True)
class FunctionModel:
    """See `Model`: of independent examples, differentiated by JAX.

    Attributes:
        start: the first parameters, a dict of arrays, from a key.
        apply: `(params, batch, key) -> outputs`, of the shape that the signature says; without randomness where the key is
            None.
        signature: what goes in and comes out.
    """

    start: Callable[[Any], Params]
    apply: Callable[[Params, Any, Any], Any]
    signature: Signature

    def init(self, key: Any) -> Params:
        return self.start(key)

    def initial_carry(self, examples: int) -> Carry:
        return {}

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        return mean_loss(self.signature, self.apply(params, batch, key), batch.targets), carry

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        (loss, carry), gradients = jax.value_and_grad(self.loss, has_aux=True)(params, carry, batch, key)
        return Outcome(loss, carry, gradients)

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        return self.apply(params, batch, None), carry
