"""Twelve steps for the executor "newton": `(make(parameters) -> step, shapes, carry names)`.

Shapes: N batch, D input, H hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

N, D, H = 2, 3, 4
sigmoid = jax.nn.sigmoid


def elman_diagonal(p):
    def step(h, x):
        h = jnp.tanh(p["u"] * h + x @ p["w"])
        return h, h

    return step


def elman_dense(p):
    def step(h, x):
        h = jnp.tanh(h @ p["v"] + x @ p["w"])
        return h, jnp.sin(h)

    return step


def gru(p):
    def step(h, x):
        r, z = sigmoid(p["u"] * h + x @ p["w"]), sigmoid(p["u2"] * h + x @ p["w2"])
        n = jnp.tanh(x @ p["w3"] + r * (p["u3"] * h))
        h = (1 - z) * n + z * h
        return h, h

    return step


def lstm(p):
    def step(carry, x):
        h, c = carry
        i, f = sigmoid(x @ p["w"] + p["u"] * h), sigmoid(x @ p["w2"] + p["u2"] * h + 1.0)
        c = f * c + i * jnp.tanh(x @ p["w3"] + p["u3"] * h)
        h = sigmoid(x @ p["w4"]) * jnp.tanh(c)
        return (h, c), h

    return step


def slstm(p):
    """Beck et al. 2024: exponential gates with a normalizer n and a stabilizer m; diagonal recurrence."""

    def step(carry, x):
        h, c, n, m = carry
        log_i, log_f = x @ p["w"] + p["u"] * h, jax.nn.log_sigmoid(x @ p["w2"] + p["u2"] * h)
        m_new = jnp.maximum(log_f + m, log_i)
        i, f = jnp.exp(log_i - m_new), jnp.exp(log_f + m - m_new)
        c, n = f * c + i * jnp.tanh(x @ p["w3"] + p["u3"] * h), f * n + i
        h = sigmoid(x @ p["w4"]) * c / n
        return (h, c, n, m_new), h

    return step


def cfc(p):
    """Hasani et al. 2022: a closed-form continuous-time cell."""

    def step(h, x):
        backbone = jnp.tanh(x @ p["w"] + p["u"] * h)
        gate = sigmoid(-(backbone * p["u2"]) * 0.5 + x @ p["w2"])
        h = jnp.tanh(backbone * p["u3"]) * (1 - gate) + gate * jnp.tanh(backbone)
        return h, h

    return step


def slope(p, h, x):
    return jnp.tanh(h @ p["v"] + x @ p["w"]) - h


def euler(p):
    def step(h, x):
        h = h + 0.2 * slope(p, h, x)
        return h, h

    return step


def runge_kutta(p):
    def step(h, x):
        a = slope(p, h, x)
        b = slope(p, h + 0.15 * a, x)
        c = slope(p, h + 0.15 * b, x)
        d = slope(p, h + 0.3 * c, x)
        h = h + 0.05 * (a + 2 * b + 2 * c + d)
        return h, h

    return step


def mingru(p):
    def step(h, x):
        z = sigmoid(x @ p["w"])
        h = (1 - z) * h + z * (x @ p["w2"])
        return h, h

    return step


def kalman(p):
    """The covariance of a scalar observation of two states."""
    turn = jnp.asarray([[0.9, 0.3], [-0.3, 0.9]])

    def step(s, x):
        s = turn.astype(s.dtype) @ s @ turn.T.astype(s.dtype) + 0.1 * jnp.eye(2, dtype=s.dtype)
        gain = s[:, :1] / (s[0, 0] + 1.0 + x[0, 0] ** 2)
        s = s - gain @ s[:1]
        return s, gain

    return step


def leaky(p):
    """A rate model of neurons: excitatory and inhibitory units with time constants."""
    signs = jnp.asarray([[1.0, 1.0, 1.0, -1.0]])

    def step(v, x):
        v = v + 0.1 * (
            -v + (jax.nn.relu(jnp.tanh(v)) * signs.astype(v.dtype)) @ jnp.abs(p["v"]) + x @ p["w"]
        )
        return v, jnp.tanh(v)

    return step


def ctrnn(p):
    def step(y, x):
        y = y + (0.1 / (1.0 + p["u"] ** 2)) * (-y + sigmoid(y + p["u2"]) @ p["v"] + x @ p["w"])
        return y, y

    return step


def lorenz(p):
    def step(s, x):
        a, b, c = s[..., 0], s[..., 1], s[..., 2]
        moved = jnp.stack([10.0 * (b - a), a * (28.0 - c) - b, a * b - 8.0 / 3.0 * c], axis=-1)
        s = s + 0.02 * moved + 0.0 * x
        return s, s

    return step


DIAGONAL = dict(w=(D, H), u=(1, H))
TWO = dict(w2=(D, H), u2=(1, H))
THREE = dict(w3=(D, H), u3=(1, H))
DENSE = dict(w=(D, H), v=(H, H))
# name: (step, shapes of the parameters, number of carries, shape of the carry or None for [N, H], size of a block)
CELLS = {
    "elman_diagonal": (elman_diagonal, DIAGONAL, 1, (N, H), 1),
    "elman_dense": (elman_dense, DENSE, 1, (N, H), H),
    "gru": (gru, DIAGONAL | TWO | THREE, 1, (N, H), 1),
    "lstm": (lstm, DIAGONAL | TWO | THREE | dict(w4=(D, H)), 2, (N, H), 2),
    "slstm": (slstm, DIAGONAL | TWO | THREE | dict(w4=(D, H)), 4, (N, H), 4),
    "cfc": (cfc, DIAGONAL | TWO | THREE, 1, (N, H), 1),
    "euler": (euler, DENSE, 1, (N, H), H),
    "runge_kutta": (runge_kutta, DENSE, 1, (N, H), H),
    "mingru": (mingru, DIAGONAL | TWO, 1, (N, H), 1),
    "kalman": (kalman, DIAGONAL, 1, (2, 2), 4),
    "leaky": (leaky, DENSE, 1, (N, H), H),
    "ctrnn": (ctrnn, DENSE | dict(u=(1, H), u2=(1, H)), 1, (N, H), H),
    "lorenz": (lorenz, DIAGONAL, 1, (N, 3), 3),
}


def example(name, steps, seed=0, gain=0.6):
    """`(make, parameters, carry, xs)` in float64."""
    make, shapes, carries, shape, _ = CELLS[name]
    random = np.random.RandomState(seed)
    p = {key: jnp.asarray(random.randn(*s) * gain) for key, s in sorted(shapes.items())}
    carry = tuple(
        jnp.asarray(random.randn(*shape) * 0.3 + (1.0 if name in ("lorenz", "slstm") else 0.0))
        for _ in range(carries)
    )
    if name == "kalman":
        carry = (jnp.eye(2) * 2.0,)
    xs = jnp.asarray(random.randn(steps, N, 3 if name == "lorenz" else D))
    return make, p, carry[0] if carries == 1 else carry, xs
