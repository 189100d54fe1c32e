"""The origin of the first number that is not finite: the step is repeated, for a net operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import describe_op
from jrnn.ir import Op
from jrnn.lowering import Context, execute, schedule
from jrnn.ops.recurrent_network import StepWorkspaces
from jrnn.train.models.model import Model
from jrnn.train.models.net import NetModel
from jrnn.train.step import State
from jrnn.train.tasks import Batch


def first_not_finite(model: Model, state: State, batch: Batch, key: Any) -> str:
    """What holds the first number that is not finite, and where in it; where all are finite, what holds the greatest.

    Args:
        model: of a net, the blob and the operator that wrote it are named; else the parameter whose gradient it is.
        state: before the step, as host arrays.
        batch, key: what the step read and drew from.
    """
    for what, tree in (("parameter", state.params), ("carried state", state.carry), ("member of the batch", batch)):
        for path, value in jax.tree.leaves_with_path(tree):
            if found := _not_finite(value):
                return f"{what} {jax.tree_util.keystr(path, simple=True, separator='.')!r} {found}"
    if isinstance(model, NetModel):
        written = _of_net(model, state, batch, key)
    else:
        written = _of_function(model, state, batch, key)
    greatest, holder = 0.0, "nothing"
    for name, value in written:
        if found := _not_finite(value):
            return f"{name} {found}"
        array = np.asarray(value)
        if array.dtype.kind == "f" and array.size and (size := float(np.max(np.abs(array)))) > greatest:
            greatest, holder = size, name
    return f"all numbers of the model are finite; the greatest, {greatest:g}, is in {holder.rstrip(',')}"


def _of_net(model: NetModel, state: State, batch: Batch, key: Any) -> Iterator[tuple[str, Any]]:
    """Each blob as it is written by the net and its backward operators, with a name that tells the operator."""
    net, given = model.with_backward(state.params, state.carry, batch, key)
    blobs = {name: jnp.asarray(v) if np.asarray(v).dtype.kind == "f" else v for name, v in given.items()}
    for k, op in enumerate(net.ops):
        where = describe_op(k, op.type, op.outputs, net.name)
        alone = schedule(replace(net, ops=(op,)), read_outside=op.outputs)
        blobs = execute(alone, blobs, Context(key=key, eager=True))
        for name in op.outputs:
            if isinstance(blobs[name], StepWorkspaces):
                yield from _of_steps(op, where, blobs[name])
        for name in op.outputs:
            yield f"blob {name!r}, which {where} writes,", blobs[name]


def _of_steps(op: Op, where: str, kept: StepWorkspaces) -> Iterator[tuple[str, Any]]:
    """Each blob that a recurrent network's step net writes, step by step."""
    writers = {o: (k, inner, net) for _, net in op.sub_nets() for k, inner in enumerate(net.ops) for o in inner.outputs}
    for t in range(max((len(v) for v in kept.stacked.values()), default=0)):
        for name, values in kept.stacked.items():
            k, inner, net = writers[name]
            writer = describe_op(k, inner.type, inner.outputs, net.name)
            yield f"blob {name!r}, which {writer} writes in step {t} of {where},", values[t]


def _of_function(model: Model, state: State, batch: Batch, key: Any) -> Iterator[tuple[str, Any]]:
    loss, carry, gradients = jax.device_get(jax.jit(model.gradients)(state.params, state.carry, batch, key))
    yield "the loss", loss
    for what, tree in (("the state after the step,", carry), ("the gradient of parameter", gradients)):
        for name, value in tree.items():
            yield f"{what} {name!r}", value


def _not_finite(value: Any) -> str | None:
    """What is not finite in an array, in words; None where all is."""
    if isinstance(value, StepWorkspaces):
        return None  # they come blob by blob
    array = np.asarray(value)
    if array.dtype.kind not in "fV" or not array.size:  # V: bfloat16
        return None
    array = array.astype(np.float32) if array.dtype.kind == "V" else array
    bad = ~np.isfinite(array)
    if not bad.any():
        return None
    first = tuple(int(k) for k in np.argwhere(bad)[0])
    at = f", the first at {list(first)}" if first else ""
    return f"holds {array[first]:g}: {bad.sum()} of {bad.size} numbers{at}"
