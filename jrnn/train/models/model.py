"""The interface of models: what training calls and what a task requires; and what several models share.

Shapes: T steps, B examples side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jrnn.train.toml_codec import require

Params = dict[str, Any]
Carry = dict[str, Any]
CARRY_AXIS = 1  # the axis of every array of a carry that holds the examples


@dataclass(frozen=True)
class Signature:
    """What goes into a model and what comes out of it.

    Attributes:
        tokens: the inputs are int32 [T, B], the member `tokens` of a batch, and are embedded; else they are float
            [T, B, inputs], the member `inputs`.
        inputs: how many tokens there are, or features of a step.
        outputs: how many tokens or classes there are, or how many values are predicted.
        every_step: there is an output for every step [T, B, ...]; else one for the whole sequence [B, ...].
        loss: against the member `targets`: the mean of -log softmax(outputs)[target] (int32), or of (output - target)^2.
        carried: the state goes on from batch to batch; else every batch starts anew, and nothing is carried.
        lengths: a batch has a member `lengths`, int32 [B]: how many steps of each sequence are valid.
        tokens_of_a_batch: T B, where it is known.
    """

    tokens: bool
    inputs: int
    outputs: int
    every_step: bool
    loss: Literal["cross_entropy", "squared_error"]
    carried: bool
    lengths: bool = False
    tokens_of_a_batch: int = 0


@dataclass(frozen=True)
class Compute:
    """How a model is computed.

    Attributes:
        gradient: "jax" or "net", as the key `gradient.source`.
        precision: "float32" or "bfloat16", as the key `train.precision`.
    """

    gradient: str = "jax"
    precision: str = "float32"


DEFAULT = Compute()


class Outcome(NamedTuple):
    """A batch's loss, the state after it, and the gradient of each parameter."""

    loss: Any
    carry: Carry
    gradients: Params


class Model(Protocol):
    """Pure functions of parameters, of a state that is carried from batch to batch, and of a batch.

    A batch is the NamedTuple of arrays that the model's task makes. A carry is a dict of arrays that hold the examples along
    CARRY_AXIS; it is empty where examples are independent. A key of None means evaluation: no dropout.
    """

    def init(self, key: Any) -> Params: ...

    def initial_carry(self, examples: int) -> Carry:
        """The state at the start, of so many examples side by side."""
        ...

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        """The loss [], a mean over the batch, and the state after it."""
        ...

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome: ...

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        """What the model puts out for a batch, whose targets may be None (logits, values), and the state after it."""
        ...


@dataclass(frozen=True)
class LayersConfig:
    """The keys that the tables [model] of `cells` and `nn` share."""

    hidden: int = 256
    layers: int = 1
    dropout: float = 0.0  # of the output of the layers
    layer_dropout: float = 0.0  # between layers

    def __post_init__(self):
        for name, value in vars(self).items():
            if name in ("hidden", "layers", "embedding"):
                require(value >= 1, f"model.{name} must be at least 1", value)
            elif name.endswith("dropout"):
                require(0 <= value < 1, f"model.{name} must lie in [0, 1)", value)
        rule = "model.layer_dropout is between layers, of which model.layers has 1, and must be 0 there"
        require(self.layers > 1 or not self.layer_dropout, rule, self.layer_dropout)


@dataclass(frozen=True)
class Embedding:
    """The keys of a `LayersConfig` whose inputs are tokens."""

    embedding: int = 64
    embedding_dropout: float = 0.0


def mean_loss(signature: Signature, outputs: Any, targets: Any) -> Any:
    """Returns the loss [] that `Signature.loss` names."""
    if signature.loss == "cross_entropy":
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))
    return jnp.mean(jnp.square(outputs - targets))


def gradients_of(loss: Callable, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
    """Differentiates the method `loss` of a model by JAX."""
    (value, carry), gradients = jax.value_and_grad(loss, has_aux=True)(params, carry, batch, key)
    return Outcome(value, carry, gradients)


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
        return gradients_of(self.loss, params, carry, batch, key)

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        return self.apply(params, batch, None), carry
