"""Loops whose step takes a few nanoseconds: `jrnn.scan` next to `jax.lax.scan`, forward and with the gradient.

A loop has 16,000 steps, or as many as `--sizes` says: `--sizes 1000,200000`. Gradients are those with respect to the
coefficients, the initial carry and the inputs. Times are processor time.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mean_times import averaged
from pairs import pairs_of

from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import scan

OURS = ("jrnn",)
TAKES = ("cells", "modes", "peers", "sizes")
PEERS: dict[str, Callable] = {"jrnn": scan, "lax.scan": jax.lax.scan}
STEPS = "16000"
WIDE = ("rotation_8", "leaky_64", "gates_16")  # more than 8 numbers, or a product, in a step

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
BIQUAD = (0.2, 0.3, 0.1, -1.6, 0.8)


def moving_average(c: Any, mean: Any, x: Any) -> tuple[Any, Any]:
    mean = c[0] * mean + (1 - c[0]) * x
    return mean, mean


def biquad(c: Any, delays: Any, x: Any) -> tuple[Any, Any]:
    """A filter of audio, in the transposed direct form II."""
    b0, b1, b2, a1, a2 = c
    y = b0 * x + delays[0]
    return (b1 * x - a1 * y + delays[1], b2 * x - a2 * y), y


def cascade(c: Any, delays: Any, x: Any) -> tuple[Any, Any]:
    """Four biquads, one after the other."""
    new = []
    for k in range(4):
        pair, x = biquad(c[5 * k : 5 * k + 5], delays[k], x)
        new.append(pair)
    return new, x


def arma(c: Any, state: Any, noise: Any) -> tuple[Any, Any]:
    before, other, shock = state
    value = c[0] * before + c[1] * other + noise + c[2] * shock
    return (value, before, noise), value


def holt_winters(c: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """Smoothing with a trend; its output is the forecast."""
    level, trend = state
    new = c[0] * x + (1 - c[0]) * (level + trend)
    return (new, c[1] * (new - level) + (1 - c[1]) * trend), level + trend


def garch(c: Any, variance: Any, x: Any) -> tuple[Any, Any]:
    """The variance of returns, and the likelihood."""
    return c[0] + c[1] * x * x + c[2] * variance, jnp.log(variance) + x * x / variance


def controller(c: Any, state: Any, aim: Any) -> tuple[Any, Any]:
    """A damped mass, and a controller of its place."""
    at, speed, total = state
    error = aim - at
    total = total + 0.01 * error
    speed = speed + 0.01 * (c[0] * error + c[1] * total - c[2] * speed)
    return (at + 0.01 * speed, speed, total), at


def returns(c: Any, later: Any, reward: Any) -> tuple[Any, Any]:
    later = reward + c[0] * later
    return later, later


def advantages(c: Any, later: Any, x: Any) -> tuple[Any, Any]:
    """Generalized advantage estimation, with ends of episodes."""
    reward, value, next_value, done = x
    goes_on = c[0] * (1 - done)
    later = reward + goes_on * next_value - value + goes_on * c[1] * later
    return later, later


def missing(c: Any, mean: Any, x: Any) -> tuple[Any, Any]:
    """A moving average of values of which some are missing."""
    mean = jnp.where(x[1] > 0, mean, c[0] * mean + (1 - c[0]) * x[0])
    return mean, mean


def gate(c: Any, h: Any, x: Any) -> tuple[Any, Any]:
    z = jax.nn.sigmoid(c[0] * x[0])
    h = (1 - z) * h + z * x[1]
    return h, h


def drawdown(c: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """The loss since the highest value."""
    wealth, highest = state
    wealth = wealth + c[0] * x
    highest = jnp.maximum(wealth, highest)
    return (wealth, highest), wealth - highest


def compressor(c: Any, level: Any, x: Any) -> tuple[Any, Any]:
    """The gain of a compressor of audio: a level that rises faster than it falls."""
    size = jnp.abs(x)
    rate = jnp.where(size > level, c[0], c[1])
    level = rate * level + (1 - rate) * size
    return level, x / (1 + c[2] * level)


def logistic_map(c: Any, h: Any, x: Any) -> tuple[Any, Any]:
    h = c[0] * h * (1 - h) * (1 - 0.01 * x)
    return h, h


def spikes(c: Any, voltage: Any, current: Any) -> tuple[Any, Any]:
    """A leaky neuron that is reset when it fires."""
    voltage = c[0] * voltage + c[1] * current
    return jnp.where(voltage > 1, 0.0, voltage), voltage


def epidemic(c: Any, state: Any, x: Any) -> tuple[Any, Any]:
    susceptible, infected = state
    new = c[0] * (1 + 0.1 * x) * susceptible * infected
    return (susceptible - new, infected + new - c[1] * infected), infected


def rotation(c: Any, h: Any, x: Any) -> tuple[Any, Any]:
    h = c[0] @ h + x
    return h, h


def _turned() -> Any:
    return 0.9 * np.linalg.qr(np.random.default_rng(8).normal(size=(8, 8)))[0]


# Step, coefficients, initial carry, the shapes of an input, and whether the loop is a reverse one.
LOOPS: dict[str, tuple[Step, tuple[Any, ...], Any, tuple[tuple[int, ...], ...], bool]] = {
    "moving_average": (moving_average, (0.9,), 0.3, ((),), False),
    "biquad": (biquad, BIQUAD, (0.3, 0.3), ((),), False),
    "cascade": (cascade, BIQUAD * 4, [(0.3, 0.3)] * 4, ((),), False),
    "arma": (arma, (0.6, -0.2, 0.4), (0.3, 0.3, 0.3), ((),), False),
    "holt_winters": (holt_winters, (0.3, 0.1), (0.3, 0.3), ((),), False),
    "garch": (garch, (0.1, 0.1, 0.85), 0.3, ((),), False),
    "controller": (controller, (2.0, 1.0, 0.5), (0.3, 0.3, 0.3), ((),), False),
    "returns": (returns, (0.99,), 0.3, ((),), True),
    "advantages": (advantages, (0.99, 0.95), 0.3, ((),) * 4, True),
    "missing": (missing, (0.9,), 0.3, ((),) * 2, False),
    "gate": (gate, (1.0,), 0.3, ((),) * 2, False),
    "drawdown": (drawdown, (0.1,), (0.3, 0.3), ((),), False),
    "compressor": (compressor, (0.6, 0.99, 0.5), 0.3, ((),), False),
    "logistic_map": (logistic_map, (3.4,), 0.3, ((),), False),
    "spikes": (spikes, (0.9, 0.5), 0.3, ((),), False),
    "epidemic": (epidemic, (0.3, 0.1), (0.9, 0.1), ((),), False),
    "rotation_8": (rotation, (_turned(),), np.full(8, 0.3), ((8,),), False),
    "leaky_64": (returns, (np.linspace(0.8, 0.99, 64),), np.full(64, 0.3), ((64,),), False),
    "gates_16": (gate, (1.0,), np.full(16, 0.3), ((16,),) * 2, False),
}


def program(
    name: str, mode: str, peer: str, steps: int
) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """Returns the function of a loop, or its gradient, and coefficients, carry and inputs [T, ...]."""
    step, coefficients, carry, shapes, reverse = LOOPS[name]
    rng = np.random.default_rng(0)
    xs = [rng.random((steps, *shape)) for shape in shapes]
    args = jax.tree.map(jnp.float32, (coefficients, carry, xs if len(xs) > 1 else xs[0]))

    def run(coefficients: Any, carry: Any, xs: Any) -> Any:
        return PEERS[peer](lambda s, x: step(coefficients, s, x), carry, xs, reverse=reverse)

    weights = rng.normal(size=steps).astype(np.float32) / steps

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.tensordot(weights, run(*args)[1], 1))

    return run if mode == "forward" else jax.grad(loss, (0, 1, 2)), args


def jobs(options: SuiteOptions) -> Iterator[Job]:
    peers = options.chosen("peers", PEERS)
    for steps in options.sizes or [STEPS]:
        for name in options.chosen("cells", LOOPS):
            for mode in options.chosen("modes", MODES):
                yield Job(
                    name,
                    mode,
                    steps,
                    {p: averaged(*program(name, mode, p, int(steps))) for p in peers},
                )


def summary(records: Sequence[Any]) -> str:
    """Returns the geometric means of the times over those of `lax.scan`, of loops with few numbers and of others."""
    lines = []
    for mode in dict.fromkeys(r.mode for r in records):
        pairs = pairs_of(records, mode)
        for text, wide in (("at most 8 numbers", False), ("more, or a product", True)):
            ratios = [a.least / b.least for a, b in pairs if (a.cell in WIDE) == wide]
            if ratios:
                mean, most = geometric_mean(ratios), max(ratios)
                lines.append(
                    f"{mode}, {len(ratios)} loops over {text}: time {mean:.2f} of lax.scan's (at most {most:.2f})"
                )
    return "\n".join(lines)
