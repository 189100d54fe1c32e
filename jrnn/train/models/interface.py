"""The interface of models: what training calls and what a task requires; and what several models share.

Shapes: T steps, B examples side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrnn.errors import ConfigError
from jrnn.train.toml_codec import require

Params = dict[str, Any]
Carry = dict[str, Any]
Outputs = tuple[Any, Carry]  # a loss or predictions, and the next carry
CARRY_AXIS = 1  # the axis of every array of a carry that holds the examples


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        tokens: whether the inputs are tokens to embed: the member `tokens` of a batch, int32 [T, B]. Otherwise they are
            the member `inputs`, float [T, B, inputs].
        inputs: the number of known tokens, or of features of a step.
        outputs: the number of tokens, classes or predicted values.
        every_step: whether there is an output for every step [T, B, ...], or one for the whole sequence [B, ...].
        loss: the mean of -log softmax(outputs)[target] or of (output - target)^2, against the member `targets`.
        carried: whether the state is carried from batch to batch, or every batch starts with the initial state.
        lengths: whether a batch has a member `lengths`, int32 [B], the number of valid steps of each sequence.
        resets: whether a batch has a member `resets`, bool [T, B], the steps before which the state restarts.
        mask: whether a batch has a member `mask`, bool [T, B], True where a step counts.
        dt: whether a batch has a member `dt`, float [T, B], the time since the last step that counts.
        tokens_of_a_batch: T B if it is known, else 0.
    """

    tokens: bool
    inputs: int
    outputs: int
    every_step: bool = False
    loss: Literal["cross_entropy", "squared_error"] = "cross_entropy"
    carried: bool = False
    lengths: bool = False
    resets: bool = False
    mask: bool = False
    dt: bool = False
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

    A batch is the NamedTuple of arrays that the model's task makes. A carry is a dict of arrays with the examples along
    CARRY_AXIS; it is empty if examples are independent. A key of None means evaluation: no dropout.
    """

    def init(self, key: Any) -> Params: ...

    def initial_carry(self, examples: int) -> Carry:
        """Returns the initial state for this number of examples."""
        return {}

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        """Returns the loss [], a mean over the batch, and the state after it."""
        ...

    def count(self, batch: Any) -> Any:
        """Returns how many values the mean `loss` of a batch is over; None: all examples count the same.

        The loss of several batches is the mean over the values of all of them. So a loss that leaves values out, as with a
        mask, has to say how many it reads.
        """
        return None

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        """By default, JAX differentiates `loss`."""
        (value, carry), gradients = jax.value_and_grad(self.loss, has_aux=True)(
            params, carry, batch, key
        )
        return Outcome(value, carry, gradients)

    def predict(self, params: Params, carry: Carry, batch: Any) -> Outputs:
        """Returns the logits or values for a batch, whose targets may be None, and the state after it."""
        ...


@dataclass(frozen=True)
class LayersConfig:
    """The keys that the tables [model] of `cells` and `nn` share."""

    hidden: int = 256  # units of a layer
    layers: int = 1  # layers on top of each other
    dropout: float = 0.0  # of the output of the layers
    layer_dropout: float = 0.0  # between layers

    def __post_init__(self):
        for name, value in vars(self).items():
            if name in ("hidden", "layers", "embedding"):
                require(value >= 1, f"model.{name} must be at least 1", value)
            elif name.endswith("dropout"):
                require(0 <= value < 1, f"model.{name} must lie in [0, 1)", value)
        rule = "model.layer_dropout acts between layers; with model.layers = 1 it must be 0"
        require(self.layers > 1 or not self.layer_dropout, rule, self.layer_dropout)


@dataclass(frozen=True)
class Embedding:
    """The keys of a `LayersConfig` whose inputs are tokens."""

    embedding: int = 64  # size of a token's vector; of models of tokens alone
    embedding_dropout: float = 0.0  # of those vectors


class OutputsModel(Model, ABC):
    """A model with one computation, `_run`, of the outputs that the loss and predictions read."""

    signature: Signature

    @abstractmethod
    def _run(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        """Returns the outputs and the state after the batch."""

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        output, carry = self._run(params, carry, batch, key)
        return mean_loss(self.signature, output, batch.targets), carry

    def count(self, batch: Any) -> Any:
        return known_targets(self.signature, batch.targets)

    def predict(self, params: Params, carry: Carry, batch: Any) -> Outputs:
        return self._run(params, carry, batch, None)


@dataclass(frozen=True)
class LayersModel(OutputsModel):
    """What models of layers share: an embedding before them, an output layer after them, and JAX's gradients.

    Attributes:
        config: the table [model], a `LayersConfig`.
        signature: the inputs and outputs.
        compute: how the model is computed.
    """

    config: Any
    signature: Signature
    compute: Compute = DEFAULT

    def __post_init__(self):
        if self.compute.gradient != "jax":
            raise ConfigError(
                'gradient.source = "net" needs a model that is a net: use model.kind = "cells"'
            )

    def with_signature(self, signature: Signature) -> LayersModel:
        """The model of the same parameters for other inputs and outputs, such as a carried state; for serving."""
        return replace(self, signature=signature)

    @property
    def _dtype(self) -> Any:
        """The type of products and activations; None: float32."""
        return None if self.compute.precision == "float32" else jnp.dtype(self.compute.precision)

    @property
    def _inputs(self) -> int:
        """Features of what `_embedded` returns."""
        if isinstance(self.config, Embedding):
            return self.config.embedding
        return self.signature.inputs

    def _ends(self, of_embedding: Any, of_output: Any, size: int) -> Params:
        """The parameters of the embedding, and of an output layer of values [.., size], from two keys."""
        params: Params = {}
        if isinstance(self.config, Embedding):
            shape = (self.signature.inputs, self.config.embedding)
            params["embedding"] = jax.random.normal(of_embedding, shape)
        initial = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=0)
        outputs = self.signature.outputs
        return params | {
            "output_w": initial(of_output, (outputs, size)),
            "output_b": jnp.zeros(outputs),
        }

    def _embedded(self, params: Params, batch: Any, key: Any) -> Any:
        """The inputs of the layers, [T, B, features]."""
        if isinstance(self.config, Embedding):
            return dropout(params["embedding"][batch.tokens], self.config.embedding_dropout, key)
        return jnp.asarray(batch.inputs)

    def _ragged(self, batch: Any) -> dict[str, Any]:
        """The lengths, resets, mask and times of a batch that the signature has."""
        members = {}
        for name in ("lengths", "resets", "mask", "dt"):
            if getattr(self.signature, name):
                members[name] = getattr(batch, name)
        return members

    def _output(self, params: Params, x: Any) -> Any:
        """The output layer of x [..., size]; its products are of x's type, its sums of the parameters'."""
        w = params["output_w"]
        bias = jnp.expand_dims(params["output_b"], tuple(range(x.ndim - 1)))
        return jnp.matmul(x, w.astype(x.dtype).T, preferred_element_type=w.dtype) + bias


def mean_loss(signature: Signature, outputs: Any, targets: Any) -> Any:
    """Returns the loss [] that `Signature.loss` names. A target value that is NaN is not known, and is left out."""
    if signature.loss == "cross_entropy":
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))
    known = ~jnp.isnan(targets)
    errors = jnp.where(known, outputs - jnp.where(known, targets, 0), 0)
    return jnp.sum(jnp.square(errors)) / jnp.maximum(jnp.sum(known), 1)


def known_targets(signature: Signature, targets: Any) -> Any:
    """Returns how many values `mean_loss` is the mean over."""
    if signature.loss == "cross_entropy":
        return np.size(targets)
    return jnp.sum(~jnp.isnan(targets))


def no_times(cell: str) -> str:
    """The message for a cell without time between its steps."""
    return (
        f'the rows of data.time are not equally spaced, and model.cell = "{cell}" reads no times: use '
        '"lru", "s5", "mamba" or "mamba2"; or leave out data.time, and rows count as equally spaced'
    )


def dropout(x: Any, ratio: float, key: Any) -> Any:
    """Sets values to 0 with the probability `ratio`, and scales the others; without a key returns x."""
    if key is None or not ratio:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - ratio, x.shape), x / (1 - ratio), 0)


@dataclass(frozen=True)
class FunctionModel(OutputsModel):
    """A `Model` of independent examples from two functions, differentiated by JAX.

    Attributes:
        start: `key -> params`, the initial parameters, a dict of arrays.
        apply: `(params, batch, key) -> outputs` with the shape that the signature requires; deterministic if the key is
            None.
        signature: the inputs and outputs.
    """

    start: Callable[[Any], Params]
    apply: Callable[[Params, Any, Any], Any]
    signature: Signature

    def init(self, key: Any) -> Params:
        return self.start(key)

    def _run(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        return self.apply(params, batch, key), carry
