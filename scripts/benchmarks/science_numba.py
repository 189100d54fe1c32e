"""The loops of `science_steps.py` in numba, and in scipy where it has them: one core, `fastmath=False`.

Each function takes the parameters, the first carry and the inputs of the loop, and returns its outputs [T, ...]. Loops of
numbers are written one number at a time, the spelling in which numba is fastest.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import scipy.signal

jitted = numba.njit(fastmath=False)


@jitted
def _biquads(sos, x):
    y = np.empty_like(x)
    first = np.zeros(4, x.dtype)
    second = np.zeros(4, x.dtype)
    for t in range(len(x)):
        value = x[t]
        for k in range(4):
            out = sos[k, 0] * value + first[k]
            first[k] = sos[k, 1] * value - sos[k, 3] * out + second[k]
            second[k] = sos[k, 2] * value - sos[k, 4] * out
            value = out
        y[t] = value
    return y


@jitted
def _average(decay, x):
    y = np.empty_like(x)
    one = decay / decay
    mean = one - one
    for t in range(len(x)):
        mean = decay * mean + (one - decay) * x[t]
        y[t] = mean
    return y


@jitted
def _garch(omega, alpha, beta, x):
    y = np.empty_like(x)
    variance = omega / omega
    for t in range(len(x)):
        variance = omega + alpha * x[t] * x[t] + beta * variance
        y[t] = variance
    return y


@jitted
def _kalman(a, c, y):
    steps, states, seen = len(y), len(a), len(c)
    kind = y.dtype.type
    means = np.empty((steps, states), y.dtype)
    mean = np.zeros(states, y.dtype)
    cov = np.eye(states).astype(y.dtype)
    moved = np.empty((states, states), y.dtype)
    predicted = np.empty(states, y.dtype)
    crossed = np.empty((states, seen), y.dtype)
    gain = np.empty((states, seen), y.dtype)
    s = np.empty((seen, seen), y.dtype)
    for t in range(steps):
        for i in range(states):
            total = kind(0)
            for k in range(states):
                total += a[i, k] * mean[k]
            predicted[i] = total
            for j in range(states):
                total = kind(0)
                for k in range(states):
                    total += a[i, k] * cov[k, j]
                moved[i, j] = total
        for i in range(states):
            for j in range(states):
                total = kind(0)
                for k in range(states):
                    total += moved[i, k] * a[j, k]
                cov[i, j] = total
            cov[i, i] += kind(0.1)
        for i in range(states):
            for j in range(seen):
                total = kind(0)
                for k in range(states):
                    total += cov[i, k] * c[j, k]
                crossed[i, j] = total
        for i in range(seen):
            for j in range(seen):
                total = kind(0)
                for k in range(states):
                    total += c[i, k] * crossed[k, j]
                s[i, j] = total
            s[i, i] += kind(0.2)
        determinant = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
        for i in range(states):
            gain[i, 0] = (crossed[i, 0] * s[1, 1] - crossed[i, 1] * s[1, 0]) / determinant
            gain[i, 1] = (crossed[i, 1] * s[0, 0] - crossed[i, 0] * s[0, 1]) / determinant
        for i in range(states):
            mean[i] = predicted[i]
        for j in range(seen):
            total = y[t, j]
            for k in range(states):
                total -= c[j, k] * predicted[k]
            for i in range(states):
                mean[i] += gain[i, j] * total
        for i in range(states):
            for j in range(states):
                cov[i, j] -= gain[i, 0] * crossed[j, 0] + gain[i, 1] * crossed[j, 1]
            means[t, i] = mean[i]
    return means


@jitted
def _hidden_states(matrix, belief, likelihood):
    steps, states = likelihood.shape
    y = np.empty(steps, likelihood.dtype)
    belief = belief.copy()
    joint = np.empty(states, likelihood.dtype)
    for t in range(steps):
        joint[:] = 0
        for i in range(states):
            for j in range(states):
                joint[j] += belief[i] * matrix[i, j]
        total = joint[0] * likelihood[t, 0]
        joint[0] = total
        for j in range(1, states):
            joint[j] *= likelihood[t, j]
            total += joint[j]
        for j in range(states):
            belief[j] = joint[j] / total
        y[t] = math.log(total)
    return y


@jitted
def _neurons(leak, current):
    y = np.empty_like(current)
    voltage = np.zeros(current.shape[1], current.dtype)
    for t in range(len(current)):
        for i in range(len(voltage)):
            v = leak * voltage[i] + current[t, i]
            fires = v > 1
            y[t, i] = fires
            voltage[i] = 0 if fires else v
    return y


@jitted
def _epidemic(rate, healing, susceptible, infected, contacts):
    y = np.empty_like(contacts)
    for t in range(len(contacts)):
        new = rate * contacts[t] * susceptible * infected
        y[t] = infected
        susceptible = susceptible - new
        infected = infected + new - healing * infected
    return y


@jitted
def _advantages(discount, factor, reward, value, alive):
    y = np.empty_like(reward)
    steps, count = reward.shape
    later = np.zeros(count, reward.dtype)
    next_value = np.zeros(count, reward.dtype)
    for t in range(steps - 1, -1, -1):
        for i in range(count):
            delta = reward[t, i] + discount * next_value[i] * alive[t, i] - value[t, i]
            later[i] = delta + factor * alive[t, i] * later[i]
            next_value[i] = value[t, i]
            y[t, i] = later[i]
    return y


@jitted
def _returns(discount, reward):
    y = np.empty_like(reward)
    steps, count = reward.shape
    later = np.zeros(count, reward.dtype)
    for t in range(steps - 1, -1, -1):
        for i in range(count):
            later[i] = reward[t, i] + discount * later[i]
            y[t, i] = later[i]
    return y


@jitted
def _lstm(w, u, b, x):
    steps, batch, _ = x.shape
    hidden = len(u)
    one = x.dtype.type(1)
    h = np.zeros((batch, hidden), x.dtype)
    c = np.zeros((batch, hidden), x.dtype)
    y = np.empty((steps, batch, hidden), x.dtype)
    for t in range(steps):
        gates = np.dot(x[t], w) + np.dot(h, u) + b
        for n in range(batch):
            for j in range(hidden):
                i = one / (one + math.exp(-gates[n, j]))
                f = one / (one + math.exp(-gates[n, hidden + j]))
                g = math.tanh(gates[n, 2 * hidden + j])
                o = one / (one + math.exp(-gates[n, 3 * hidden + j]))
                c[n, j] = f * c[n, j] + i * g
                h[n, j] = o * math.tanh(c[n, j])
                y[t, n, j] = h[n, j]
    return y


@jitted
def _pendulum(damping, half, step, sixth, angle, speed, force):
    y = np.empty_like(force)
    two = step / half
    for t in range(len(force)):
        a1 = speed
        s1 = force[t] - math.sin(angle) - damping * speed
        a2 = speed + half * s1
        s2 = force[t] - math.sin(angle + half * a1) - damping * a2
        a3 = speed + half * s2
        s3 = force[t] - math.sin(angle + half * a2) - damping * a3
        a4 = speed + step * s3
        s4 = force[t] - math.sin(angle + step * a3) - damping * a4
        angle = angle + sixth * (a1 + two * a2 + two * a3 + a4)
        speed = speed + sixth * (s1 + two * s2 + two * s3 + s4)
        y[t] = angle
    return y


def in_numba(name: str, p: dict[str, Any], carry: Any, xs: Any, kind: type) -> Any:
    """Returns a call without arguments that runs a loop in numba, and returns its outputs."""
    values = {key: kind(v) if np.ndim(v) == 0 else v for key, v in p.items()}
    calls = {
        "biquads": lambda: _biquads(values["sos"], xs),
        "average": lambda: _average(values["decay"], xs),
        "garch": lambda: _garch(values["omega"], values["alpha"], values["beta"], xs),
        "kalman": lambda: _kalman(values["transition"], values["observation"], xs),
        "hidden_states": lambda: _hidden_states(values["matrix"], carry, xs),
        "neurons": lambda: _neurons(values["leak"], xs),
        "epidemic": lambda: _epidemic(
            values["rate"], values["healing"], kind(carry[0]), kind(carry[1]), xs
        ),
        "advantages": lambda: _advantages(
            values["discount"], kind(values["discount"] * kind(0.95)), *xs
        ),
        "returns": lambda: _returns(values["discount"], xs),
        "lstm": lambda: _lstm(values["w"], values["u"], values["b"], xs),
        "pendulum": lambda: _pendulum(
            values["damping"],
            kind(0.005),
            kind(0.01),
            kind(0.01 / 6),
            kind(carry[0]),
            kind(carry[1]),
            xs,
        ),
    }
    return calls[name]


def in_scipy(name: str, p: dict[str, Any], carry: Any, xs: Any, kind: type) -> Any:
    """Returns a call without arguments that runs a loop in scipy, or None where scipy does not have it."""
    if name == "biquads":
        first, rest = p["sos"][:, :3], p["sos"][:, 3:]
        sections = np.concatenate([first, np.ones((4, 1), kind), rest], 1).astype(kind)
        return lambda: scipy.signal.sosfilt(sections, xs)
    if name == "average":
        decay = kind(p["decay"])
        b, a = np.array([1 - decay], kind), np.array([1, -decay], kind)
        return lambda: scipy.signal.lfilter(b, a, xs)
    if name == "garch":
        omega, alpha, beta = (kind(p[key]) for key in ("omega", "alpha", "beta"))
        one, a = np.array([1], kind), np.array([1, -beta], kind)
        before = np.array([beta * kind(carry)], kind)
        return lambda: scipy.signal.lfilter(one, a, omega + alpha * xs * xs, zi=before)[0]
    if name == "returns":
        discount = kind(p["discount"])
        one, a = np.array([1], kind), np.array([1, -discount], kind)
        return lambda: scipy.signal.lfilter(one, a, xs[::-1], axis=0)[::-1]
    return None
