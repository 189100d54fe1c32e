"""An LSTM step that says what it is, so that an executor with a kernel of its own can take it.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LstmStep:
    """A step function with its weights; rows of the weights are in cuDNN's order of gates: i, f, g, o.

    Attributes:
        w_x: [4H, D].
        w_h: [4H, H].
        b: [4H].
    """

    w_x: Any
    w_h: Any
    b: Any

    def __call__(self, state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        """`((h, c), x) -> ((h, c), h)`: [N, H], [N, H], [N, D]."""
        h, c = state
        z = x @ self.w_x.T + h @ self.w_h.T + self.b[None]  # [N, 4H]
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h
