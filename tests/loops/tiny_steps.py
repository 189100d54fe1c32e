"""Tiny steps: of filters, smoothing, finance, control, reinforcement learning, and of random affine systems."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jrnn

STEPS = {
    "moving average": (1, lambda c, s, u: ((h := c[0] * s[0] + (1 - c[0]) * u,), h)),
    "filter": (
        2,
        lambda c, s, u: ((c[1] * u - c[3] * (y := c[0] * u + s[0]) + s[1], c[2] * u - c[4] * y), y),
    ),
    "variance": (
        1,
        lambda c, s, u: ((c[0] + c[1] * u * u + c[2] * s[0],), jnp.log(1 + s[0] * s[0])),
    ),
    "delay": (2, lambda c, s, u: ((u, s[0]), s[1] + c[0])),
    "selected": (
        1,
        lambda c, s, u: ((jnp.where(c[0] > 0, c[1] * s[0], -s[0] / 3) + jnp.exp(-u * u),), -s[0]),
    ),
    "total": (2, lambda c, s, u: ((h := c[0] * s[0] + u, s[1] + h * h), (h, jnp.float32(1)))),
    "resets": (1, lambda c, s, u: ((h := u + c[0] * (u < 1) * s[0],), h)),
    "chaos": (1, lambda c, s, u: ((3.4 * s[0] * (1 - s[0]) * (1 - 0.01 * jnp.tanh(u)),), s[0])),
    "neuron": (1, lambda c, s, u: ((jnp.where((v := c[0] * s[0] + c[1] * u) > 1, 0, v),), v > 1)),
}
AFFINE = ("moving average", "filter", "variance", "delay", "selected", "total")
COEFFICIENTS = np.float32([0.2, 0.3, 0.1, -1.6, 0.8])


def arguments(name: str, length: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Returns coefficients, the initial carry and the inputs of a step."""
    rng = np.random.default_rng(seed)
    return (
        COEFFICIENTS,
        (np.float32(0.3),) * STEPS[name][0],
        rng.normal(size=length).astype(np.float32),
    )


def run(scan: Any, name: str, c: Any, init: Any, xs: Any, **options: Any) -> Any:
    """Runs the loop of a step by `scan`."""
    return scan(lambda s, u: STEPS[name][1](c, s, u), init, xs, **options)


def unrolled(step: Any, init: Any, xs: Any, **options: Any) -> Any:
    return jrnn.scan(step, init, xs, executor="unrolled", **options)


def linear(n: int) -> Any:
    """Returns the step of a system of n states with one input, and with the largest state as another output."""

    def step(c: Any, s: Any, u: Any) -> Any:
        a, b = c
        new = [b[i] * u for i in range(n)]
        for i in range(n):
            for j in range(n):
                new[i] = new[i] + a[i, j] * s[j]
        return tuple(new), (new[0] - u, jnp.abs(s[-1]))

    return step


def random_system(rng: np.random.Generator, n: int, length: int) -> tuple[Any, Any, Any]:
    """Returns a random system: decays of 0 and 1e-30, growth, large numbers, and planted infinities and NaN."""
    a = rng.normal(size=(n, n)) * rng.choice([0.3, 0.6, 1.0, 1.5])
    a = np.where(rng.random((n, n)) < 0.3, rng.choice([0.0, 1e-30, 1.0], size=(n, n)), a)
    xs = rng.normal(size=length) * 10.0 ** rng.choice([0, 0, 0, 18, 36])
    for _ in range(rng.choice([0, 1, 1, 2])):
        xs[rng.integers(length)] = rng.choice([np.inf, -np.inf, np.nan, 3e38])
    first = rng.normal(size=n) * 10.0 ** rng.choice([0, 0, 0, 36])
    if rng.random() < 0.05:
        first[rng.integers(n)] = rng.choice([np.inf, np.nan])
    return (a.astype("f"), rng.normal(size=n).astype("f")), tuple(first.astype("f")), xs.astype("f")
