"""The steps that are benchmarked, as plain JAX functions with random weights.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size

_GATES = {"lstm": 4, "gru": 3, "mingru": 2}


def inputs(cell: str, size: Size, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """`(weights, x)`, float32; x is [T, N, D]."""
    rng = np.random.RandomState(seed)
    wide = _GATES[cell] * size.hidden

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.randn(*shape).astype("float32") / np.sqrt(size.hidden))

    weights = dict(wx=draw(size.features, wide), wh=draw(size.hidden, wide), b=draw(1, wide))
    if cell == "mingru":
        del weights["wh"]
    return weights, jnp.asarray(rng.randn(size.steps, size.batch, size.features).astype("float32"))


def lstm(p: dict[str, Any]) -> Callable:
    """Gates in Caffe2's order: input, forget, output, update."""

    def step(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        h, c = state
        z = x @ p["wx"] + h @ p["wh"] + p["b"]
        i, f, o, g = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return step


def gru(p: dict[str, Any]) -> Callable:
    """As in PyTorch and cuDNN: the reset gate is applied after the contraction."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        r, u, n = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
        hr, hu, hn = jnp.split(h @ p["wh"], 3, axis=-1)
        r, u = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(u + hu)
        h = (1 - u) * jnp.tanh(n + r * hn) + u * h
        return h, h

    return step


def mingru(p: dict[str, Any]) -> Callable:
    """The minimal GRU of Feng et al. 2024: its gates read the input alone, so that it is affine in the state."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        u, n = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
        u = jax.nn.sigmoid(u)
        h = (1 - u) * h + u * n
        return h, h

    return step


STEPS = {"lstm": lstm, "gru": gru, "mingru": mingru}


def initial(cell: str, size: Size) -> Any:
    h = jnp.zeros((size.batch, size.hidden), jnp.float32)
    return (h, h) if cell == "lstm" else h
