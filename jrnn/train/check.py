"""The proof before training: JAX's gradient and the generated net's, in float64 on one batch, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ..errors import GradientError
from .models.model import Params
from .models.net import NetModel

TOLERANCE = 1e-9  # of the greatest element; float64 leaves about 1e-14


def compare_gradients(model: NetModel, params: Params, batch: Any, examples: int) -> dict[str, tuple[float, float]]:
    """For each parameter, the greatest element of JAX's gradient, and the greatest difference to the net's."""
    with jax.enable_x64(True):
        wide = {name: jax.numpy.asarray(np.asarray(value), np.float64) for name, value in params.items()}
        carry = model.initial_carry(examples)
        found = []
        for source in ("jax", "net"):
            gradients = jax.jit(replace(model, compute=replace(model.compute, gradient=source)).gradients)
            found.append(jax.device_get(gradients(wide, carry, batch, None).gradients))
    by_jax, by_net = found
    return {
        name: (float(np.max(np.abs(by_jax[name]))), float(np.max(np.abs(by_jax[name] - by_net[name]))))
        for name in params
    }


def check_gradients_agree(model: NetModel, params: Params, batch: Any, examples: int) -> None:
    """Raises GradientError with a table where the two gradients of any parameter differ."""
    compared = compare_gradients(model, params, batch, examples)
    wrong = {name for name, (size, difference) in compared.items() if not difference <= TOLERANCE * max(size, 1e-30)}
    if wrong:
        width = max(map(len, compared))
        rows = [f"  {'parameter':{width}}  {'max |jax|':>11}  {'max |jax - net|':>15}"]
        for name, (size, difference) in compared.items():
            rows.append(f"  {name:{width}}  {size:11.3e}  {difference:15.3e}{'  <-' if name in wrong else ''}")
        raise GradientError("JAX's gradient and the generated net's disagree on the first batch\n" + "\n".join(rows))
