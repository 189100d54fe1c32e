"""`jrnn.scan` next to `jax.lax.scan` for loops of many kinds: none may be slower or need more memory.

The mode "eager" calls them outside of `jax.jit`. Times are processor time, so that other work of the machine disturbs less;
give XLA one core with `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`. The suite also prints how well the cost model predicts
the times.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from linear_layers import LAYERS, problem
from mean_times import averaged, mean_seconds

from jrnn.bench.peers import Timed
from jrnn.bench.sizes import MODES, Size
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import explain, scan

OURS = ("jrnn",)
TAKES = ("cells", "modes")
EAGER = "eager"  # a call outside of `jax.jit`
_PREDICTED: dict[tuple[str, str], float] = {}  # seconds, of the loops of the last run


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(len(shape)).randn(*shape) * 0.1, jnp.float32)


def lookup_by_one_hot(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(jax.nn.one_hot(x, 4000) @ p["table"] + h @ p["own"])
    return h, h


def repeated_input(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    return jnp.tanh(jnp.tile(x, (1, 128)) @ p["wide"] + h @ p["own"]), None


def output_layer(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(x + h @ p["own"])
    return h, jax.nn.logsumexp(h @ p["vocabulary"], -1)


def outer_products(p: dict[str, Any], s: Any, x: Any) -> tuple[Any, Any]:
    k, v = x @ p["k"], x @ p["v"]
    s = 0.9 * s + k[:, :, None] * v[:, None, :]
    return s, jnp.einsum("nij,ni->nj", s, x)


def small_products(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    gates = jax.nn.sigmoid(x @ p["a"]) * jnp.tanh(x @ p["b"]) + x @ p["c"]
    return jnp.tanh(h + gates), None


def elementwise(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    h = h * jnp.exp(-x) + x
    return h, h * p["scale"]


def scalars(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    h = [jnp.tanh(v * p["scale"] + x) for v in h]
    return tuple(h), h[0]


def lstm(p: dict[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    h, c = state
    i, f, g, o = jnp.split(x @ p["in"] + h @ p["gates"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def hyper_convolution(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    kernel, image = (x[0] @ p["kernel"]).reshape(3, 3, 4, 4), x[1]
    layout = ("NHWC", "HWIO", "NHWC")
    h = jnp.tanh(
        jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=layout) + h
    )
    return h, h


def outer_features(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh((x[:, :, None] * x[:, None, :]).reshape(len(x), -1) @ p["features"] + h @ p["own"])
    return h, h


def rotation(p: dict[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    c, s = jnp.cos(x * p["speed"]), jnp.sin(x * p["speed"])
    h = 0.99 * jnp.stack([jnp.stack([c, -s]), jnp.stack([s, c])]) @ h + x
    return h, h


def noise(p: dict[str, Any], h: Any, key: Any) -> tuple[Any, Any]:
    return h * p["scale"] + 0.1 * jax.random.normal(key, h.shape), None


def dropout(p: dict[str, Any], h: Any, key: Any) -> tuple[Any, Any]:
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), jnp.tanh(h * p["scale"]) / 0.9, 0)
    return h, h


def resampling(p: dict[str, Any], h: Any, key: Any) -> tuple[Any, Any]:
    moving, choosing = jax.random.split(key)
    h = h * p["scale"] + 0.1 * jax.random.normal(moving, h.shape)
    return h[jax.random.categorical(choosing, -jnp.sum(h * h, -1), shape=(len(h),))], None


def draws(p: dict[str, Any], h: Any, key: Any) -> tuple[Any, Any]:
    """Draws of several distributions at one step."""
    keys = jax.random.split(key, 4)
    steps = jax.random.exponential(keys[0], h.shape) * jax.random.rademacher(
        keys[1], h.shape, h.dtype
    )
    h = h * p["scale"] + 0.1 * steps + 0.01 * jax.random.uniform(keys[2], h.shape)
    return h, jax.random.gumbel(keys[3], h.shape[:1])


def in_place(p: dict[str, Any], carry: Any, given: Any) -> tuple[Any, Any]:
    """A large carry of which each step writes one row."""
    (table, h), (place, x) = carry, given
    h = jnp.tanh(h * p["scale"] + x + table[place])
    return (table.at[place].set(h), h), None


def nested(p: dict[str, Any], h: Any, x: Any, scan: Callable = jax.lax.scan) -> tuple[Any, Any]:
    """A solver: each step is a loop."""
    h = scan(lambda h, bias: (h + 0.1 * jnp.tanh(h @ p["own"] + x + bias), None), h, p["biases"])[0]
    return h, h


def matrix_states(name: str, p: dict[str, Any], s: Any, x: Any) -> tuple[Any, Any]:
    return LAYERS[name].step(s, {**x, "v": x["v"] * p["scale"]})


def of_layer(name: str, size: str) -> tuple[Callable, dict[str, tuple[int, ...]], Any, Any]:
    return (
        functools.partial(matrix_states, name),
        dict(scale=()),
        *problem(name, Size.parse(size)),
    )


H = 64
# Step, shapes of the weights, initial carry, and xs.
LOOPS: dict[str, tuple[Callable, dict[str, tuple[int, ...]], Any, Any]] = {
    "lookup_by_one_hot": (
        lookup_by_one_hot, dict(table=(4000, H), own=(H, H)), draw(16, H), jnp.zeros((64, 16), jnp.int32),
    ),
    "repeated_input": (repeated_input, dict(wide=(2048, 8), own=(8, 8)), draw(16, 8), draw(200, 16, 16)),
    "output_layer": (output_layer, dict(own=(H, H), vocabulary=(H, 3000)), draw(16, H), draw(64, 16, H)),
    "outer_products": (outer_products, dict(k=(H, H), v=(H, H)), draw(8, H, H), draw(128, 8, H)),
    "small_products": (small_products, dict(a=(16, 16), b=(16, 16), c=(16, 16)), draw(4, 16), draw(200, 4, 16)),
    "elementwise": (elementwise, dict(scale=()), draw(16), draw(500, 16)),
    "scalars": (scalars, dict(scale=()), tuple(draw(12)), draw(300)),
    "hyper_convolution": (
        hyper_convolution, dict(kernel=(8, 144)), draw(1, 8, 8, 4), (draw(100, 8), draw(100, 1, 8, 8, 4)),
    ),
    "outer_features": (outer_features, dict(features=(1024, 32), own=(32, 32)), draw(8, 32), draw(400, 8, 32)),
    "rotation": (rotation, dict(speed=()), draw(2), draw(1000)),
    "noise": (noise, dict(scale=()), draw(200, 2), jax.random.split(jax.random.key(0), 300)),
    "dropout": (dropout, dict(scale=()), draw(32, 64), jax.random.split(jax.random.key(0), 100)),
    "resampling": (resampling, dict(scale=()), draw(50, 4), jax.random.split(jax.random.key(0), 100)),
    "draws": (draws, dict(scale=()), draw(100), jax.random.split(jax.random.key(0), 200)),
    "in_place": (
        in_place, dict(scale=()), (draw(4000, 128), draw(128)), (jnp.arange(100) * 37 % 4000, draw(100, 128)),
    ),
    "nested": (nested, dict(own=(32, 32), biases=(20, 1, 32)), draw(8, 32), draw(30, 8, 32)),
    "unit_axes": (lstm, {"in": (H, 4 * H), "gates": (H, 4 * H)}, (draw(1, 32, H), draw(1, 32, H)), draw(100, 1, 32, H)),
    "mlstm": of_layer("mlstm", "256x4x32x32"),
    "small_matrix_states": of_layer("rwkv7", "512x8x16x16"),
    "lstm": (lstm, {"in": (H, 4 * H), "gates": (H, 4 * H)}, (draw(8, H), draw(8, H)), draw(200, 8, H)),
}  # fmt: skip


def programs(name: str, scan: Callable) -> tuple[Callable, Callable, tuple[Any, Any, Any]]:
    """Returns the function without a gradient and the train step of a loop, and their arguments."""
    step, shapes, carry, xs = LOOPS[name]
    step = functools.partial(step, scan=scan) if step is nested else step
    weights = {key: draw(*shape) if shape else jnp.float32(0.5) for key, shape in shapes.items()}

    def forward(p: Any, carry: Any, xs: Any) -> Any:
        return scan(functools.partial(step, p), carry, xs)

    def loss(p: Any, carry: Any, xs: Any) -> Any:
        return sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(forward(p, carry, xs)))

    return forward, jax.value_and_grad(loss), (weights, carry, xs)


def jobs(options: SuiteOptions) -> Iterator[Job]:
    _PREDICTED.clear()
    for name in options.chosen("cells", LOOPS):
        for mode in options.chosen("modes", (*MODES, EAGER)):
            built = {
                peer: _program(name, mode, which)
                for peer, which in (("jrnn", scan), ("lax.scan", jax.lax.scan))
            }
            if mode != EAGER:
                _PREDICTED[name, mode] = predicted(name, mode)
            yield Job(name, mode, "", built)


def summary(records: Sequence[Any]) -> str:
    """Returns the rank correlation of the predicted and the measured times of `jrnn.scan`."""
    measured = {(r.cell, r.mode): r.median for r in records if r.peer == "jrnn"}
    keys = [k for k in _PREDICTED if k in measured]
    pairs = [[counts[k] for k in keys] for counts in (_PREDICTED, measured)]
    ranks = [np.argsort(np.argsort(values)) for values in pairs]
    lines = [
        f"{cell} {mode}: predicted {p * 1e3:.3g} ms, measured {m * 1e3:.3g} ms"
        for (cell, mode), p, m in zip(keys, *pairs)
    ]
    if len(keys) > 2:
        lines.append(
            f"rank correlation of predicted and measured times: {np.corrcoef(*ranks)[0, 1]:.2f}"
        )
    return "\n".join(lines)


def predicted(name: str, mode: str) -> float:
    """Returns the estimated seconds of the loops of `jrnn.scan`."""
    forward, train, args = programs(name, scan)
    plans = explain(forward if mode == "forward" else train, *args).loops
    return sum(plan.chosen.estimate.seconds for plan in plans if plan.chosen is not None)


def _program(name: str, mode: str, which: Callable) -> Timed:
    forward, train, args = programs(name, which)
    if mode == EAGER:
        weights, *given = args
        step = functools.partial(
            LOOPS[name][0], weights
        )  # one function, which a call outside of jit compiles once
        return Timed(mean_seconds(lambda: jax.block_until_ready(which(step, *given))))
    return averaged(forward if mode == "forward" else train, args)
