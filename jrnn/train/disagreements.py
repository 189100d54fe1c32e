"""Checks while training: gradients that disagree, and the origin of the first number that is not finite.

The gradient check compares JAX's gradient with that of the generated backward net, in float64 on one batch. A model that is
not a net has no second gradient: central differences along a random direction of each parameter replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError, describe_op
from jrnn.jaxprs.trials import central_difference
from jrnn.nets.ir import Op
from jrnn.nets.lowering import Context, execute
from jrnn.nets.ops.recurrent_network import StepWorkspaces
from jrnn.nets.schedule import schedule
from jrnn.train.models.interface import Compute, Model, Params
from jrnn.train.models.net import NetModel
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
        self.other = (
            "net" if isinstance(model, NetModel) else "differences"
        )  # compared with JAX's gradient

    def compare(self, params: Params, batch: Any) -> dict[str, tuple[float, float]]:
        """Returns the size of JAX's gradient and its greatest difference to the other one, for each parameter.

        The size is the greatest absolute element or, with differences, the derivative along the direction.
        """
        with jax.enable_x64(True):
            params, batch = jax.tree.map(_wide, (params, batch))
            by_jax, by_other = (jax.device_get(f(params, batch)) for f in self._functions)
        return {
            name: (
                float(np.max(np.abs(by_jax[name]))),
                float(np.max(np.abs(by_jax[name] - by_other[name]))),
            )
            for name in params
        }

    def __call__(self, params: Params, batch: Any) -> None:
        """Raises GradientError with a table if the gradients of any parameter differ."""
        compared = self.compare(params, batch)
        tolerance = TOLERANCE if self.other == "net" else TOLERANCE_OF_DIFFERENCES
        wrong = {
            name for name, (size, far) in compared.items() if not far <= tolerance * max(size, 1e-3)
        }
        if wrong:
            width = max(map(len, compared))
            rows = [
                f"  {'parameter':{width}}  {'max |jax|':>11}  {f'max |jax - {self.other}|':>23}"
            ]
            for name, (size, far) in compared.items():
                rows.append(
                    f"  {name:{width}}  {size:11.3e}  {far:23.3e}{'  <-' if name in wrong else ''}"
                )
            raise GradientError(
                f"JAX's gradient and that of the {self.other} disagree\n" + "\n".join(rows)
            )

    @cached_property
    def _functions(self) -> tuple[Callable, Callable]:
        by_jax = self._gradients("jax")
        if self.other == "net":
            return by_jax, self._gradients("net")
        return jax.jit(lambda p, batch: _along(by_jax(p, batch), p)), self._differences

    def _model(self, source: str) -> Any:
        """Returns the model in full precision, with one of its gradients if it has several."""
        return (
            replace(self.model, compute=Compute(source))
            if hasattr(self.model, "compute")
            else self.model
        )

    def _gradients(self, source: str) -> Callable:
        model = self._model(source)
        return jax.jit(
            lambda p, batch: (
                model.gradients(p, model.initial_carry(self.examples), batch, None).gradients
            )
        )

    @cached_property
    def _loss(self) -> Callable:
        model = self._model("jax")
        return jax.jit(
            lambda p, batch: model.loss(p, model.initial_carry(self.examples), batch, None)[0]
        )

    def _differences(self, params: Params, batch: Any) -> Params:
        towards = {
            name: {**dict.fromkeys(params), name: d} for name, d in _directions(params).items()
        }
        value = lambda p: self._loss(p, batch)  # noqa: E731
        return {name: central_difference(value, params, one, STEP) for name, one in towards.items()}


def _directions(params: Params) -> Params:
    """Returns a random direction of length 1 for each parameter."""
    keys = jax.random.split(jax.random.key(0), len(params))
    drawn = {
        name: jax.random.normal(key, x.shape, x.dtype)
        for key, (name, x) in zip(keys, params.items())
    }
    return {name: x / jnp.linalg.norm(jnp.ravel(x)) for name, x in drawn.items()}


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
                return (
                    f"{what} {jax.tree_util.keystr(path, simple=True, separator='.')!r} {problem}"
                )
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
        if (
            array.dtype.kind == "f"
            and array.size
            and (size := float(np.max(np.abs(array)))) > greatest
        ):
            greatest = size
            holder = name
    return f"all numbers of the model are finite; the greatest, {greatest:g}, is in {holder.rstrip(',')}"


def _of_net(model: NetModel, state: State, batch: Batch, key: Any) -> Iterator[tuple[str, Any]]:
    """Yields each blob that the net and its backward operators write, with a name that has the operator."""
    net, given = model.with_backward(state.params, state.carry, batch, key)
    blobs = {
        name: jnp.asarray(v) if np.asarray(v).dtype.kind == "f" else v for name, v in given.items()
    }
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
    writers = {
        o: (k, inner, net)
        for _, net in op.sub_nets()
        for k, inner in enumerate(net.ops)
        for o in inner.outputs
    }
    for t in range(max((len(v) for v in kept.stacked.values()), default=0)):
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
    """Describes what is not finite in an array; None if all is."""
    if isinstance(value, StepWorkspaces):
        return None  # `_of_steps` yields their blobs one by one
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
