"""A model that is a net, with both of its gradients.

Shapes: B examples side by side, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import registry
from jrnn.autodiff import GradientSlice, add_gradients
from jrnn.convert import Package, export_package
from jrnn.graph import extract_sub_net
from jrnn.ir import Net, Op
from jrnn.lowering import to_jax
from jrnn.train.models.model import DEFAULT, Carry, Compute, Outcome, Params


@dataclass(frozen=True)
class NetModel:
    """A model that is a net.

    init_net: makes the parameters, and `constants`.
    states: for each initial-state blob, the blob that holds the state after the batch, and its size.
    feeds: for each further input of the net, the member of the batch that it is.
    targets: of those, the ones that only the loss reads.
    constants: of the blobs that `init_net` makes, those that are not trained.
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

    def init(self, key: Any) -> Params:
        made = to_jax(self.init_net)({}, key=key)
        return {name: made[name] for name in self.init_net.external_outputs if name not in self.constants}

    def initial_carry(self, examples: int) -> Carry:
        return {name: jnp.zeros((1, examples, size)) for name, (_, size) in self.states.items()}

    @property
    def _last_states(self) -> list[str]:
        return [last for last, _ in self.states.values()]

    def _carry(self, blobs: Mapping[str, Any], like: Carry) -> Carry:
        return {name: blobs[last].astype(like[name].dtype) for name, (last, _) in self.states.items()}

    def _blobs(self, params: Params, carry: Carry, batch: Any) -> dict[str, Any]:
        fed = {blob: getattr(batch, member) for blob, member in self.feeds.items()}
        given = {**self.constants, **params, **carry, **{b: value for b, value in fed.items() if value is not None}}
        if self.compute.precision == "float32":
            return given
        return {b: value if b in self.targets else _in(self.compute.precision, value) for b, value in given.items()}

    def _net(self, key: Any) -> Net:
        return self.net if key is not None else self._evaluation

    @cached_property
    def _evaluation(self) -> Net:
        return for_evaluation(self.net)

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        net, given = self._net(key), self._blobs(params, carry, batch)
        if self.compute.precision == "float32":
            blobs = to_jax(net, [self.loss_blob, *self._last_states])(given, key=key)
            return blobs[self.loss_blob], self._carry(blobs, carry)
        blobs = to_jax(net, [self.output_blob, *self._last_states])(given, key=key)
        fed = {**{b: given[b] for b in self.targets}, self.output_blob: blobs[self.output_blob].astype(jnp.float32)}
        end = extract_sub_net(net, list(fed), [self.loss_blob])  # the loss itself keeps its precision
        return to_jax(end, [self.loss_blob])(fed, key=key)[self.loss_blob], self._carry(blobs, carry)

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        if self.compute.gradient == "jax":
            by_params = jax.value_and_grad(self.loss, has_aux=True)
            (loss, carry), gradients = by_params(params, carry, batch, key)
            return Outcome(loss, carry, gradients)
        backward, names = self._backward(key is not None)
        blobs = backward(self._blobs(params, carry, batch), key=key)
        gradients = {p: _dense(params[p], names[p], blobs) for p in params}
        return Outcome(blobs[self.loss_blob], self._carry(blobs, carry), gradients)

    def with_backward(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Net, dict[str, Any]]:
        """The net with its backward operators, whatever gradient trains it, and the blobs that it is given."""
        return add_gradients(self._net(key), [self.loss_blob])[0], self._blobs(params, carry, batch)

    def _backward(self, training: bool) -> tuple[Callable, dict[str, Any]]:
        """The function of the net with its backward operators, and the blobs of each parameter's gradient."""
        net = self.net if training else self._evaluation
        with_gradients, found = add_gradients(net, [self.loss_blob])
        trained = [name for name in self.init_net.external_outputs if name not in self.constants]
        gradients = {name: found[name] for name in trained}
        blobs = [b for g in gradients.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
        return to_jax(with_gradients, [self.loss_blob, *self._last_states, *dict.fromkeys(blobs)]), gradients

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        wanted = [self.output_blob, *self._last_states]
        blobs = to_jax(self._evaluation, wanted)(self._blobs(params, carry, batch))
        return blobs[self.output_blob].astype(jnp.float32), self._carry(blobs, carry)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the exported net gives: the output, and the states after a batch."""
        return (self.output_blob, *self._last_states)

    def package(self, params: Params) -> Package:
        """The model as an init net that fills the parameters, and a net from inputs and states to `outputs`."""
        inputs = [blob for blob in (*self.feeds, *self.states) if blob not in self.targets]
        return export_package(for_evaluation(self.served), {**self.constants, **params}, inputs, self.outputs)

    @property
    def served(self) -> Net:
        """The net to export."""
        return self.net


def _in(dtype: str, value: Any) -> Any:
    """Fractional numbers in another precision; others as they are."""
    value = jnp.asarray(value)
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _dense(param: Any, gradient: str | GradientSlice, blobs: Mapping[str, Any]) -> Any:
    """A gradient blob, or the rows of a sparse one added up in place."""
    if not isinstance(gradient, GradientSlice):
        return blobs[gradient]
    rows = jnp.reshape(blobs[gradient.values], (-1, *param.shape[1:]))
    return jnp.zeros_like(param).at[jnp.reshape(blobs[gradient.indices], -1)].add(rows)


def for_evaluation(net: Net) -> Net:
    """The same net with every random operator that knows a test mode in it: dropout drops nothing."""

    def change(op: Op) -> Op:
        op = op.map_sub_nets(for_evaluation)
        known = registry.lookup(op.type)
        if known.random and any(spec.name == "is_test" for spec in known.args):
            return op.with_args({"is_test": 1})
        return op

    return replace(net, ops=tuple(change(op) for op in net.ops))
