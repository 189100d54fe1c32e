"""The loops of scientists as steps of a scan: filters, averages, volatility, hidden states, neurons, epidemics, learning.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[Any, Any], tuple[Any, Any]]


class ScienceLoop(NamedTuple):
    """A loop, with its inputs.

    Attributes:
        step: returns the step for some parameters.
        parameters: arrays that the step reads, by name; gradients are with respect to them and to the inputs.
        carry: the first carry.
        xs: the inputs [T, ...].
        reverse: True for a loop that runs from the last step to the first one.
    """

    step: Callable[[Mapping[str, Any]], Step]
    parameters: dict[str, np.ndarray]
    carry: Any
    xs: Any
    reverse: bool = False


def biquads(rng: np.random.Generator) -> ScienceLoop:
    """Four sections of a filter of audio, in the transposed direct form II."""
    sos = np.tile(np.array([0.2, 0.3, 0.1, -1.6, 0.8]), (4, 1)) + 0.01 * rng.normal(size=(4, 5))

    def step(p: Mapping[str, Any]) -> Step:
        def filtered(carry: Any, x: Any) -> tuple[Any, Any]:
            new = []
            for k in range(4):
                b0, b1, b2, a1, a2 = (p["sos"][k, i] for i in range(5))
                first, second = carry[k]
                y = b0 * x + first
                new.append((b1 * x - a1 * y + second, b2 * x - a2 * y))
                x = y
            return new, x

        return filtered

    return ScienceLoop(step, {"sos": sos}, [(0.0, 0.0)] * 4, rng.normal(size=48_000))


def average(rng: np.random.Generator) -> ScienceLoop:
    """An exponential moving average."""

    def step(p: Mapping[str, Any]) -> Step:
        def averaged(mean: Any, x: Any) -> tuple[Any, Any]:
            mean = p["decay"] * mean + (1 - p["decay"]) * x
            return mean, mean

        return averaged

    return ScienceLoop(step, {"decay": np.array(0.95)}, 0.0, rng.normal(size=100_000))


def garch(rng: np.random.Generator) -> ScienceLoop:
    """The variance of returns, GARCH(1, 1)."""

    def step(p: Mapping[str, Any]) -> Step:
        def variance(before: Any, x: Any) -> tuple[Any, Any]:
            new = p["omega"] + p["alpha"] * x * x + p["beta"] * before
            return new, new

        return variance

    parameters = {"omega": np.array(0.1), "alpha": np.array(0.1), "beta": np.array(0.85)}
    return ScienceLoop(step, parameters, 1.0, rng.normal(size=5_000))


def kalman(rng: np.random.Generator) -> ScienceLoop:
    """A Kalman filter with 4 states and 2 observations; it puts out the mean."""
    transition = 0.9 * np.linalg.qr(rng.normal(size=(4, 4)))[0]
    parameters = {"transition": transition, "observation": rng.normal(size=(2, 4))}

    def step(p: Mapping[str, Any]) -> Step:
        a, c = p["transition"], p["observation"]

        def filtered(carry: Any, y: Any) -> tuple[Any, Any]:
            mean, cov = carry
            mean = a @ mean
            cov = a @ cov @ a.T + 0.1 * jnp.eye(4, dtype=cov.dtype)
            crossed = cov @ c.T
            innovation = c @ crossed + 0.2 * jnp.eye(2, dtype=cov.dtype)
            gain = jnp.linalg.solve(innovation, crossed.T).T
            mean = mean + gain @ (y - c @ mean)
            cov = cov - gain @ crossed.T
            return (mean, cov), mean

        return filtered

    return ScienceLoop(step, parameters, (np.zeros(4), np.eye(4)), rng.normal(size=(2_000, 2)))


def hidden_states(rng: np.random.Generator) -> ScienceLoop:
    """The forward algorithm of a hidden Markov model with 16 states, normalized at each step."""
    matrix = rng.random((16, 16))
    matrix /= matrix.sum(1, keepdims=True)

    def step(p: Mapping[str, Any]) -> Step:
        def forward(belief: Any, likelihood: Any) -> tuple[Any, Any]:
            joint = (belief @ p["matrix"]) * likelihood
            total = jnp.sum(joint)
            return joint / total, jnp.log(total)

        return forward

    return ScienceLoop(step, {"matrix": matrix}, np.full(16, 1 / 16), rng.random((2_000, 16)) + 0.1)


def neurons(rng: np.random.Generator) -> ScienceLoop:
    """100 leaky neurons that are reset when they fire."""

    def step(p: Mapping[str, Any]) -> Step:
        def fire(voltage: Any, current: Any) -> tuple[Any, Any]:
            voltage = p["leak"] * voltage + current
            fires = voltage > 1.0
            return jnp.where(fires, 0.0, voltage), fires.astype(voltage.dtype)

        return fire

    return ScienceLoop(step, {"leak": np.array(0.9)}, np.zeros(100), rng.random((5_000, 100)) * 0.3)


def epidemic(rng: np.random.Generator) -> ScienceLoop:
    """Susceptible, infected and recovered people, with a rate of contacts that changes."""

    def step(p: Mapping[str, Any]) -> Step:
        def infect(carry: Any, contacts: Any) -> tuple[Any, Any]:
            susceptible, infected, recovered = carry
            new = p["rate"] * contacts * susceptible * infected
            healed = p["healing"] * infected
            carry = (susceptible - new, infected + new - healed, recovered + healed)
            return carry, infected

        return infect

    parameters = {"rate": np.array(3e-3), "healing": np.array(1e-3)}
    return ScienceLoop(step, parameters, (0.99, 0.01, 0.0), 1 + 0.1 * rng.random(10_000))


def advantages(rng: np.random.Generator) -> ScienceLoop:
    """Generalized advantage estimation for 16 environments."""

    def step(p: Mapping[str, Any]) -> Step:
        def advantage(carry: Any, x: Any) -> tuple[Any, Any]:
            later, next_value = carry
            reward, value, alive = x
            delta = reward + p["discount"] * next_value * alive - value
            later = delta + p["discount"] * 0.95 * alive * later
            return (later, value), later

        return advantage

    alive = (rng.random((2_048, 16)) > 0.01).astype(float)
    xs = (rng.normal(size=(2_048, 16)), rng.normal(size=(2_048, 16)), alive)
    carry = (np.zeros(16), np.zeros(16))
    return ScienceLoop(step, {"discount": np.array(0.99)}, carry, xs, reverse=True)


def returns(rng: np.random.Generator) -> ScienceLoop:
    """Discounted returns of 16 environments."""

    def step(p: Mapping[str, Any]) -> Step:
        def discounted(later: Any, reward: Any) -> tuple[Any, Any]:
            later = reward + p["discount"] * later
            return later, later

        return discounted

    xs = rng.normal(size=(2_048, 16))
    return ScienceLoop(step, {"discount": np.array(0.99)}, np.zeros(16), xs, reverse=True)


def lstm(rng: np.random.Generator) -> ScienceLoop:
    """An LSTM, [T, N, D, H] = [200, 16, 64, 128]."""
    parameters = {
        "w": rng.normal(size=(64, 512)) / 8,
        "u": rng.normal(size=(128, 512)) / 12,
        "b": np.zeros(512),
    }

    def step(p: Mapping[str, Any]) -> Step:
        def cell(carry: Any, x: Any) -> tuple[Any, Any]:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return cell

    zeros = np.zeros((16, 128))
    return ScienceLoop(step, parameters, (zeros, zeros), rng.normal(size=(200, 16, 64)))


def pendulum(rng: np.random.Generator) -> ScienceLoop:
    """A damped and driven pendulum, by the method of Runge and Kutta of order 4."""

    def step(p: Mapping[str, Any]) -> Step:
        def slope(angle: Any, speed: Any, force: Any) -> tuple[Any, Any]:
            return speed, force - jnp.sin(angle) - p["damping"] * speed

        def advance(carry: Any, force: Any) -> tuple[Any, Any]:
            angle, speed = carry
            a1, s1 = slope(angle, speed, force)
            a2, s2 = slope(angle + 0.005 * a1, speed + 0.005 * s1, force)
            a3, s3 = slope(angle + 0.005 * a2, speed + 0.005 * s2, force)
            a4, s4 = slope(angle + 0.01 * a3, speed + 0.01 * s3, force)
            angle = angle + 0.01 / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
            speed = speed + 0.01 / 6 * (s1 + 2 * s2 + 2 * s3 + s4)
            return (angle, speed), angle

        return advance

    return ScienceLoop(step, {"damping": np.array(0.1)}, (0.5, 0.0), 0.1 * rng.normal(size=20_000))


LOOPS: dict[str, Callable[[np.random.Generator], ScienceLoop]] = {
    made.__name__: made
    for made in (
        biquads,
        average,
        garch,
        kalman,
        hidden_states,
        neurons,
        epidemic,
        advantages,
        returns,
        lstm,
        pendulum,
    )
}
