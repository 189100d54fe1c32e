"""Steps over small states, for the suite `filters`: filters, smoothers, integrators, neurons and policies.

`LOOPS` has functions that return `(step, carry, xs)` for a number of steps.

Shapes: T time, n states, m observations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loop = tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def model(n: int, m: int) -> tuple[Any, Any, Any, Any]:
    """Returns the dynamics, the observation, and the covariances of their noises."""
    return jnp.eye(n) + 0.01 / n, jnp.eye(m, n), 0.01 * jnp.eye(n), 0.1 * jnp.eye(m)


def kalman(n: int, m: int, steps: int) -> Loop:
    """A Kalman filter by a Cholesky factor, with the likelihood."""
    f, h, q, r = model(n, m)

    def step(belief: Any, y: Any) -> Any:
        mean, cov = f @ belief[0], f @ belief[1] @ f.T + q
        factor = jnp.linalg.cholesky(h @ cov @ h.T + r)
        gain = jax.scipy.linalg.cho_solve((factor, True), h @ cov).T
        error = y - h @ mean
        whitened = jax.scipy.linalg.solve_triangular(factor, error, lower=True)
        likelihood = -0.5 * jnp.sum(whitened**2) - jnp.sum(jnp.log(jnp.diag(factor)))
        return (mean + gain @ error, cov - gain @ h @ cov), likelihood

    return step, (jnp.zeros(n), jnp.eye(n)), draw(steps, m)


def joseph(steps: int) -> Loop:
    """A Kalman filter in Joseph's form, by an inverse."""
    f, h, q, r = model(4, 2)

    def step(belief: Any, y: Any) -> Any:
        mean, cov = f @ belief[0], f @ belief[1] @ f.T + q
        gain = cov @ h.T @ jnp.linalg.inv(h @ cov @ h.T + r)
        left = jnp.eye(4) - gain @ h
        mean = mean + gain @ (y - h @ mean)
        return (mean, left @ cov @ left.T + gain @ r @ gain.T), mean

    return step, (jnp.zeros(4), jnp.eye(4)), draw(steps, 2)


def square_root(steps: int) -> Loop:
    """A Kalman filter whose covariances are factors, by QR factorizations."""
    f, h, q, r = model(4, 2)
    root_q, root_r = jnp.sqrt(q), jnp.sqrt(r)

    def step(belief: Any, y: Any) -> Any:
        mean, root = belief
        mean = f @ mean
        root = jnp.linalg.qr(jnp.concatenate([root @ f.T, root_q]), mode="r")
        joint = jnp.block([[root_r, jnp.zeros((2, 4))], [root @ h.T, root]])
        whole = jnp.linalg.qr(joint, mode="r")
        error = jax.scipy.linalg.solve_triangular(whole[:2, :2], y - h @ mean, trans=1)
        mean = mean + whole[:2, 2:].T @ error
        return (mean, whole[2:, 2:]), mean

    return step, (jnp.zeros(4), jnp.eye(4)), draw(steps, 2)


def information(steps: int) -> Loop:
    """An information filter, by solves with pivots."""
    f, h, q, r = model(4, 2)
    seen = h.T @ jnp.linalg.inv(r)

    def step(belief: Any, y: Any) -> Any:
        vector, matrix = belief
        mean = jnp.linalg.solve(matrix, vector)
        matrix = jnp.linalg.inv(f @ jnp.linalg.inv(matrix) @ f.T + q)
        return (matrix @ (f @ mean) + seen @ y, matrix + seen @ h), mean

    return step, (jnp.zeros(4), jnp.eye(4)), draw(steps, 2)


def smoother(steps: int) -> Loop:
    """The backward recursion of Rauch, Tung and Striebel."""
    f, _, q, _ = model(4, 2)
    factors = draw(steps, 4, 4) / 4
    covs = jnp.einsum("tij,tkj->tik", factors, factors) + 0.1 * jnp.eye(4)[None]

    def step(later: Any, x: Any) -> Any:
        mean, cov = x
        predicted = f @ cov @ f.T + q
        gain = jax.scipy.linalg.solve(predicted, f @ cov, assume_a="pos").T
        mean = mean + gain @ (later[0] - f @ mean)
        cov = cov + gain @ (later[1] - predicted) @ gain.T
        return (mean, cov), (mean, cov)

    return step, (jnp.zeros(4), jnp.eye(4)), (draw(steps, 4), covs)


def riccati(steps: int) -> Loop:
    """The Riccati recursion of a regulator with 6 states and 2 controls."""
    a, b = jnp.eye(6) + 0.1 * draw(6, 6) / 6, draw(6, 2)

    def step(p: Any, q: Any) -> Any:
        gain = jnp.linalg.solve(jnp.eye(2) + b.T @ p @ b, b.T @ p @ a)
        return a.T @ p @ (a - b @ gain) + jnp.diag(q**2), gain

    return step, jnp.eye(6), draw(steps, 6)


def gaussian_process(steps: int) -> Loop:
    """The factorization of a celerite kernel with 4 terms, and a solve with it."""
    amplitude = jnp.linspace(0.5, 1.0, 4)

    def step(carry: Any, x: Any) -> Any:
        s, w, d, f, z = carry
        u, v, decay, y = x
        s = jnp.outer(decay, decay) * (s + d * jnp.outer(w, w))
        f = decay * (f + w * z)
        d = jnp.sum(amplitude * u**2) + 1.0 - u @ s @ u
        w = (v - s @ u) / d
        z = y - u @ f
        return (s, w, d, f, z), z**2 / d + jnp.log(d)

    zeros = jnp.zeros(4)
    u = draw(steps, 4) / 4
    return (
        step,
        (jnp.zeros((4, 4)), zeros, jnp.ones(()), zeros, jnp.zeros(())),
        (u, u, jnp.full((steps, 4), 0.9), draw(steps)),
    )


def markov(steps: int) -> Loop:
    """The forward recursion of a hidden Markov model of 8 states."""
    transition = jax.nn.softmax(draw(8, 8))

    def step(alpha: Any, logits: Any) -> Any:
        alpha = (alpha @ transition) * jnp.exp(logits - jnp.max(logits))
        total = jnp.sum(alpha)
        return alpha / total, jnp.log(total)

    return step, jnp.full(8, 1 / 8), draw(steps, 8)


def orbit(steps: int) -> Loop:
    """Five bodies that attract each other, by leapfrog steps."""
    mass = jnp.asarray([1.0, 1e-3, 1e-3, 1e-3, 1e-3])

    def pull(at: Any) -> Any:
        apart = at[None, :] - at[:, None]
        return jnp.sum(
            mass[None, :, None] * apart / (jnp.sum(apart**2, -1, keepdims=True) + 1e-3) ** 1.5, 1
        )

    def step(state: Any, push: Any) -> Any:
        at, speed = state
        speed = speed + 0.005 * (pull(at) + push)
        at = at + 0.01 * speed
        speed = speed + 0.005 * pull(at)
        return (at, speed), at

    return step, (draw(5, 3), 0.3 * draw(5, 3)), 1e-3 * draw(steps, 5, 3)


def rigid_body(steps: int) -> Loop:
    """A turning body, whose rotation is a matrix that stays orthogonal by Cayley's map."""
    inertia = jnp.asarray([[2.0, 0.1, 0.0], [0.1, 1.5, 0.2], [0.0, 0.2, 1.0]])

    def step(state: Any, torque: Any) -> Any:
        rotation, omega = state
        omega = omega + 0.01 * jnp.linalg.solve(inertia, torque - jnp.cross(omega, inertia @ omega))
        x, y, z = 0.01 * omega
        spin = jnp.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
        rotation = rotation @ jnp.linalg.solve(jnp.eye(3) - spin / 2, jnp.eye(3) + spin / 2)
        return (rotation, omega), rotation[:, 0]

    return step, (jnp.eye(3), jnp.ones(3)), 0.1 * draw(steps, 3)


def neuron(steps: int) -> Loop:
    """Hodgkin and Huxley's neuron, by exponential Euler steps."""

    def gate(value: Any, opening: Any, closing: Any) -> Any:
        settled = opening / (opening + closing)
        return settled + (value - settled) * jnp.exp(-0.025 * (opening + closing))

    def step(state: Any, current: Any) -> Any:
        v, m, h, n = state
        m = gate(m, 0.1 * (v + 40.1) / (1 - jnp.exp(-(v + 40.1) / 10)), 4 * jnp.exp(-(v + 65) / 18))
        h = gate(h, 0.07 * jnp.exp(-(v + 65) / 20), 1 / (1 + jnp.exp(-(v + 35) / 10)))
        n = gate(
            n, 0.01 * (v + 55.1) / (1 - jnp.exp(-(v + 55.1) / 10)), 0.125 * jnp.exp(-(v + 65) / 80)
        )
        flow = 120 * m**3 * h * (v - 50) + 36 * n**4 * (v + 77) + 0.3 * (v + 54.4)
        v = v + 0.025 * (10 * current - flow)
        return (v, m, h, n), v

    return (
        step,
        (jnp.float32(-65.0), jnp.float32(0.05), jnp.float32(0.6), jnp.float32(0.32)),
        jnp.abs(draw(steps)),
    )


def epidemic(steps: int) -> Loop:
    """Susceptible, infected and recovered people of 4 ages that meet, by Runge-Kutta steps."""
    meeting = jnp.abs(draw(4, 4)) / 4

    def flow(state: Any, rate: Any) -> Any:
        susceptible, infected, _ = state
        new = rate * susceptible * (meeting @ infected)
        return jnp.stack([-new, new - 0.1 * infected, 0.1 * infected])

    def step(state: Any, rate: Any) -> Any:
        k1 = flow(state, rate)
        k2 = flow(state + 0.05 * k1, rate)
        k3 = flow(state + 0.05 * k2, rate)
        state = state + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + flow(state + 0.1 * k3, rate))
        return state, state[1]

    return step, jnp.asarray([[0.99] * 4, [0.01] * 4, [0.0] * 4]), jnp.abs(draw(steps)) / 2


def particles(steps: int) -> Loop:
    """64 particles with weights, moved by random numbers, without resampling."""

    def step(state: Any, x: Any) -> Any:
        at, weight = state
        key, y = x
        at = 0.9 * at + 0.1 * jnp.tanh(at) + 0.3 * jax.random.normal(key, (64, 2))
        weight = weight - 0.5 * jnp.sum((y[None] - at) ** 2, 1)
        weight = weight - jax.nn.logsumexp(weight)
        return (at, weight), jnp.exp(weight) @ at

    keys = jax.random.split(jax.random.key(0), steps)
    return step, (jnp.zeros((64, 2)), jnp.zeros(64)), (keys, draw(steps, 2))


def unscented(steps: int) -> Loop:
    """An unscented Kalman filter of 3 states that are seen through a nonlinear function."""
    f, _, q, r = model(3, 2)
    weights = jnp.full(7, 1 / 8).at[0].set(1 / 4)

    def seen(point: Any) -> Any:
        return jnp.stack([jnp.sqrt(1 + jnp.sum(point**2)), jnp.sin(point[0]) + point[1]])

    def step(belief: Any, y: Any) -> Any:
        mean, cov = f @ belief[0], f @ belief[1] @ f.T + q
        root = jnp.linalg.cholesky(4 * cov)
        points = jnp.concatenate([mean[None], mean[None] + root.T, mean[None] - root.T])
        observed = jax.vmap(seen)(points)
        middle = weights @ observed
        apart = observed - middle[None]
        innovation = apart.T @ (weights[:, None] * apart) + r
        crossed = (points - mean[None]).T @ (weights[:, None] * apart)
        gain = jnp.linalg.solve(innovation, crossed.T).T
        return (mean + gain @ (y - middle), cov - gain @ innovation @ gain.T), mean

    return step, (jnp.zeros(3), jnp.eye(3)), draw(steps, 2)


def bicycle(steps: int) -> Loop:
    """A bicycle that follows a path, steered by a policy with one hidden layer."""
    w, u = draw(6, 16) / 3, draw(16, 2) / 4

    def step(state: Any, aim: Any) -> Any:
        x, y, angle, speed = state
        inputs = jnp.stack([aim[0] - x, aim[1] - y, jnp.cos(angle), jnp.sin(angle), speed, 1.0])
        steering, push = jnp.tanh(jnp.tanh(inputs @ w) @ u)
        new = x + 0.1 * speed * jnp.cos(angle), y + 0.1 * speed * jnp.sin(angle)
        state = (*new, angle + 0.1 * speed * jnp.tan(0.5 * steering), 0.98 * speed + 0.1 * push)
        return state, (x - aim[0]) ** 2 + (y - aim[1]) ** 2

    return step, tuple(jnp.zeros(4, jnp.float32)), draw(steps, 2)


def neural_ode(batch: int, steps: int) -> Loop:
    """Runge-Kutta steps of a network with 32 hidden units."""
    w, u = draw(4, 32) / 2, draw(32, 4) / 32**0.5

    def field(y: Any) -> Any:
        return jnp.tanh(y @ w) @ u

    def step(y: Any, x: Any) -> Any:
        k1 = field(y)
        k2 = field(y + 0.005 * k1)
        k3 = field(y + 0.005 * k2)
        y = y + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + field(y + 0.01 * k3)) + x
        return y, y

    return step, jnp.ones((batch, 4)), jnp.zeros(steps)


LOOPS: dict[str, Callable[[int], Loop]] = {
    "kalman_4": partial(kalman, 4, 2),
    "kalman_6": partial(kalman, 6, 3),
    "kalman_12": partial(kalman, 12, 6),
    "neural_ode_1": partial(neural_ode, 1),
    "neural_ode_16": partial(neural_ode, 16),
    **{
        fn.__name__: fn
        for fn in (
            joseph,
            square_root,
            information,
            smoother,
            riccati,
            gaussian_process,
            markov,
            orbit,
        )
    },
    **{fn.__name__: fn for fn in (rigid_body, neuron, epidemic, particles, unscented, bicycle)},
}
