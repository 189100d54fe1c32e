"""Checks while training: gradients that disagree, and the origin of the first number that is not finite.

The gradient check compares JAX's gradient with the generated backward net's, in float64 on one batch. A model that is
not a net has no second gradient: central differences along a random direction of each parameter replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError, describe_op
from jrnn.jaxprs.trials import central_difference
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import Context, execute
from jrnn.nets.ops.recurrent_network import StepWorkspaces
from jrnn.nets.schedule import schedule
from jrnn.train.models.interface import Compute, Model, Params
from jrnn.train.models.net import NetModel
from jrnn.train.optimizers import name_of
from jrnn.train.step import State
from jrnn.train.tasks import Batch

TOLERANCE = 1e-9  # of the greatest element; float64 leaves about 1e-14
TOLERANCE_OF_DIFFERENCES = 1e-6  # of the derivative; float64 leaves about 1e-9
MEMBER = "member of the batch"  # how the description of a number in the data begins
STEP = 1e-5  # half the distance between the two points of a difference


class GradientCheck:
    """Compares gradients of a model; its functions are compiled once, for all batches of `examples`."""

    def __init__(self, model: Model, examples: int):
        self.model = model
        self.examples = examples
        # What JAX's gradient is compared with.
        self.other = "net" if isinstance(model, NetModel) else "differences"

    def compare(self, params: Params, batch: Any) -> dict[str, tuple[float, float]]:
        """Returns the size of JAX's gradient and its greatest difference to the other one, for each parameter.

        The size is the greatest absolute element or, with differences, the derivative along the direction.
        """
        with jax.enable_x64(True):
            params, batch = jax.tree.map(_wide, (params, batch))
            gradients, others = self._functions
            by_jax = jax.device_get(gradients(params, batch))
            by_other = jax.device_get(others(params, batch))
        compared = {}
        for name in params:
            gradient = by_jax[name]
            far = np.max(np.abs(gradient - by_other[name]))
            compared[name] = float(np.max(np.abs(gradient))), float(far)
        return compared

    def __call__(self, params: Params, batch: Any) -> None:
        """Raises GradientError with a table if the gradients of any parameter differ."""
        compared = self.compare(params, batch)
        tolerance = TOLERANCE if self.other == "net" else TOLERANCE_OF_DIFFERENCES
        agrees = True
        width = max(map(len, compared), default=0)
        rows = [f"  {'parameter':{width}}  {'max |jax|':>11}  {f'max |jax - {self.other}|':>23}"]
        for name, (size, far) in compared.items():
            mark = ""
            if not far <= tolerance * max(size, 1e-3):
                agrees = False
                mark = "  <-"
            rows.append(f"  {name:{width}}  {size:11.3e}  {far:23.3e}{mark}")
        if not agrees:
            raise GradientError(
                f"the gradients by JAX and by the {self.other} disagree\n" + "\n".join(rows)
            )

    @cached_property
    def _functions(self) -> tuple[Callable, Callable]:
        by_jax = self._gradients("jax")
        if self.other == "net":
            return by_jax, self._gradients("net")

        @jax.jit
        def derivatives(params: Params, batch: Any) -> Params:
            return _along(by_jax(params, batch), params)

        return derivatives, self._differences

    def _model(self, source: str) -> Any:
        """Returns the model in full precision, with one of its gradients if it has several."""
        if hasattr(self.model, "compute"):
            return replace(self.model, compute=Compute(source))
        return self.model

    def _gradients(self, source: str) -> Callable:
        model = self._model(source)

        @jax.jit
        def gradients(params: Params, batch: Any) -> Params:
            carry = model.initial_carry(self.examples)
            return model.gradients(params, carry, batch, None).gradients

        return gradients

    @cached_property
    def _loss(self) -> Callable:
        model = self._model("jax")

        @jax.jit
        def loss(params: Params, batch: Any) -> Any:
            return model.loss(params, model.initial_carry(self.examples), batch, None)[0]

        return loss

    def _differences(self, params: Params, batch: Any) -> Params:
        loss = partial(self._loss, batch=batch)
        derivatives = {}
        for name, direction in _directions(params).items():
            towards = {**dict.fromkeys(params), name: direction}
            derivatives[name] = central_difference(loss, params, towards, STEP)
        return derivatives


def _directions(params: Params) -> Params:
    """Returns a random direction of length 1 for each parameter."""
    keys = jax.random.split(jax.random.key(0), len(params))
    directions = {}
    for key, (name, x) in zip(keys, params.items()):
        drawn = jax.random.normal(key, x.shape, x.dtype)
        directions[name] = drawn / jnp.linalg.norm(jnp.ravel(drawn))
    return directions


def _along(gradients: Params, params: Params) -> Params:
    directions = _directions(params)
    return {name: jnp.sum(gradients[name] * directions[name]) for name in params}


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x


def first_not_finite(model: Model, state: State, batch: Batch, key: Any) -> str:
    """Repeats a step and describes its first number that is not finite; or its greatest number, if all are finite.

    Args:
        model: for a net, the result names the blob and the operator that wrote it; else a parameter's gradient.
        state: the state before the step, as host arrays.
        batch, key: the inputs of the step.
    """
    for what, tree in (
        ("parameter", state.params),
        ("carried state", state.carry),
        (MEMBER, batch),
    ):
        for path, value in jax.tree.leaves_with_path(tree):
            if problem := _not_finite(value):
                return f"{what} {name_of(path)!r} {problem}"
    if isinstance(model, NetModel):
        written = _of_net(model, state, batch, key)
    else:
        written = _of_function(model, state, batch, key)
    greatest = 0.0
    holder = "nothing"
    for name, value in written:
        if problem := _not_finite(value):
            return f"{name} {problem}"
        array = np.asarray(value)
        if array.dtype.kind == "f":
            size = float(np.max(np.abs(array), initial=0.0))
            if size > greatest:
                greatest = size
                holder = name
    return f"all numbers of the model are finite; the greatest, {greatest:g}, is in {holder.rstrip(',')}"


def _of_net(model: NetModel, state: State, batch: Batch, key: Any) -> Iterator[tuple[str, Any]]:
    """Yields each blob that the net and its backward operators write, with a name that has the operator."""
    net, given = model.with_backward(state.params, state.carry, batch, key)
    blobs = {}
    for name, value in given.items():
        is_number = np.asarray(value).dtype.kind == "f"
        blobs[name] = jnp.asarray(value) if is_number else value
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
    """Yields each blob that a recurrent network's step net writes, step by step."""
    writers: dict[str, tuple[int, Op, Net]] = {}
    for _, net in op.sub_nets():
        for k, inner in enumerate(net.ops):
            writers |= dict.fromkeys(inner.outputs, (k, inner, net))
    for t in range(max(map(len, kept.stacked.values()), default=0)):
        for name, values in kept.stacked.items():
            k, inner, net = writers[name]
            writer = describe_op(k, inner.type, inner.outputs, net.name)
            yield f"blob {name!r}, which {writer} writes in step {t} of {where},", values[t]


def _of_function(model: Model, state: State, batch: Batch, key: Any) -> Iterator[tuple[str, Any]]:
    loss, carry, gradients = jax.device_get(
        jax.jit(model.gradients)(state.params, state.carry, batch, key)
    )
    yield "the loss", loss
    for what, tree in (
        ("the state after the step,", carry),
        ("the gradient of parameter", gradients),
    ):
        for name, value in tree.items():
            yield f"{what} {name!r}", value


def _not_finite(value: Any) -> str | None:
    """Describes the elements of an array that are not finite; None if all are finite."""
    if isinstance(value, StepWorkspaces):
        return None  # `_of_steps` yields their blobs one by one
    array = np.asarray(value)
    if array.dtype.kind not in "fV" or not array.size:  # V: bfloat16
        return None
    array = array.astype(np.float32) if array.dtype.kind == "V" else array
    bad = ~np.isfinite(array)
    if not bad.any():
        return None
    first = tuple(np.argwhere(bad)[0].tolist())
    at = f", the first at {list(first)}" if first else ""
    return f"holds {array[first]:g}: {bad.sum()} of {bad.size} numbers{at}"
