"""A model from disk: a Caffe2 net with its weights, to be trained further.

Shapes: T steps, B examples side by side, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert import Package, export_package
from jrnn.convert.package import INIT
from jrnn.errors import ConfigError, JrnnError, check_known, near
from jrnn.nets.graph import extract_sub_net, upgrade
from jrnn.nets.ir import Net, Op, makers_of
from jrnn.nets.lowering import to_jax
from jrnn.nets.proto import read_net
from jrnn.nn.checks import Shape
from jrnn.train.models.interface import Carry, Compute, Params, Signature
from jrnn.train.models.net import NetModel, for_evaluation

RECURRENT = "RecurrentNetwork"
SOFTMAX = "Softmax"
LOSS = "SoftmaxWithLoss"


@dataclass(frozen=True)
class NetDefConfig:
    """A net on disk and the net that makes its weights; the other keys have defaults that follow from the net."""

    kind: Literal["net"] = "net"
    # the net's file, relative to the working directory; it implies kind = "net"
    net: str | None = None
    # the file of the net that makes the weights; by default init_net.pb next to the net
    init_net: str | None = None
    input: str | None = None  # the blob of the inputs or tokens
    lengths: str | None = None  # the blob of lengths, if the net reads one
    targets: str | None = None  # the blob of targets, if the net has a loss
    # the blob of logits or values; by default the first external output, before its softmax
    output: str | None = None
    # the blob of the loss, if the net has one; by default a loss is appended to the output
    loss: str | None = None
    # first state -> last state, unless a RecurrentNetwork defines them
    states: dict = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)  # weights that are not trained

    def __post_init__(self):
        if self.net is None:
            raise ConfigError("model.net must name the file of a net")


@dataclass(frozen=True)
class NetDefModel(NetModel):
    """A net from disk; `whole` is the net before it was reduced to what training needs."""

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        output, carry = super().predict(params, carry, batch)
        if "tokens" in self.feeds.values():  # old nets flatten steps and examples: [T B, V]
            output = jnp.reshape(output, (*jnp.shape(batch.tokens), -1))
        return output, carry

    def count(self, batch: Any) -> Any:
        """None, because the loss may be the net's own."""
        return None

    @property
    def outputs(self) -> tuple[str, ...]:
        assert self.whole is not None
        return tuple(dict.fromkeys((*self.whole.external_outputs, *self._last_states)))


def netdef_model(config: NetDefConfig, signature: Signature, compute: Compute) -> NetDefModel:
    """Returns the net of a config as a model that fits a task.

    Raises:
        ConfigError: for a blob that the net lacks, one that must be named, or a net that does not fit the task.
        FormatError: for a file that is not a net.
    """
    try:
        return _model(config, signature, compute)
    except ConfigError as e:
        raise e.at(f"model.net = {config.net!r}") from None


def _model(config: NetDefConfig, signature: Signature, compute: Compute) -> NetDefModel:
    package = _read(config)
    served = package.predict_net
    weights = package.weights(key=jax.random.key(0))
    output = _output(config, served)
    written = makers_of(served.ops)
    end = config.loss or output
    check_known(end, written, ConfigError, f"there is no blob {end!r}")
    net = extract_sub_net(served, [], [end])
    inputs = [blob for blob in net.external_inputs if blob not in weights]
    last = {**_last_states(net, inputs), **config.states}
    feeds = _feeds(config, signature, [blob for blob in inputs if blob not in last])
    known = makers_of(net.ops).keys() | weights.keys()
    for name in [*last.values(), *config.frozen]:
        if name not in known:
            raise ConfigError(f"there is no blob {name!r}{near(name, weights)}")
    read = {}
    constants = {}
    for name, weight in weights.items():
        if name in net.external_inputs:
            read[name] = weight
            if weight.dtype.kind != "f" or name in config.frozen:
                constants[name] = weight
    sizes, shape = _shapes(net, read, last, feeds, output, signature)
    if shape[-1] != signature.outputs:
        raise ConfigError(
            f"its output {output!r} is {list(shape)}; the data need {signature.outputs} on the last axis"
        )
    loss = config.loss
    if loss is None:
        loss = "loss"
        net = _with_loss(net, output, shape, signature)
        feeds["targets"] = "targets"
    targets = tuple(blob for blob, member in feeds.items() if member == "targets")
    wanted = tuple(dict.fromkeys([loss, output, *last.values()]))
    fills = export_package(net, read, [*feeds, *last], wanted).init_net.ops
    of_weights = tuple(op for op in fills if op.outputs[0] in read)
    init = Net(f"{net.name}_init", of_weights, (), tuple(read))
    states = {first: (name, sizes[first]) for first, name in last.items()}
    net = replace(net, external_inputs=(*feeds, *last, *read), external_outputs=wanted)
    signature = replace(signature, carried=bool(states))
    return NetDefModel(
        net=net,
        init_net=init,
        states=states,
        feeds=feeds,
        compute=compute,
        loss_blob=loss,
        output_blob=output,
        targets=targets,
        constants=constants,
        signature=signature,
        whole=served,
    )


def _read(config: NetDefConfig) -> Package:
    path = Path(config.net or "")
    init = Path(config.init_net) if config.init_net else path.parent / INIT
    for key, file in (("net", path), ("init_net", init)):
        if not file.is_file():
            raise ConfigError(f"model.{key}: {file}: no such file")
    return Package(read_net(init), upgrade(read_net(path)))


def _output(config: NetDefConfig, net: Net) -> str:
    """Returns the blob of logits or values: of the config, or the loss's input, or the first output before its softmax."""
    if config.output is not None:
        return config.output
    makers = makers_of(net.ops)
    if config.loss in makers and makers[config.loss].type == LOSS:
        return makers[config.loss].inputs[0]
    if not net.external_outputs:
        raise ConfigError(
            "the net has no external outputs; name the blob of logits or values with model.output"
        )
    first = net.external_outputs[0]
    return makers[first].inputs[0] if first in makers and makers[first].type == SOFTMAX else first


def _last_states(net: Net, inputs: list[str]) -> dict[str, str]:
    """Returns the blob of the last state for each input of the net that is a recurrent network's first state."""
    states = {}
    for op in net.ops:
        if op.type != RECURRENT:
            continue
        aliases = zip(op.names("alias_src"), op.names("alias_dst"), op.integers("alias_offset"))
        last = {source: name for source, name, offset in aliases if offset == -1}
        firsts = op.integers("initial_recurrent_state_ids")
        for k, state in zip(firsts, op.names("recurrent_states")):
            first = op.inputs[k]
            if first in inputs and state in last:
                states[first] = last[state]
    return states


def _feeds(config: NetDefConfig, signature: Signature, left: list[str]) -> dict[str, str]:
    """Returns the member of a batch for each input of the net."""
    member = "tokens" if signature.tokens else "inputs"
    named = {config.input: member, config.lengths: "lengths", config.targets: "targets"}
    named.pop(None, None)
    feeds: dict[str, str] = named
    for blob, what in feeds.items():
        check_known(blob, left, ConfigError, f"the net reads no blob {blob!r} of {what}")
    unnamed = [blob for blob in left if blob not in feeds]
    if config.loss is not None and config.targets is None:
        raise ConfigError(
            "the net has a loss of its own; name the blob of its targets with model.targets"
        )
    if config.input is None and len(unnamed) == 1:
        feeds[unnamed.pop()] = member
    if unnamed or member not in feeds.values():
        shown = ", ".join(map(repr, unnamed)) or "nothing"
        raise ConfigError(
            f"the net reads {shown} besides its weights and states; assign them with model.input, model.lengths, "
            "model.targets and model.states"
        )
    if signature.lengths and "lengths" not in feeds.values():
        raise ConfigError(
            "the data have lengths, and the net reads none; name the blob with model.lengths"
        )
    if not signature.lengths and "lengths" in feeds.values():
        raise ConfigError("the net reads lengths, and the data have none; give them in init_net")
    return feeds


def _shapes(
    net: Net,
    weights: Mapping[str, Any],
    last: Mapping[str, str],
    feeds: Mapping[str, str],
    output: str,
    s: Signature,
) -> tuple[dict[str, int], Shape]:
    """Returns the size of each state, and the shape of the output for a batch of 2 steps of 3 examples.

    It tries the sizes of the weights: with the right one, the states keep their shape.
    """
    arrays = {
        "tokens": jnp.zeros((2, 3), jnp.int32),
        "inputs": jnp.zeros((2, 3, s.inputs)),
        "lengths": jnp.full(3, 2, jnp.int32),
        "targets": jnp.zeros((2, 3) if s.every_step else 3, jnp.int32),
    }
    run = to_jax(for_evaluation(net), [output, *last.values()])
    sizes = {0}
    if last:
        sizes = set().union(*map(np.shape, weights.values()))
    given = dict(weights)
    for blob, what in feeds.items():
        given[blob] = arrays[what]
    problem: JrnnError | None = None
    for size in sorted(sizes):
        given |= dict.fromkeys(last, jnp.zeros((1, 3, size)))
        try:
            shapes = jax.eval_shape(partial(run, given))
        except JrnnError as e:
            problem = e
            continue
        if all(shapes[name].shape == (1, 3, size) for name in last.values()):
            return dict.fromkeys(last, size), shapes[output].shape
    what = f"does not fit the data, or its states have several sizes: {problem}"
    raise ConfigError(what) from problem


def _with_loss(net: Net, output: str, shape: Shape, signature: Signature) -> Net:
    """Returns the net with a loss after its output of this shape."""
    targets = "targets"
    ops = []
    if signature.every_step and len(shape) == 2:
        targets = "targets_joined"
        ops.append(Op.of("Reshape", ["targets"], [targets, "targets_old_shape"], shape=[-1]))
    if signature.loss == "cross_entropy":
        outputs = ["loss_probabilities", "loss"]
        ops.append(Op.of(LOSS, [output, targets], outputs, axis=len(shape) - 1))
    else:
        ops.append(Op.of("Sub", [output, targets], ["loss_error"]))
        ops.append(Op.of("Sqr", ["loss_error"], ["loss_squared_error"]))
        ops.append(Op.of("AveragedLoss", ["loss_squared_error"], ["loss"]))
    return replace(net, ops=(*net.ops, *ops), external_inputs=(*net.external_inputs, "targets"))
