"""Gradient checks while training: JAX's gradient next to the generated net's, in float64 on one batch.

A model that is not a net has no second gradient; it is compared with central differences along a random direction for each
parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError
from jrnn.gradcheck import Subject, subject_of_function, subject_of_net
from jrnn.train.config import Config
from jrnn.train.models.model import Compute, Model, Params
from jrnn.train.models.net import NetModel

TOLERANCE = 1e-9  # of the greatest element; float64 leaves about 1e-14
TOLERANCE_OF_DIFFERENCES = 1e-6  # of the derivative; float64 leaves about 1e-9
STEP = 1e-5  # of the differences


class GradientCheck:
    """Compares gradients of a model; what is compiled for it serves every further batch.

    examples: side by side in a batch.
    """

    def __init__(self, model: Model, examples: int):
        self.model = model
        self.examples = examples

    @property
    def other(self) -> str:
        """What JAX's gradient is compared with."""
        return "net" if isinstance(self.model, NetModel) else "differences"

    def compare(self, params: Params, batch: Any) -> dict[str, tuple[float, float]]:
        """For each parameter, the size of JAX's gradient, and the greatest difference to the other.

        The size is that of its greatest element or, with differences, of the derivative along the direction.
        """
        with jax.enable_x64(True):
            params, batch = _wide(params), _wide(batch)
            by_jax, by_other = (jax.device_get(f(params, batch)) for f in self._functions)
        return {
            name: (float(np.max(np.abs(by_jax[name]))), float(np.max(np.abs(by_jax[name] - by_other[name]))))
            for name in params
        }

    def __call__(self, params: Params, batch: Any) -> None:
        """Raises GradientError with a table where the gradients of any parameter differ."""
        compared = self.compare(params, batch)
        tolerance = TOLERANCE if self.other == "net" else TOLERANCE_OF_DIFFERENCES
        wrong = {name for name, (size, far) in compared.items() if not far <= tolerance * max(size, 1e-3)}
        if wrong:
            width = max(map(len, compared))
            rows = [f"  {'parameter':{width}}  {'max |jax|':>11}  {f'max |jax - {self.other}|':>23}"]
            for name, (size, far) in compared.items():
                rows.append(f"  {name:{width}}  {size:11.3e}  {far:23.3e}{'  <-' if name in wrong else ''}")
            raise GradientError(f"JAX's gradient and that of the {self.other} disagree\n" + "\n".join(rows))

    @cached_property
    def _functions(self) -> tuple[Callable, Callable]:
        by_jax = self._gradients("jax")
        if self.other == "net":
            return by_jax, self._gradients("net")
        return jax.jit(lambda p, batch: _along(by_jax(p, batch), p)), self._differences

    def _with(self, gradient: str) -> Any:
        return replace(self.model, compute=Compute(gradient))  # type: ignore[type-var]

    def _gradients(self, source: str) -> Callable:
        model = self._with(source)
        return jax.jit(lambda p, batch: model.gradients(p, model.initial_carry(self.examples), batch, None).gradients)

    @cached_property
    def _loss(self) -> Callable:
        model = self._with("jax")
        return jax.jit(lambda p, batch: model.loss(p, model.initial_carry(self.examples), batch, None)[0])

    def _differences(self, params: Params, batch: Any) -> Params:
        def loss(name: str, step: float) -> Any:
            return self._loss({**params, name: params[name] + step * directions[name]}, batch)

        directions = _directions(params)
        return {name: (loss(name, STEP) - loss(name, -STEP)) / (2 * STEP) for name in params}


def _directions(params: Params) -> Params:
    """A random direction for each parameter, of length 1."""
    keys = jax.random.split(jax.random.key(0), len(params))
    drawn = {name: jax.random.normal(key, x.shape, x.dtype) for key, (name, x) in zip(keys, params.items())}
    return {name: x / jnp.linalg.norm(jnp.ravel(x)) for name, x in drawn.items()}


def _along(gradients: Params, params: Params) -> Params:
    directions = _directions(params)
    return {name: jnp.sum(gradients[name] * directions[name]) for name in params}


def _wide(tree: Any) -> Any:
    """Fractional numbers as float64."""

    def wide(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x

    return jax.tree.map(wide, tree)


def subject_of_config(config: Config) -> Subject:
    """The loss of the first batch, by the first parameters; a model that is no net is taken as a JAX function.

    To be called with 64-bit types enabled.

    Raises:
        DataError: where the data cannot be used. ConversionError: for a function that has no net.
    """
    with jax.enable_x64(False):
        task = config.kind.load(config)
        params = jax.device_get(jax.jit(task.model.init)(jax.random.key(config.seed)))
        batch = task.train.at(0)
        carry = jax.device_get(task.model.initial_carry(config.data.batch))
    model = task.model
    if isinstance(model, NetModel):
        fed = {blob: np.asarray(getattr(batch, member)) for blob, member in model.feeds.items()}
        blobs = {**model.constants, **params, **carry, **fed}
        key = jax.random.key(config.seed)
        return subject_of_net(model.net, blobs, model.loss_blob, wrt=[*params, *carry], key=key)

    def model_loss(params: Any) -> Any:
        return model.loss(params, carry, batch, None)[0]

    return subject_of_function(model_loss, (params,))
