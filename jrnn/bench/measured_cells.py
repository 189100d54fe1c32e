"""The cells that are benchmarked, as plain JAX functions with random weights.

Each is `(weights, carry, x) -> (carry, y)`, registered with its weights and its initial carry.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size
from jrnn.jaxprs import unit_formulas as formulas

Outputs = tuple[Any, Any]  # the carry and y

Weights = dict[str, Any]
Step = Callable[[Weights, Any, Any], tuple[Any, Any]]


class Measurable(NamedTuple):
    """A step, and for a size its weights (shapes to draw, or arrays) and its initial carry."""

    step: Step
    weights: Callable[[Size], Weights]
    initial: Callable[[Size], Any]


STEPS: dict[str, Measurable] = {}


def inputs(cell: str, size: Size, seed: int = 0) -> tuple[Weights, Any]:
    """Returns `(weights, x)`, float32; x is [T, N, D]."""
    rng = np.random.RandomState(seed)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.randn(*shape).astype("float32"))

    weights: Weights = {}
    for name, given in STEPS[cell].weights(size).items():
        if isinstance(given, tuple):
            weights[name] = draw(given) / math.sqrt(size.hidden)
        else:
            weights[name] = jnp.asarray(given, jnp.float32)
    return weights, draw((size.steps, size.batch, size.features))


def make(cell: str, weights: Weights) -> Callable[[Any, Any], Outputs]:
    return functools.partial(STEPS[cell].step, weights)


def initial(cell: str, size: Size) -> Any:
    return STEPS[cell].initial(size)


def hidden(size: Size) -> Any:
    return jnp.zeros((size.batch, size.hidden))


def two(size: Size) -> Any:
    return hidden(size), hidden(size)


def register(
    weights: Callable[[Size], Weights], initial: Callable[[Size], Any] = hidden
) -> Callable[[Step], Step]:
    """Returns a decorator that enters a step in STEPS by its name."""

    def enter(step: Step) -> Step:
        STEPS[step.__name__] = Measurable(step, weights, initial)
        return step

    return enter


def input_gates(count: int) -> Callable[[Size], Weights]:
    """Returns the shapes of the weights of gates that read the input, by the size."""

    def weights(s: Size) -> Weights:
        return dict(wx=(s.features, count * s.hidden), b=(1, count * s.hidden))

    return weights


def gates(count: int) -> Callable[[Size], Weights]:
    """Returns the shapes of the weights of gates that read the input and the state, by the size."""

    def weights(s: Size) -> Weights:
        return input_gates(count)(s) | dict(wh=(s.hidden, count * s.hidden))

    return weights


def _lru_weights(s: Size) -> Weights:
    radius = np.sqrt((np.arange(s.hidden) + 0.5) / s.hidden)[None]
    phase = np.linspace(0, 2 * np.pi, s.hidden, endpoint=False)[None]
    polar = dict(decay=-np.log(radius), scale=np.sqrt(1 - radius**2), phase=phase)
    return input_gates(2)(s) | polar | dict(out=(2 * s.hidden, s.hidden))


@register(gates(4), two)
def lstm(p: Weights, state: Any, x: Any) -> Outputs:
    """Gates in Caffe2's order: input, forget, output, update."""
    h, c = state
    z = x @ p["wx"] + h @ p["wh"] + p["b"]
    i, f, o, g = jnp.split(z, 4, axis=-1)
    h, c = formulas.lstm(i, f, o, g, c)
    return (h, c), h


@register(gates(3))
def gru(p: Weights, h: Any, x: Any) -> Outputs:
    """The GRU of PyTorch and cuDNN: the reset gate is applied after the contraction."""
    h = formulas.gru_gates(x @ p["wx"] + p["b"], h @ p["wh"]).new_hidden(h)
    return h, h


@register(input_gates(2))
def min_gru(p: Weights, h: Any, x: Any) -> Outputs:
    """The minimal GRU of Feng et al. 2024: its gates read the input alone, so it is affine in the state."""
    u, n = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
    u = jax.nn.sigmoid(u)
    h = (1 - u) * h + u * n
    return h, h


@register(input_gates(3))
def min_lstm(p: Weights, h: Any, x: Any) -> Outputs:
    """The minimal LSTM of Feng et al. 2024, its two gates normalized to add up to one."""
    f, i, n = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
    f = jax.nn.sigmoid(f)
    i = jax.nn.sigmoid(i)
    h = f / (f + i) * h + i / (f + i) * n
    return h, h


@register(_lru_weights, two)
def lru(p: Weights, state: Any, x: Any) -> Outputs:
    """The linear recurrent unit of Orvieto et al. 2023: complex and diagonal, as two real states."""
    re, im = state
    x_re, x_im = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
    radius = jnp.exp(-p["decay"])
    turn_re = radius * jnp.cos(p["phase"])
    turn_im = radius * jnp.sin(p["phase"])
    new_re = turn_re * re - turn_im * im + p["scale"] * x_re
    new_im = turn_im * re + turn_re * im + p["scale"] * x_im
    return (new_re, new_im), jnp.concatenate([new_re, new_im], axis=-1) @ p["out"]
