"""Steps of recurrent cells from the literature, each with weights, a first carry and a sequence of two elements.

Shapes: N batch (2), D input (2), H hidden (3); a step is `(weights, carry, x [N, D]) -> (carry, y)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jrnn

N, D, H = 2, 2, 3
CELLS: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A step, and its arguments."""

    step: Callable[..., Any]
    weights: Any
    carry: Any
    xs: Any
    net: bool = field(default=True)  # whether the step converts to a net

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        return self.weights, self.carry, self.xs


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def cell(
    weights: dict[str, tuple[int, ...]], carry: Any, x: tuple[int, ...] = (N, D), **options: Any
) -> Callable:
    """Registers a step, with normal weights of these shapes, and a carry that is a tree of shapes."""

    def register(step: Callable) -> Callable:
        rng = np.random.default_rng(len(CELLS))
        is_shape = lambda v: isinstance(v, tuple) and all(isinstance(n, int) for n in v)  # noqa: E731
        params = {n: 0.5 * normal(rng, *s) for n, s in weights.items()}
        first = jax.tree.map(lambda s: 0.5 * normal(rng, *s), carry, is_leaf=is_shape)
        CELLS[step.__name__] = Case(step, params, first, normal(rng, 2, *x), **options)
        return step

    return register


def both(w, x, h):
    """The products with x and h, [N, gates*H]."""
    return x @ w["w"] + h @ w["u"]


def gates(count: int) -> dict[str, tuple[int, ...]]:
    return {"w": (D, count * H), "u": (H, count * H)}


HIDDEN = (N, H)
sigmoid = jax.nn.sigmoid

# Gated cells -----------------------------------------------------------------------------------------------------------


@cell(gates(1), HIDDEN)
def elman(w, h, x):
    h = jnp.tanh(both(w, x, h))
    return h, h


@cell(gates(4), (HIDDEN, HIDDEN))
def lstm(w, carry, x):
    c, h = carry
    i, f, g, o = jnp.split(both(w, x, h), 4, -1)
    c = sigmoid(f + 1.0) * c + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return (c, h), h


@cell({**gates(4), "p": (3, 1, H)}, (HIDDEN, HIDDEN))
def peephole_lstm(w, carry, x):
    c, h = carry
    i, f, g, o = jnp.split(both(w, x, h), 4, -1)
    new = sigmoid(f + w["p"][0] * c) * c + sigmoid(i + w["p"][1] * c) * jnp.tanh(g)
    h = sigmoid(o + w["p"][2] * new) * jnp.tanh(new)
    return (new, h), h


@cell({"w": (D, 3 * H), "u": (H, 3 * H), "b": (1, H)}, HIDDEN)
def gru(w, h, x):
    xz, xr, xn = jnp.split(x @ w["w"], 3, -1)
    hz, hr, hn = jnp.split(h @ w["u"], 3, -1)
    z = sigmoid(xz + hz)
    n = jnp.tanh(xn + sigmoid(xr + hr) * (hn + w["b"]))
    h = (1 - z) * n + z * h
    return h, h


@cell({"w": (D, 2 * H)}, HIDDEN)
def min_gru_in_logs(w, log_h, x):
    """minGRU in the logarithms of Feng et al.: softplus, log of g(x), logaddexp."""
    k, v = jnp.split(x @ w["w"], 2, -1)
    log_z, log_coefficient = -jax.nn.softplus(-k), -jax.nn.softplus(k)
    log_g = jnp.where(v >= 0, jnp.log(jax.nn.relu(v) + 0.5), -jax.nn.softplus(-v))
    log_h = jnp.logaddexp(log_coefficient + log_h, log_z + log_g)
    return log_h, jnp.exp(log_h)


@cell({"w": (D, 3 * H)}, HIDDEN)
def min_lstm(w, h, x):
    f, i, g = jnp.split(x @ w["w"], 3, -1)
    f, i = jnp.exp(jax.nn.log_sigmoid(f)), jnp.exp(jax.nn.log_sigmoid(i))
    h = f / (f + i) * h + i / (f + i) * jnp.where(g >= 0, g + 0.5, sigmoid(g))
    return h, h


@cell({"w": (D, 2 * H)}, HIDDEN)
def mgu_hard(w, h, x):
    """A minimal gated unit with hard sigmoids."""
    f, n = jnp.split(x @ w["w"], 2, -1)
    f = jax.nn.hard_sigmoid(f)
    h = (1 - f) * h + f * jax.nn.hard_tanh(n + f * h)
    return h, h


@cell(gates(1) | {"a": (D, H), "b": (H, H)}, HIDDEN)
def multiplicative_rnn(w, h, x):
    h = jnp.tanh(x @ w["w"] + ((x @ w["a"]) * (h @ w["b"])) @ w["u"])
    return h, h


@cell({"w": (D, 3 * H), "v": (2, 1, H)}, HIDDEN)
def sru(w, c, x):
    u, f, r = jnp.split(x @ w["w"], 3, -1)
    f, r = sigmoid(f + w["v"][0] * c), sigmoid(r + w["v"][1] * c)
    c = f * c + (1 - f) * u
    return c, r * jnp.tanh(c) + (1 - r) * u


@cell({"w": (D, 3 * H)}, HIDDEN)
def qrnn(w, c, x):
    z, f, o = jnp.split(x @ w["w"], 3, -1)
    c = sigmoid(f) * c + (1 - sigmoid(f)) * jnp.tanh(z)
    return c, sigmoid(o) * c


@cell({"w": (D, H), "u": (1, H)}, HIDDEN)
def ind_rnn(w, h, x):
    h = jax.nn.leaky_relu(x @ w["w"] + w["u"] * h)
    return h, h


@cell(gates(1) | {"gamma": (1, H), "beta": (1, H)}, HIDDEN)
def layer_norm_rnn(w, h, x):
    z = both(w, x, h)
    z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(z, axis=-1, keepdims=True) + 1e-5)
    h = jnp.tanh(z * w["gamma"] + w["beta"])
    return h, h


@cell({"w": (D, 4 * H), "r": (H, 4 * H)}, (HIDDEN,) * 4)
def s_lstm(w, carry, x):
    """sLSTM of xLSTM with its stabilizer."""
    c, n, m, h = carry
    z, i, f, o = jnp.split(x @ w["w"] + h @ w["r"], 4, -1)
    log_f = jax.nn.log_sigmoid(f)
    new_m = jnp.maximum(log_f + m, i)
    i, f = jnp.exp(i - new_m), jnp.exp(log_f + m - new_m)
    c, n = f * c + i * jnp.tanh(z), f * n + i
    h = sigmoid(o) * c / jnp.maximum(jnp.abs(n), 0.1)
    return (c, n, new_m, h), h


@cell({"w": (D, 3 * H), "g": (D, 2)}, ((N, H, H), (N, H), (N, 1)))
def m_lstm(w, carry, x):
    c, n, m = carry
    q, k, v = jnp.split(x @ w["w"], 3, -1)
    i, f = jnp.split(x @ w["g"], 2, -1)
    log_f = jax.nn.log_sigmoid(f)
    new_m = jnp.maximum(log_f + m, i)
    i, f = jnp.exp(i - new_m), jnp.exp(log_f + m - new_m)
    c = f[..., None] * c + i[..., None] * v[:, :, None] * k[:, None, :]
    n = f * n + i * k
    below = jnp.maximum(jnp.abs(jnp.sum(n * q, -1, keepdims=True)), jnp.exp(-new_m))
    return (c, n, new_m), jnp.einsum("nij,nj->ni", c, q) / below


# Oscillators, flows, memories of polynomials ----------------------------------------------------------------------------


@cell(gates(3), (HIDDEN, HIDDEN))
def lem(w, carry, x):
    y, z = carry
    a, b, c = jnp.split(both(w, x, y), 3, -1)
    one, two = 0.5 * sigmoid(a), 0.5 * sigmoid(b)
    z = (1 - one) * z + one * jnp.tanh(c)
    y = (1 - two) * y + two * jnp.tanh(z @ w["u"][:, :H] + x @ w["w"][:, :H])
    return (y, z), y


@cell({"w": (D + H, H), "a": (H, 4 * H)}, HIDDEN)
def cfc(w, h, x):
    z = 1.7159 * jnp.tanh(0.666 * jnp.concatenate([x, h], -1) @ w["w"])
    one, two, a, b = jnp.split(z @ w["a"], 4, -1)
    t = sigmoid(a * 0.3 + b)
    h = jnp.tanh(one) * (1 - t) + t * jnp.tanh(two)
    return h, h


@cell(gates(1) | {"v": (H, H)}, (HIDDEN, HIDDEN))
def co_rnn(w, carry, x):
    y, z = carry
    z = z + 0.1 * (jnp.tanh(both(w, x, y) + z @ w["v"]) - y - 0.5 * z)
    y = y + 0.1 * z
    return (y, z), y


@cell({"w": (1, H), "v": (D, H), "c": (1, H)}, (HIDDEN, HIDDEN))
def unicornn(w, carry, x):
    y, z = carry
    size = 0.1 * sigmoid(w["c"])
    z = z - size * (jnp.tanh(w["w"] * y + x @ w["v"]) + 0.9 * y)
    y = y + size * z
    return (y, z), y


@cell({"e": (D, 1), "w": (4, H)}, (N, 4))
def legendre_memory(w, m, x):
    q = np.arange(4)
    r = (2 * q + 1)[:, None]
    i, j = np.meshgrid(q, q, indexing="ij")
    a = jnp.asarray(np.where(i < j, -1.0, (-1.0) ** (i - j + 1)) * r, x.dtype)
    b = jnp.asarray(((-1.0) ** q)[:, None] * r, x.dtype)
    m = m + 0.1 * (m @ a.T + (x @ w["e"]) @ b.T)
    return m, jnp.tanh(m @ w["w"])


def velocity(w, h, x):
    return jnp.tanh(both(w, x, h)) - h


@cell(gates(1), HIDDEN)
def rk4(w, h, x):
    k1 = velocity(w, h, x)
    k2 = velocity(w, h + 0.05 * k1, x)
    k3 = velocity(w, h + 0.05 * k2, x)
    k4 = velocity(w, h + 0.1 * k3, x)
    h = h + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return h, h


@cell(gates(1), HIDDEN)
def euler_with_fori_loop(w, h, x):
    h = lax.fori_loop(0, 3, lambda _, h: h + 0.1 * velocity(w, h, x), h)
    return h, h


@cell(gates(1), (HIDDEN, (N, 1)))
def dopri(w, carry, x):
    """A step of Dormand and Prince that keeps the old state, elementwise, where the error is too large."""
    table = [
        (0.2,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    ]
    h, size = carry
    size = 0.1 + 0.01 * jnp.tanh(size)
    ks = [velocity(w, h, x)]
    for row in table:
        ks.append(velocity(w, h + size * sum(a * k for a, k in zip(row, ks)), x))
    new = h + size * sum(
        b * k for b, k in zip((35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784), ks)
    )
    low = h + size * sum(
        b * k for b, k in zip((5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200), ks)
    )
    error = jnp.sqrt(jnp.mean(jnp.square(new - low), -1, keepdims=True) + 1e-12)
    factor = jnp.clip(0.9 * (1e-3 / error) ** 0.2, 0.2, 10.0)
    return (jnp.where(error < 1.0, new, h), size * factor), new


# Loops whose number of trips depends on values --------------------------------------------------------------------------


@cell({**gates(1), "p": (H, 1)}, HIDDEN)
def adaptive_computation_time(w, h, x):
    """Graves 2016, with one number of trips for the batch."""

    def ponder(carry):
        h, mean, halted = carry
        h = jnp.tanh(both(w, x, h))
        p = jnp.minimum(sigmoid(h @ w["p"]), 1.0 - halted)
        return h, mean + p * h, halted + p

    start = h, jnp.zeros_like(h), jnp.zeros_like(h[:, :1])
    _, h, _ = jrnn.while_loop(lambda carry: jnp.min(carry[2]) < 0.9, ponder, start, max_steps=4)
    return h, h


@cell(gates(1), HIDDEN)
def equilibrium(w, h, x):
    """A fixed point of a contraction, by a loop of which JAX has the gradient in forward mode alone."""

    def closer(carry):
        _, new = carry
        return new, jnp.tanh(x @ w["w"] + h + 0.2 * new @ w["u"])

    _, h = lax.while_loop(
        lambda carry: jnp.max(jnp.abs(carry[1] - carry[0])) > 0.01, closer, (h, 0.0 * h)
    )
    return h, h


@cell(gates(1), HIDDEN)
def euler_with_a_counted_loop(w, h, x):
    """The number of trips is a value."""
    trips = 1 + jnp.argmax(x[0])
    h = lax.fori_loop(0, trips, lambda _, h: h + 0.1 * velocity(w, h, x), h)
    return h, h


@cell(gates(1), HIDDEN)
def scan_that_stops(w, h, x):
    def closer(h, _):
        return jnp.tanh(both(w, x, h)), None

    h, _ = jrnn.scan(closer, h, None, length=3, until=lambda h: jnp.sum(h * h) > 1.5)
    return h, h


# Linear attention and fast weights --------------------------------------------------------------------------------------


@cell({"w": (D, 3 * H)}, (N, H, H))
def retention(w, s, x):
    q, k, v = jnp.split(x @ w["w"], 3, -1)
    s = 0.9 * s + k[:, :, None] * v[:, None, :]
    return s, jnp.einsum("nk,nkv->nv", q, s)


@cell({"w": (D, 3 * H)}, ((N, H, H), HIDDEN))
def linear_attention(w, carry, x):
    s, z = carry
    q, k, v = jnp.split(x @ w["w"], 3, -1)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    s, z = s + k[:, :, None] * v[:, None, :], z + k
    return (s, z), jnp.einsum("nk,nkv->nv", q, s) / (
        1.0 + jnp.sum(q * jnp.abs(z), -1, keepdims=True)
    )


@cell({"w": (D, 3 * H), "b": (D, 1)}, (N, H, H))
def delta_net(w, s, x):
    q, k, v = jnp.split(x @ w["w"], 3, -1)
    k = k / jnp.sqrt(jnp.sum(k * k, -1, keepdims=True) + 1e-6)
    beta = sigmoid(x @ w["b"])[..., None]
    s = s + beta * k[:, :, None] * (v - jnp.einsum("nk,nkv->nv", k, s))[:, None, :]
    return s, jnp.einsum("nk,nkv->nv", q, s)


@cell({"w": (D, 3 * H), "a": (D, H)}, (N, H, H))
def gated_linear_attention(w, s, x):
    q, k, v = jnp.split(x @ w["w"], 3, -1)
    decay = jnp.exp(jax.nn.log_sigmoid(x @ w["a"]) / 4)
    s = decay[..., None] * s + k[:, :, None] * v[:, None, :]
    return s, jnp.einsum("nk,nkv->nv", q, s)


@cell({"w": (D, H), "b": (D, 2 * 4), "dt": (D, H), "a": (1, H, 4)}, (N, H, 4))
def mamba(w, s, x):
    u, (b, c) = x @ w["w"], jnp.split(x @ w["b"], 2, -1)
    dt = jax.nn.softplus(x @ w["dt"])
    s = jnp.exp(-dt[..., None] * jnp.exp(w["a"])) * s + (dt * u)[..., None] * b[:, None, :]
    return s, jnp.einsum("nhk,nk->nh", s, c) * jax.nn.silu(u)


@cell({"w": (D, 2 * H), "d": (1, H), "u": (1, H)}, (HIDDEN, HIDDEN, HIDDEN))
def rwkv_4(w, carry, x):
    a, b, p = carry
    k, v = jnp.split(x @ w["w"], 2, -1)
    q = jnp.maximum(p, w["u"] + k)
    e1, e2 = jnp.exp(p - q), jnp.exp(w["u"] + k - q)
    y = (e1 * a + e2 * v) / (e1 * jnp.abs(b) + e2)
    q = jnp.maximum(p - jnp.exp(w["d"]), k)
    e1, e2 = jnp.exp(p - jnp.exp(w["d"]) - q), jnp.exp(k - q)
    return (e1 * a + e2 * v, e1 * b + e2, q), y


@cell({"w": (D, 4 * H), "d": (D, H), "a": (D, H)}, (N, H, H))
def rwkv_7(w, s, x):
    r, k, v, z = jnp.split(x @ w["w"], 4, -1)
    decay = jnp.exp(-0.606531 * sigmoid(x @ w["d"]))
    kappa = z / jnp.maximum(jnp.linalg.norm(z, axis=-1, keepdims=True), 1e-6)
    a = sigmoid(x @ w["a"])
    removed = jnp.einsum("nvk,nk->nv", s, -kappa)
    s = (
        s * decay[:, None, :]
        + removed[:, :, None] * (kappa * a)[:, None, :]
        + v[:, :, None] * k[:, None, :]
    )
    return s, jnp.einsum("nvk,nk->nv", s, r)


@cell({"w": (D, H), "b": (D, H)}, HIDDEN)
def rg_lru(w, h, x):
    r, i = sigmoid(x @ w["w"]), sigmoid(x @ w["b"])
    log_a = -8.0 * r * jax.nn.softplus(w["w"][:1])
    h = jnp.exp(log_a) * h + jnp.sqrt(-jnp.expm1(2 * log_a)) * i * (x @ w["b"])
    return h, h


@cell({"w": (D, H), "u": (H, H)}, (HIDDEN, (N, H, H)))
def fast_weights(w, carry, x):
    h, a = carry
    a = 0.9 * a + 0.5 * h[:, :, None] * h[:, None, :]
    start = x @ w["w"] + h @ w["u"]

    def again(h, _):
        z = start + jnp.einsum("nij,nj->ni", a, h)
        return jnp.tanh(
            (z - z.mean(-1, keepdims=True)) * lax.rsqrt(z.var(-1, keepdims=True) + 0.1)
        ), None

    h, _ = lax.scan(again, jnp.tanh(start), None, length=2)
    return (h, a), h


# Memories and attention -------------------------------------------------------------------------------------------------


@cell({"k": (D, 3), "b": (D, 1), "e": (D, 3), "g": (D, 1), "s": (D, 3)}, ((N, 4, 3), (N, 4)))
def ntm_head(w, carry, x):
    """A head of a neural Turing machine: content, interpolation, shift, sharpening, erase and add."""
    memory, before = carry
    key = x @ w["k"]
    norms = jnp.linalg.norm(memory, axis=-1) * jnp.linalg.norm(key, axis=-1, keepdims=True)
    content = jax.nn.softmax(
        jax.nn.softplus(x @ w["b"]) * jnp.einsum("nmk,nk->nm", memory, key) / (norms + 1e-6), -1
    )
    g = sigmoid(x @ w["g"])
    mixed = g * content + (1 - g) * jax.nn.softmax(before, -1)
    shift = jax.nn.softmax(x @ w["s"], -1)
    moved = sum(shift[:, k : k + 1] * jnp.roll(mixed, k - 1, axis=1) for k in range(3))
    sharp = moved**2
    sharp = sharp / sharp.sum(-1, keepdims=True)
    read = jnp.einsum("nm,nmk->nk", sharp, memory)
    memory = (
        memory * (1 - sharp[..., None] * sigmoid(x @ w["e"])[:, None, :])
        + sharp[..., None] * jnp.tanh(key)[:, None, :]
    )
    return (memory, sharp), read


@cell({"q": (D, H), "o": (H, H)}, (HIDDEN, (N, 4, H)))
def attention_over_a_memory(w, carry, x):
    h, memory = carry
    scores = jnp.einsum("nh,nmh->nm", x @ w["q"] + h, memory)
    known = jnp.arange(4)[None] < 3
    weights = jax.nn.softmax(jnp.where(known, scores, -jnp.inf), -1)
    h = jnp.tanh(jnp.einsum("nm,nmh->nh", weights, memory) @ w["o"])
    return (h, memory), h


@cell({"w": (D, 5), "o": (5, H), "u": (H, 5)}, HIDDEN)
def mixture_of_two_experts(w, h, x):
    """The two largest of five gates."""
    scores = x @ w["w"] + h @ w["u"]
    best, _ = lax.top_k(scores, 2)
    kept = jnp.where(scores >= best[:, -1:], jnp.exp(scores - best[:, :1]), 0.0)
    h = jnp.tanh((kept / kept.sum(-1, keepdims=True)) @ w["o"])
    return h, h


@cell({"w": (D, H)}, ((N, 3, H), HIDDEN))
def stack_rnn(w, carry, x):
    stack, h = carry
    push, keep, pop = (sigmoid(h[:, k : k + 1])[..., None] for k in range(3))
    pushed = jnp.concatenate([(x @ w["w"])[:, None], stack[:, :-1]], 1)
    popped = jnp.concatenate([stack[:, 1:], jnp.zeros_like(stack[:, :1])], 1)
    stack = (push * pushed + keep * stack + pop * popped) / (push + keep + pop)
    h = jnp.tanh(stack[:, 0])
    return (stack, h), h


# Filters, control, returns -----------------------------------------------------------------------------------------------


@cell({"a": (2, 2), "c": (2, 2)}, ((N, 2), (N, 2, 2)))
def kalman_of_two(w, carry, x):
    """A Kalman filter with a two-dimensional state, whose innovation is inverted by hand."""
    m, p = carry
    a, eye = 0.9 * jnp.eye(2, dtype=x.dtype) + 0.1 * w["a"], jnp.eye(2, dtype=x.dtype)
    m = m @ a.T
    p = jnp.einsum("ij,njk,lk->nil", a, jnp.einsum("nij,nkj->nik", p, p), a) + 0.1 * eye[None]
    s = jnp.einsum("ij,njk,lk->nil", w["c"], p, w["c"]) + eye[None]
    det = s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]
    flipped = jnp.stack(
        [jnp.stack([s[:, 1, 1], -s[:, 0, 1]], -1), jnp.stack([-s[:, 1, 0], s[:, 0, 0]], -1)], 1
    )
    gain = jnp.einsum("nij,kj,nkl->nil", p, w["c"], flipped / det[:, None, None])
    m = m + jnp.einsum("nij,nj->ni", gain, x - m @ w["c"].T)
    p = p - jnp.einsum("nij,jk,nkl->nil", gain, w["c"], p)
    return (m, p), m


@cell({"t": (H, H), "e": (D, H)}, HIDDEN)
def hmm_forward(w, log_alpha, x):
    log_t = jax.nn.log_softmax(w["t"], -1)
    alpha = jax.nn.logsumexp(log_alpha[:, :, None] + log_t[None], axis=1) + x @ w["e"]
    return alpha - jax.nn.logsumexp(alpha, axis=-1, keepdims=True), alpha


@cell({"t": (H, H), "e": (D, H)}, HIDDEN)
def viterbi(w, score, x):
    score = jnp.max(score[:, :, None] + w["t"][None], axis=1) + x @ w["e"]
    return score, score


@cell({"discount": (1,), "trace": (1,)}, (N,), (N, 3))
def gae(w, advantage, x):
    """Generalized advantage estimation; x holds reward, value and the next value, whose sign ends an episode."""
    reward, value, following = x[:, 0], x[:, 1], x[:, 2]
    alive = (following > -0.5).astype(x.dtype)
    delta = reward + w["discount"] * following * alive - value
    advantage = delta + w["discount"] * w["trace"] * alive * advantage
    return advantage, advantage


@cell({"k": (3,), "w": (1, D)}, ((N, D), (N, D), (N, D)))
def pid(w, carry, x):
    """A controller with saturation and protection against windup, and its plant."""
    plant, total, before = carry
    error = x - plant
    u = w["k"][0] * error + w["k"][1] * total + w["k"][2] * (error - before)
    bounded = jnp.clip(u, -0.8, 0.8)
    total = jnp.where(bounded == u, total + 0.1 * error, total)
    return (plant + 0.1 * (jnp.sin(plant * w["w"]) + bounded), total, error), bounded


@cell({"w": (D, H), "a": (1, H)}, HIDDEN)
def phase_of_an_oscillator(w, phase, x):
    z = x @ w["w"]
    phase = jnp.arctan2(jnp.sin(phase) + z, jnp.cos(phase) + w["a"])
    return phase, jnp.cos(phase)


@cell({"w": (D, H), "u": (H, H)}, (HIDDEN, HIDDEN))
def spiking(w, carry, x):
    """Leaky integrate and fire, where the gradient of a spike is that of a fast sigmoid."""
    v, spikes = carry

    v = 0.9 * v * (1 - spikes) + x @ w["w"] + spikes @ w["u"]
    soft = (v - 1) / (1 + jnp.abs(v - 1))
    fired = soft + lax.stop_gradient((v > 1).astype(x.dtype) - soft)
    return (v, fired), fired


@cell(gates(1), HIDDEN)
def straight_through(w, h, x):
    """Weights and states that are rounded, with the gradient of the identity."""

    def rounded(v):
        return v + lax.stop_gradient(jnp.round(v * 4) / 4 - v)

    h = jnp.tanh(x @ rounded(w["w"]) + rounded(h) @ rounded(w["u"]))
    return h, h


@cell(gates(1), HIDDEN, (N, D + 1))
def resets_inside(w, h, x):
    ends, x = x[:, -1:] > 0, x[:, :-1]
    h = jnp.where(ends, jnp.zeros_like(h), h)
    h = jnp.tanh(both(w, x, h))
    return h, h


@cell(gates(1), HIDDEN)
def clockwork(w, h, x):
    """tanh(z) * (z > 0), and units that hold where the input is small."""
    z = both(w, x, h)
    new = jnp.tanh(z) * (z > 0)
    h = lax.select(jnp.abs(jnp.broadcast_to(x[:, :1], h.shape)) > 0.3, new, h)
    return h, h


@cell(gates(1), HIDDEN)
def branches(w, h, x):
    h = lax.cond(
        jnp.sum(x) > 0,
        lambda h: jnp.tanh(both(w, x, h)),
        lambda h: 0.5 * h + jnp.sin(x @ w["w"]),
        h,
    )
    return h, h


@cell({"w": (D, H), "nu": (1, H), "theta": (1, H)}, (HIDDEN, HIDDEN))
def lru(w, carry, x):
    h = lax.complex(*carry)
    h = jnp.exp(lax.complex(-jnp.exp(w["nu"]), w["theta"])) * h + x @ w["w"]
    return (h.real, h.imag), h.real


# No net ------------------------------------------------------------------------------------------------------------------


@cell({"w": (2, H)}, HIDDEN, net=False)
def spectral(w, h, x):
    f = jnp.fft.rfft(h, axis=-1)
    h = jnp.tanh(
        jnp.fft.irfft(f * lax.complex(w["w"][:1, :2], w["w"][1:, :2]), n=H, axis=-1) + x[:, :1]
    )
    return h, h


@cell({"a": (2, 2), "c": (2, 2)}, ((N, 2), (N, 2, 2)), net=False)
def kalman_with_cholesky(w, carry, x):
    m, p = carry
    p = jnp.einsum("nij,nkj->nik", p, p) + 0.1 * jnp.eye(2, dtype=x.dtype)[None]
    s = jnp.einsum("ij,njk,lk->nil", w["c"], p, w["c"]) + jnp.eye(2, dtype=x.dtype)[None]
    low = jnp.linalg.cholesky(s)
    gain = jnp.swapaxes(jnp.linalg.solve(s, jnp.einsum("ij,njk->nik", w["c"], p)), 1, 2)
    m = m @ w["a"].T + jnp.einsum("nij,nj->ni", gain, x)
    return (m, low), m
