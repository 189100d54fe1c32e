"""Step functions of many kinds, each as `make(params) -> (step, carry, xs, keywords)` with float64 parameters.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

T, N, D, H = 5, 2, 3, 4
Case = tuple[Callable, Any, Any, dict]


def draw(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)
    return {name: rng.randn(*shape) * 0.7 for name, shape in shapes.items()}


CASES: dict[str, tuple[Callable[[dict], Case], dict]] = {}


def case(**shapes: tuple[int, ...]) -> Callable:
    def register(make: Callable[[dict], Case]) -> Callable:
        CASES[make.__name__] = make, draw(len(CASES), **shapes)
        return make

    return register


def lstm_step(p):
    def step(state, x):
        h, c = state
        z = x @ p["wx"] + h @ p["wh"] + p["b"]
        i, f, o, g = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return step


LSTM = dict(wx=(D, 4 * H), wh=(H, 4 * H), b=(1, 4 * H), h0=(N, H), c0=(N, H), x=(T, N, D))


@case(**LSTM)
def lstm(p):
    return lstm_step(p), (p["h0"], p["c0"]), p["x"], {}


@case(**LSTM)
def lstm_reversed(p):
    return lstm_step(p), (p["h0"], p["c0"]), p["x"], dict(reverse=True)


@case(**LSTM)
def lstm_unrolled(p):
    return lstm_step(p), (p["h0"], p["c0"]), p["x"], dict(unroll=2)


@case(**LSTM)
def lstm_one_step(p):
    return lstm_step(p), (p["h0"], p["c0"]), p["x"][:1], {}


@case(**LSTM, peep=(3, 1, H))
def lstm_with_peepholes(p):
    def step(state, x):
        h, c = state
        z = x @ p["wx"] + h @ p["wh"] + p["b"]
        i = jax.nn.sigmoid(z[:, :H] + c * p["peep"][0])
        f = jax.nn.sigmoid(z[:, H : 2 * H] + c * p["peep"][1])
        c = f * c + i * jnp.tanh(z[:, 2 * H : 3 * H])
        h = jax.nn.sigmoid(z[:, 3 * H :] + c * p["peep"][2]) * jnp.tanh(c)
        return (h, c), h

    return step, (p["h0"], p["c0"]), p["x"], {}


GRU = dict(wx=(D, 3 * H), wh=(H, 3 * H), b=(1, 3 * H), h0=(N, H), x=(T, N, D))


def gru_step(p):
    def step(h, x):
        width = h.shape[-1]
        zx, zh = x @ p["wx"] + p["b"], h @ p["wh"]
        r = jax.nn.sigmoid(zx[:, :width] + zh[:, :width])
        u = jax.nn.sigmoid(zx[:, width : 2 * width] + zh[:, width : 2 * width])
        n = jnp.tanh(zx[:, 2 * width :] + r * zh[:, 2 * width :])
        h = (1 - u) * n + u * h
        return h, h

    return step


@case(**GRU)
def gru(p):
    return gru_step(p), p["h0"], p["x"], {}


@case(**GRU)
def gru_reversed(p):
    return gru_step(p), p["h0"], p["x"], dict(reverse=True)


@case(w=(H, H), v=(H, D), h0=(N, H), x=(T, N, H))
def relu_with_output_layer(p):
    def step(h, x):
        with jax.named_scope("cell"):
            h = jax.nn.relu(x + h @ p["w"])
        return h, jax.nn.softmax(jnp.tanh(h) @ p["v"])

    return step, p["h0"], p["x"], {}


@case(w=(H, H), x=(T, N, H), k=(N, 6, H), h0=(N, H))
def attention(p):
    def step(carry, x):
        h, context = carry
        scores = jnp.einsum("nkh,nh->nk", p["k"], jnp.tanh(h @ p["w"]))
        context = jnp.einsum("nk,nkh->nh", jax.nn.softmax(scores), p["k"])
        h = jnp.tanh(x + context + h)
        return (h, context), dict(h=h, scores=scores)

    return step, (p["h0"], p["h0"] * 0), p["x"], {}


@case(table=(7, H), w=(H, H), h0=(N, H))
def embedding_in_the_step(p):
    ids = np.arange(T * N).reshape(T, N) % 7

    def step(h, i):
        h = jnp.tanh(p["table"][i] + h @ p["w"])
        return h, h

    return step, p["h0"], ids, {}


@case(table=(7, H), w=(H, H), h0=(N, H))
def choice_fed_back(p):
    """Greedy decoding: an integer carry that looks up the table."""

    def step(carry, _):
        h, i = carry
        h = jnp.tanh(p["table"][i] + h @ p["w"])
        return (h, jnp.argmax(h, axis=-1).astype(i.dtype) + 1), (h, i)

    return step, (p["h0"], jnp.zeros(N, jnp.int32)), None, dict(length=T)


@case(w=(H, H), h0=(N, H))
def no_inputs(p):
    def step(h, _):
        h = jnp.sin(h @ p["w"])
        return h, None

    return step, p["h0"], None, dict(length=T)


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def accumulators(p):
    """A contraction, a reduction and a small sum, each only added to; and one that is read as well."""

    def step(carry, x):
        h, dw, db, loss, seen = carry
        h = jnp.tanh(x + h @ p["w"])
        dw = dw + jnp.transpose(jax.lax.dot_general(x, h, (((0,), (0,)), ((), ()))))
        db = jnp.sum(h, axis=0) + db
        loss = loss + jnp.mean(h**2) * 2.0
        seen = seen + h
        return (h, dw, db, loss, seen), seen

    zero = jnp.zeros((), p["x"].dtype)
    return step, (p["h0"], p["w"] * 0, p["w"][0], zero, p["h0"]), p["x"], {}


@case(h0=(N, H), x=(T, N, H))
def counters_and_flags(p):
    def step(carry, x):
        t, odd, h = carry
        h = jnp.where(odd, h * x, h + x / (t + 1))
        return (t + 1, ~odd, h), (h, t, odd)

    return step, (jnp.int32(0), jnp.array(False), p["h0"]), p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def branches(p):
    def step(h, x):
        h = jax.lax.cond(jnp.sum(x) > 0, lambda h: jnp.tanh(h @ p["w"]), lambda h: h + x, h)
        return h, jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x) @ p["w"]

    return step, p["h0"], p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, 3, N, H))
def scan_in_the_step(p):
    def step(h, xs):
        h, inner = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), h), h, xs)
        return h, inner.sum(0)

    return step, p["h0"], p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def loop_in_the_step(p):
    def step(h, x):
        h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"] + x), h)
        return h, h

    return step, p["h0"], p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def checkpointed_step(p):
    def step(h, x):
        h = jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h @ p["w"]) + x))(h)
        return h, h

    return step, p["h0"], p["x"], {}


@case(h0=(N, H), x=(T, N, H))
def straight_through(p):
    """A derivative rule of the user's own must be kept."""

    @jax.custom_vjp
    def rounded(v):
        return jnp.round(v)

    rounded.defvjp(lambda v: (jnp.round(v), None), lambda _, ct: (ct * 3,))

    def step(h, x):
        h = jnp.tanh(rounded(h * 2) + x)
        return h, h

    return step, p["h0"], p["x"], {}


@case(h0=(N, H), x=(T, N, H))
def stopped(p):
    def step(h, x):
        h = jax.lax.stop_gradient(h) * x + jnp.cos(h)
        return h, jax.lax.stop_gradient(h)

    return step, p["h0"], p["x"], {}


@case(h0=(N, H), x=(T, N, H), s=(1, H))
def passed_through(p):
    """Outputs that are inputs, constants, the old carry; carries that are inputs, constants, each other."""

    def step(carry, x):
        a, b, last, fixed = carry
        return (b * p["s"], a, x, fixed), (x, p["s"], a, last, 1.5, jnp.zeros(3), x * 2)

    return step, (p["h0"], p["h0"] + 1, p["x"][0], p["s"]), p["x"], {}


@case(h0=(N, H), x=(T, N, H))
def cumulative(p):
    def step(h, x):
        h = jnp.cumsum(h, axis=-1) * 0.3 + jnp.sort(x, axis=-1)
        return h, jnp.max(h, axis=-1)

    return step, p["h0"], p["x"], {}


@case(kernel=(3, 3, 2, 2), h0=(N, 4, 4, 2), x=(T, N, 4, 4, 2))
def convolution(p):
    def conv(v):
        return jax.lax.conv_general_dilated(
            v, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def step(h, x):
        h = jnp.tanh(conv(x) + conv(h))
        return h, h

    return step, p["h0"], p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def nested_containers(p):
    def step(carry, x):
        h = jnp.tanh(carry["a"][0] @ p["w"] + x["u"]["v"])
        return {"a": (h,), "none": None, "b": [carry["b"][0] + jnp.sum(h)]}, {"y": (h, {"z": h[0]})}

    carry = {"a": (p["h0"],), "none": None, "b": [jnp.zeros((), p["h0"].dtype)]}
    return step, carry, {"u": {"v": p["x"]}}, {}


@case(w=(3, H, H), h0=(3, N, H), x=(T, N, H))
def mapped_layers(p):
    def step(hs, x):
        hs = jax.vmap(lambda h, w: jnp.tanh(h @ w + x))(hs, p["w"])
        return hs, hs.sum(0)

    return step, p["h0"], p["x"], {}


@case(w=(H, 2 * H), h0=(N, H), x=(T, N, H))
def overlapping_slices(p):
    def step(h, x):
        z = h @ p["w"]
        a, b, c = jnp.tanh(z[:, :H]), jnp.tanh(z[:, H : 2 * H]), z[:, 2 : 2 + H]
        h = jnp.tanh(a * b + c[:, ::-1] * 0.5 + x)
        return h, a - b

    return step, p["h0"], p["x"], {}


@case(w=(H, H), b=(H,), h0=(N, H), x=(T, N, H))
def weak_carry(p):
    """Python numbers as carries, which `lax.scan` promotes."""

    def step(carry, x):
        total, h = carry
        h = jnp.tanh(h @ p["w"] + x)
        return (total + jnp.sum(h), h), h

    return step, (0.0, p["h0"]), p["x"], {}


@case(w=(H, H), h0=(N, H), x=(T, N, H))
def complex_carry(p):
    def step(c, x):
        c = c * jnp.exp(1j * x) * 0.5 + x @ p["w"]
        return c, jnp.abs(c) + c.real

    return step, p["h0"] + 0.5j, p["x"], {}
