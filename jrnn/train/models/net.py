"""A model that is a net, with both of its gradients.

Shapes: B examples side by side, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.convert import Package, export_package
from jrnn.errors import ConfigError
from jrnn.jaxprs.queries import is_floating
from jrnn.nets import registry
from jrnn.nets.autodiff import GradientSlice, add_gradients
from jrnn.nets.blobs import dense
from jrnn.nets.graph import extract_sub_net
from jrnn.nets.ir import Net, Op, Values
from jrnn.nets.lowering import to_jax
from jrnn.train.models.interface import (
    DEFAULT,
    Carry,
    Compute,
    Model,
    Outcome,
    Outputs,
    Params,
    Signature,
)


@dataclass(frozen=True)
class NetModel(Model):
    """A model that is a net.

    Attributes:
        init_net: makes the parameters and the `constants`.
        states: for each blob of a first state, the blob of the state after the batch, and its size.
        feeds: for each other input of the net, its member of the batch.
        targets: the inputs that only the loss reads.
        constants: the blobs of `init_net` that are not trained.
        signature: the inputs and outputs, of a model that maps one sequence to outputs.
        rebuild: the net for another signature, with the same parameters; None if there is no other.
        whole: the net to export, which may have more outputs than training needs; None: the same.
    """

    net: Net
    init_net: Net
    states: Mapping[str, tuple[str, int]]
    feeds: Mapping[str, str]
    compute: Compute = DEFAULT
    loss_blob: str = "loss"
    output_blob: str = "logits"
    targets: tuple[str, ...] = ("targets",)
    constants: Mapping[str, Any] = field(default_factory=dict)
    signature: Signature | None = None
    rebuild: Callable[[Signature], NetModel] | None = None
    whole: Net | None = None

    def with_signature(self, signature: Signature) -> NetModel:
        """The model of the same parameters for other inputs and outputs; ConfigError if the net is what it is."""
        if self.rebuild is None or signature.resets:
            lacks = "resets" if self.rebuild is not None else "such inputs or states"
            raise ConfigError(f"the net of this model has no {lacks}")
        return self.rebuild(signature)

    def init(self, key: Any) -> Params:
        blobs = to_jax(self.init_net)({}, key=key)
        return {name: blobs[name] for name in self._trained}

    def initial_carry(self, examples: int) -> Carry:
        return {name: jnp.zeros((1, examples, size)) for name, (_, size) in self.states.items()}

    @property
    def _last_states(self) -> list[str]:
        return [last for last, _ in self.states.values()]

    def _carry(self, blobs: Mapping[str, Any], like: Carry) -> Carry:
        carry = {}
        for name, (last, _) in self.states.items():
            carry[name] = blobs[last].astype(like[name].dtype)
        return carry

    def _blobs(self, params: Params, carry: Carry, batch: Any) -> Values:
        given = {**self.constants, **params, **carry}
        for blob, member in self.feeds.items():
            value = getattr(batch, member)
            if value is not None:
                given[blob] = value
        if self.compute.precision != "float32":
            for blob, value in given.items():
                if blob not in self.targets:
                    given[blob] = _in(self.compute.precision, value)
        return given

    def _net(self, key: Any) -> Net:
        return self.net if key is not None else self._evaluation

    @cached_property
    def _evaluation(self) -> Net:
        return for_evaluation(self.net)

    @property
    def _trained(self) -> list[str]:
        return [name for name in self.init_net.external_outputs if name not in self.constants]

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        net = self._net(key)
        given = self._blobs(params, carry, batch)
        if self.compute.precision == "float32":
            blobs = to_jax(net, [self.loss_blob, *self._last_states])(given, key=key)
            return blobs[self.loss_blob], self._carry(blobs, carry)
        blobs = to_jax(net, [self.output_blob, *self._last_states])(given, key=key)
        fed = {blob: given[blob] for blob in self.targets}
        fed[self.output_blob] = blobs[self.output_blob].astype(jnp.float32)
        # The loss itself keeps its precision.
        end = extract_sub_net(net, list(fed), [self.loss_blob])
        loss = to_jax(end, [self.loss_blob])(fed, key=key)[self.loss_blob]
        return loss, self._carry(blobs, carry)

    def count(self, batch: Any) -> Any:
        return np.size(batch.targets)

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        if self.compute.gradient == "jax":
            return super().gradients(params, carry, batch, key)
        net, grads = add_gradients(self._net(key), [self.loss_blob])
        wanted: dict[str, None] = {}
        for name in self._trained:
            gradient = grads[name]
            blobs_of = gradient if isinstance(gradient, GradientSlice) else (gradient,)
            wanted |= dict.fromkeys(blobs_of)
        backward = to_jax(net, [self.loss_blob, *self._last_states, *wanted])
        blobs = backward(self._blobs(params, carry, batch), key=key)
        gradients = {name: dense(grads[name], blobs, params[name]) for name in params}
        return Outcome(blobs[self.loss_blob], self._carry(blobs, carry), gradients)

    def with_backward(
        self, params: Params, carry: Carry, batch: Any, key: Any
    ) -> tuple[Net, Values]:
        """Returns the net with its backward operators, and its inputs."""
        return add_gradients(self._net(key), [self.loss_blob])[0], self._blobs(params, carry, batch)

    def predict(self, params: Params, carry: Carry, batch: Any) -> Outputs:
        wanted = [self.output_blob, *self._last_states]
        blobs = to_jax(self._evaluation, wanted)(self._blobs(params, carry, batch))
        return blobs[self.output_blob].astype(jnp.float32), self._carry(blobs, carry)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the exported net: the logits or values, and the states after a batch."""
        return (self.output_blob, *self._last_states)

    def package(self, params: Params) -> Package:
        """Returns an init net that fills the parameters, and a net from inputs and states to `outputs`."""
        inputs = [blob for blob in (*self.feeds, *self.states) if blob not in self.targets]
        net = for_evaluation(self.whole or self.net)
        return export_package(net, {**self.constants, **params}, inputs, self.outputs)


def _in(dtype: str, value: Any) -> Any:
    """Casts floating-point numbers; returns others unchanged."""
    value = jnp.asarray(value)
    return value.astype(dtype) if is_floating(value) else value


def for_evaluation(net: Net) -> Net:
    """Returns the net with the test mode of every random operator that has one: dropout drops nothing."""

    def change(op: Op) -> Op:
        op = op.map_sub_nets(for_evaluation)
        known = registry.lookup(op.type)
        if known.random and any(spec.name == "is_test" for spec in known.args):
            return op.with_args({"is_test": 1})
        return op

    return replace(net, ops=tuple(map(change, net.ops)))
