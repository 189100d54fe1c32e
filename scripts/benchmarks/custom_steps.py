"""Steps as users write them, next to the peers of `jrnn bench` that can run them.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.bench import peers
from jrnn.bench.measured_cells import Weights, gates, hidden, register, two
from jrnn.bench.sizes import MODES, SETS
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes", "peers")
CUSTOM = (
    *("peephole_lstm", "layer_norm_lstm", "slstm", "rwkv", "relu_mlp", "attention", "memory"),
    *("loss_in_the_step", "euler", "runge_kutta", "small_cnn", "automaton"),
)
CLASSES = 512  # of the loss in the step
SLOTS = 16  # of memories
CHANNELS = 8  # of the convolution


def jobs(options: SuiteOptions) -> Iterator[Job]:
    cells, modes = options.chosen("cells", CUSTOM), options.chosen("modes", MODES)
    known = peers.available()
    chosen, sizes = options.chosen("peers", known), options.chosen_sizes(list(SETS))
    for cell, mode, size in product(cells, modes, sizes):
        yield Job(cell, mode, str(size), {name: known[name](cell, size, mode) for name in chosen})


def _normalized(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


@register(lambda s: gates(4)(s) | dict(peep=(3, 1, s.hidden)), two)
def peephole_lstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    h, c = state
    i, f, o, g = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
    i, f = jax.nn.sigmoid(i + c * p["peep"][0]), jax.nn.sigmoid(f + c * p["peep"][1])
    c = f * c + i * jnp.tanh(g)
    h = jax.nn.sigmoid(o + c * p["peep"][2]) * jnp.tanh(c)
    return (h, c), h


@register(gates(4), two)
def layer_norm_lstm(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    h, c = state
    i, f, o, g = jnp.split(_normalized(x @ p["wx"]) + _normalized(h @ p["wh"]) + p["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(_normalized(c))
    return (h, c), h


@register(gates(4), lambda s: tuple(hidden(s) for _ in range(4)))
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


@register(
    lambda s: dict(
        r=(s.features, s.hidden),
        k=(s.features, s.hidden),
        v=(s.features, s.hidden),
        decay=(1, s.hidden),
    ),
    lambda s: (hidden(s), hidden(s), hidden(s) - 1e4),
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


@register(
    lambda s: dict(
        wx=(s.features, s.hidden),
        wh=(s.hidden, s.hidden),
        up=(s.hidden, 2 * s.hidden),
        down=(2 * s.hidden, s.hidden),
    )
)
def relu_mlp(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(jax.nn.relu(x @ p["wx"]) @ p["wh"] + jax.nn.relu(h @ p["up"]) @ p["down"])
    return h, h


@register(
    lambda s: dict(
        wx=(s.features, s.hidden),
        wq=(s.hidden, s.hidden),
        wh=(s.hidden, s.hidden),
        keys=(s.batch, SLOTS, s.hidden),
    )
)
def attention(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """Attention over a fixed memory at every step."""
    scores = jnp.einsum("nh,nsh->ns", h @ p["wq"], p["keys"])
    context = jnp.einsum("ns,nsh->nh", jax.nn.softmax(scores), p["keys"])
    h = jnp.tanh(x @ p["wx"] + context @ p["wh"])
    return h, h


@register(
    lambda s: dict(
        wx=(s.features, s.hidden),
        wh=(s.hidden, s.hidden),
        wk=(s.hidden, s.hidden),
        wv=(s.hidden, s.hidden),
    ),
    lambda s: (hidden(s), jnp.zeros((s.batch, SLOTS, s.hidden))),
)
def memory(p: Weights, state: Any, x: Any) -> tuple[Any, Any]:
    """A differentiable memory that is read and written by attention."""
    h, slots = state
    weights = jax.nn.softmax(jnp.einsum("nh,nsh->ns", h @ p["wk"], slots))
    read = jnp.einsum("ns,nsh->nh", weights, slots)
    h = jnp.tanh(x @ p["wx"] + read @ p["wh"])
    slots = slots + weights[:, :, None] * jnp.tanh(h @ p["wv"])[:, None, :]
    return (h, slots), h


@register(
    lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden), out=(s.hidden, CLASSES))
)
def loss_in_the_step(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
    logits = h @ p["out"]
    return h, jax.nn.logsumexp(logits, axis=-1, keepdims=True) - logits[:, :1]


@register(lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden)))
def euler(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    """An Euler step of an ordinary differential equation."""
    h = h + 0.1 * (jnp.tanh(h @ p["wh"] + x @ p["wx"]) - h)
    return h, h


@register(lambda s: dict(wx=(s.features, s.hidden), wh=(s.hidden, s.hidden)))
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


@register(
    lambda s: dict(kernel=(3, 3, CHANNELS, CHANNELS), wx=(s.features, 64)),
    lambda s: jnp.zeros((s.batch, 8, 8, CHANNELS)),
)
def small_cnn(p: Weights, h: Any, x: Any) -> tuple[Any, Any]:
    moved = jax.lax.conv_general_dilated(
        h, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = jnp.tanh(moved + (x @ p["wx"]).reshape(-1, 8, 8, 1))
    return h, h.mean((1, 2))


@register(lambda s: dict(scale=(1, s.hidden)), lambda s: jnp.zeros((s.batch, s.hidden), jnp.int32))
def automaton(p: Weights, cells: Any, x: Any) -> tuple[Any, Any]:
    """A cellular automaton over integers; only its output is differentiable."""
    born = (x[:, :1] > 0).astype(jnp.int32)
    left, right = jnp.roll(cells, 1, axis=1), jnp.roll(cells, -1, axis=1)
    cells = (left ^ (cells | right)) ^ born
    return cells, cells * p["scale"] + x[:, :1]
