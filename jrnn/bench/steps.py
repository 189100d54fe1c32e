"""The steps that are benchmarked, as plain JAX functions with random weights.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench import custom_steps
from jrnn.bench.sizes import AFFINE, CUSTOM, GATES, Size


def inputs(cell: str, size: Size, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """`(weights, x)`, float32; x is [T, N, D]."""
    if cell in CUSTOM:
        return custom_steps.inputs(cell, size, seed)
    rng = np.random.RandomState(seed)
    wide = GATES[cell] * size.hidden

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.randn(*shape).astype("float32") / np.sqrt(size.hidden))

    weights = dict(wx=draw(size.features, wide), wh=draw(size.hidden, wide), b=draw(1, wide))
    if cell in AFFINE:
        del weights["wh"]
    if cell == "lru":
        radius = np.sqrt((np.arange(size.hidden) + 0.5) / size.hidden)[None]
        weights |= dict(
            decay=jnp.asarray(-np.log(radius), jnp.float32), scale=jnp.asarray(np.sqrt(1 - radius**2), jnp.float32)
        )
        weights |= dict(
            phase=jnp.asarray(rng.rand(1, size.hidden) * 6.28, jnp.float32), out=draw(2 * size.hidden, size.hidden)
        )
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


def min_gru(p: dict[str, Any]) -> Callable:
    """The minimal GRU of Feng et al. 2024: its gates read the input alone, so that it is affine in the state."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        u, n = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
        u = jax.nn.sigmoid(u)
        h = (1 - u) * h + u * n
        return h, h

    return step


def min_lstm(p: dict[str, Any]) -> Callable:
    """The minimal LSTM of Feng et al. 2024, its two gates normalized to add up to one."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        f, i, n = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
        f, i = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
        h = f / (f + i) * h + i / (f + i) * n
        return h, h

    return step


def lru(p: dict[str, Any]) -> Callable:
    """The linear recurrent unit of Orvieto et al. 2023: complex and diagonal, as two real states."""

    def step(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        re, im = state
        x_re, x_im = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
        radius = jnp.exp(-p["decay"])
        turn_re, turn_im = radius * jnp.cos(p["phase"]), radius * jnp.sin(p["phase"])
        new_re = turn_re * re - turn_im * im + p["scale"] * x_re
        new_im = turn_im * re + turn_re * im + p["scale"] * x_im
        return (new_re, new_im), jnp.concatenate([new_re, new_im], axis=-1) @ p["out"]

    return step


STEPS = {"lstm": lstm, "gru": gru, "min_gru": min_gru, "min_lstm": min_lstm, "lru": lru} | {
    name: custom.make for name, custom in custom_steps.CUSTOM_STEPS.items()
}


def initial(cell: str, size: Size) -> Any:
    if cell in CUSTOM:
        return custom_steps.CUSTOM_STEPS[cell].initial(size)
    h = jnp.zeros((size.batch, size.hidden), jnp.float32)
    return (h, h) if cell in ("lstm", "lru") else h
