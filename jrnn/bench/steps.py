"""The steps that are benchmarked, as plain JAX functions with random weights: cells, and steps as users write them.

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

CLASSES = 512  # of the loss in the step
SLOTS = 16  # of memories
CHANNELS = 8  # of the convolution

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

    weights = {
        name: draw(given) / math.sqrt(size.hidden) if isinstance(given, tuple) else jnp.asarray(given, jnp.float32)
        for name, given in STEPS[cell].weights(size).items()
    }
    return weights, draw((size.steps, size.batch, size.features))


def make(cell: str, weights: Weights) -> Callable[[Any, Any], tuple[Any, Any]]:
    return functools.partial(STEPS[cell].step, weights)


def initial(cell: str, size: Size) -> Any:
    return STEPS[cell].initial(size)


def _hidden(size: Size) -> Any:
    return jnp.zeros((size.batch, size.hidden))


def _two(size: Size) -> Any:
    return _hidden(size), _hidden(size)


def _step(weights: Callable[[Size], Weights], initial: Callable[[Size], Any] = _hidden) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        STEPS[step.__name__] = Measurable(step, weights, initial)
        return step

    return register


def _input_gates(count: int) -> Callable[[Size], Weights]:
    return lambda s: dict(wx=(s.features, count * s.hidden), b=(1, count * s.hidden))


def _gates(count: int) -> Callable[[Size], Weights]:
    return lambda s: _input_gates(count)(s) | dict(wh=(s.hidden, count * s.hidden))


def _lru_weights(s: Size) -> Weights:
    radius = np.sqrt((np.arange(s.hidden) + 0.5) / s.hidden)[None]
    phase = np.linspace(0, 2 * np.pi, s.hidden, endpoint=False)[None]
    polar = dict(decay=-np.log(radius), scale=np.sqrt(1 - radius**2), phase=phase)
    return _input_gates(2)(s) | polar | dict(out=(2 * s.hidden, s.hidden))


def _normalized(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


@_step(_gates(4), _two)
def lstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """Gates in Caffe2's order: input, forget, output, update."""
    h, c = state
    z = x @ p["wx"] + h @ p["wh"] + p["b"]
    i, f, o, g = jnp.split(z, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


@_step(_gates(3))
def gru(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """The GRU of PyTorch and cuDNN: the reset gate is applied after the contraction."""
    r, u, n = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
    hr, hu, hn = jnp.split(h @ p["wh"], 3, axis=-1)
    r, u = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(u + hu)
    h = (1 - u) * jnp.tanh(n + r * hn) + u * h
    return h, h


@_step(_input_gates(2))
def min_gru(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """The minimal GRU of Feng et al. 2024: its gates read the input alone, so it is affine in the state."""
    u, n = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
    u = jax.nn.sigmoid(u)
    h = (1 - u) * h + u * n
    return h, h


@_step(_input_gates(3))
def min_lstm(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """The minimal LSTM of Feng et al. 2024, its two gates normalized to add up to one."""
    f, i, n = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
    f, i = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
    h = f / (f + i) * h + i / (f + i) * n
    return h, h


@_step(_lru_weights, _two)
def lru(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """The linear recurrent unit of Orvieto et al. 2023: complex and diagonal, as two real states."""
    re, im = state
    x_re, x_im = jnp.split(x @ p["wx"] + p["b"], 2, axis=-1)
    radius = jnp.exp(-p["decay"])
    turn_re, turn_im = radius * jnp.cos(p["phase"]), radius * jnp.sin(p["phase"])
    new_re = turn_re * re - turn_im * im + p["scale"] * x_re
    new_im = turn_im * re + turn_re * im + p["scale"] * x_im
    return (new_re, new_im), jnp.concatenate([new_re, new_im], axis=-1) @ p["out"]


@_step(lambda s: _gates(4)(s) | dict(peep=(3, 1, s.hidden)), _two)
def peephole_lstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    h, c = state
    i, f, o, g = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
    i, f = jax.nn.sigmoid(i + c * p["peep"][0]), jax.nn.sigmoid(f + c * p["peep"][1])
    c = f * c + i * jnp.tanh(g)
    h = jax.nn.sigmoid(o + c * p["peep"][2]) * jnp.tanh(c)
    return (h, c), h


@_step(_gates(4), _two)
def layer_norm_lstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    h, c = state
    i, f, o, g = jnp.split(_normalized(x @ p["wx"]) + _normalized(h @ p["wh"]) + p["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(_normalized(c))
    return (h, c), h


@_step(_gates(4), lambda s: tuple(_hidden(s) for _ in range(4)))
def slstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """The scalar LSTM of Beck et al. 2024, with exponential gates, a normalizer and a stabilizer."""
    h, c, n, m = state
    i, f, o, z = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
    log_f = -jax.nn.softplus(-f)
    top = jnp.maximum(log_f + m, i)
    i, f = jnp.exp(i - top), jnp.exp(log_f + m - top)
    c, n = f * c + i * jnp.tanh(z), f * n + i
    h = jax.nn.sigmoid(o) * c / jnp.maximum(jnp.abs(n), 1.0)
    return (h, c, n, top), h


@_step(
    lambda s: dict(r=(s.features, s.hidden), k=(s.features, s.hidden), v=(s.features, s.hidden), decay=(1, s.hidden)),
    lambda s: (_hidden(s), _hidden(s), _hidden(s) - 1e4),
)
def rwkv(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """The time mixing of RWKV-4 (Peng et al. 2023), with its running maximum."""
    top, bottom, high = state
    r, k, v = jax.nn.sigmoid(x @ p["r"]), x @ p["k"], x @ p["v"]
    decayed = high - jnp.exp(p["decay"])
    peak = jnp.maximum(decayed, k)
    old, new = jnp.exp(decayed - peak), jnp.exp(k - peak)
    top, bottom = old * top + new * v, old * bottom + new
    return (top, bottom, peak), r * top / bottom


@_step(
    lambda s: dict(
        wx=(s.features, s.hidden), wh=(s.hidden, s.hidden), up=(s.hidden, 2 * s.hidden), down=(2 * s.hidden, s.hidden)
    )
)
def relu_mlp(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(jax.nn.relu(x @ p["wx"]) @ p["wh"] + jax.nn.relu(h @ p["up"]) @ p["down"])
    return h, h


@_step(
    lambda s: dict(
        wx=(s.features, s.hidden), wq=(s.hidden, s.hidden), wh=(s.hidden, s.hidden), keys=(s.batch, SLOTS, s.hidden)
    )
)
def attention(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """Attention over a fixed memory at every step."""
    scores = jnp.einsum("nh,nsh->ns", h @ p["wq"], p["keys"])
    context = jnp.einsum("ns,nsh->nh", jax.nn.softmax(scores), p["keys"])
    h = jnp.tanh(x @ p["wx"] + context @ p["wh"])
    return h, h


@_step(
    lambda s: dict(
        wx=(s.features, s.hidden), wh=(s.hidden, s.hidden), wk=(s.hidden, s.hidden), wv=(s.hidden, s.hidden)
    ),
    lambda s: (_hidden(s), jnp.zeros((s.batch, SLOTS, s.hidden))),
)
def memory(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """A differentiable memory that is read and written by attention."""
    h, slots = state
    weights = jax.nn.softmax(jnp.einsum("nh,nsh->ns", h @ p["wk"], slots))
    read = jnp.einsum("ns,nsh->nh", weights, slots)
    h = jnp.tanh(x @ p["wx"] + read @ p["wh"])
    slots = slots + weights[:, :, None] * jnp.tanh(h @ p["wv"])[:, None, :]
    return (h, slots), h


@_step(lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden), out=(s.hidden, CLASSES)))
def loss_in_the_step(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
    logits = h @ p["out"]
    return h, jax.nn.logsumexp(logits, axis=-1, keepdims=True) - logits[:, :1]


@_step(lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden)))
def euler(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """An Euler step of an ordinary differential equation."""
    h = h + 0.1 * (jnp.tanh(h @ p["wh"] + x @ p["wx"]) - h)
    return h, h


@_step(lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden)))
def runge_kutta(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """A fourth-order Runge-Kutta step, which uses its weights four times."""

    def slope(h: Any) -> Any:
        return jnp.tanh(h @ p["wh"] + x @ p["wx"]) - h

    a = slope(h)
    b = slope(h + 0.05 * a)
    c = slope(h + 0.05 * b)
    d = slope(h + 0.1 * c)
    h = h + 0.1 / 6 * (a + 2 * b + 2 * c + d)
    return h, h


@_step(
    lambda s: dict(kernel=(3, 3, CHANNELS, CHANNELS), wx=(s.features, 64)),
    lambda s: jnp.zeros((s.batch, 8, 8, CHANNELS)),
)
def small_cnn(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    moved = jax.lax.conv_general_dilated(h, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jnp.tanh(moved + (x @ p["wx"]).reshape(-1, 8, 8, 1))
    return h, h.mean((1, 2))


@_step(lambda s: dict(scale=(1, s.hidden)), lambda s: jnp.zeros((s.batch, s.hidden), jnp.int32))
def automaton(p: Weights, cells: Any, x: Any) -> tuple[Any, Any]:
    """A cellular automaton over integers; only its output is differentiable."""
    born = (x[:, :1] > 0).astype(jnp.int32)
    left, right = jnp.roll(cells, 1, axis=1), jnp.roll(cells, -1, axis=1)
    cells = (left ^ (cells | right)) ^ born
    return cells, cells * p["scale"] + x[:, :1]
