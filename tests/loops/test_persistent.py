"""The kernel that runs a whole loop, interpreted, agrees with `jax.lax.scan`; its sizes here are odd on purpose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import draw, gru_step, lstm_step

from jrnn import plain_scans
from jrnn.errors import ScanError
from jrnn.loops import explain_scan, scan

T, N, D, H, P = 7, 3, 5, 6, 4
GATES = dict(wx=(D, 4 * H), wh=(H, 4 * H), b=(1, 4 * H), x=(T, N, D), h0=(N, H), c0=(N, H))
close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)


def normed(z, gain):
    centered = z - z.mean(-1, keepdims=True)
    return gain * centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


def layer_norm_lstm_step(p):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(normed(x @ p["wx"] + h @ p["wh"], p["b"]), 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(normed(c, p["b"][:, :H])), c), c

    return step


def mi_lstm_step(p):
    """Multiplicative integration: gates of the product of both projections."""

    def step(state, x):
        h, c = state
        zx, zh = x @ p["wx"], h @ p["wh"]
        i, f, g, o = jnp.split(p["b"] * zx * zh + 0.5 * zx + zh, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), c

    return step


def lstm_with_projection_step(p):
    def step(state, x):
        r, c = state
        i, f, g, o = jnp.split(x @ p["wx"] + r @ p["wh"][:P] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        r = (jax.nn.sigmoid(o) * jnp.tanh(c)) @ p["wr"]
        return (r, c), r

    return step


def mingru_step(p):
    def step(h, x):
        z = jax.nn.sigmoid(x @ p["wx"][:, :H])
        return (h := (1 - z) * h + z * (x @ p["wx"][:, H : 2 * H])), h

    return step


def rnn_step(p):
    def step(h, x):
        return (h := jax.nn.relu(x @ p["wx"][:, :H] + h @ p["wh"][:, :H] + p["b"][:, :H])), h

    return step


CELLS = {
    "lstm": (lstm_step, lambda p: (p["h0"], p["c0"])),
    "gru": (gru_step, lambda p: p["h0"]),
    "layer-norm lstm": (layer_norm_lstm_step, lambda p: (p["h0"], p["c0"])),
    "mi-lstm": (mi_lstm_step, lambda p: (p["h0"], p["c0"])),
    "lstm with projection": (lstm_with_projection_step, lambda p: (p["h0"][:, :P], p["c0"])),
    "mingru": (mingru_step, lambda p: p["h0"]),
    "rnn": (rnn_step, lambda p: p["h0"]),
}
OPTIONS = {
    "plain": {},
    "reverse, with lengths and resets": dict(
        reverse=True, lengths=jnp.array([T, 3, 0]), resets=jnp.arange(T * N).reshape(T, N) % 5 == 3
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_cells_agree(cell, options, x64):
    make, state = CELLS[cell]
    sizes = {**GATES, "wr": (H, P), **(dict(wx=(D, 3 * H), wh=(H, 3 * H), b=(1, 3 * H)) if cell == "gru" else {})}
    p = jax.tree.map(jnp.asarray, draw(5, **sizes))
    if "lengths" in options:  # what padding holds must not matter, nor may it become NaN
        p["x"] = jnp.where(jnp.arange(T)[:, None, None] < options["lengths"][None, :, None], p["x"], jnp.nan)

    def loss(p, executor):
        last, ys = scan(make(p), state(p), p["x"], executor=executor, **options)
        return jnp.sum(jnp.sin(ys)) + sum(jnp.sum(v**2) for v in jax.tree.leaves(last)), (last, ys)

    value = jax.value_and_grad(loss, has_aux=True)
    ours = jax.jit(functools.partial(value, executor="persistent"))(p)
    with plain_scans():
        theirs = by_numpy(functools.partial(value, executor="scan"))(p)
    jax.tree.map(close, ours, theirs)
    assert all(np.all(np.isfinite(v)) for v in jax.tree.leaves(ours))
    plans = explain_scan(make(p), state(p), p["x"], executor="persistent", **options)
    assert {plan.executor for plan in (*plans.forward, *plans.training)} == {"persistent"}


ELEMENTWISE = (
    jnp.abs, jnp.ceil, jnp.cos, jax.lax.erf, jnp.exp, jnp.exp2, jnp.expm1, jnp.floor, jnp.isfinite, jnp.log, jnp.log1p,
    jax.nn.sigmoid, jax.lax.rsqrt, jnp.sign, jnp.sin, jnp.sqrt, jnp.square, jnp.tan, jnp.tanh, jax.nn.softplus, jax.nn.elu,
    lambda v: v**3, lambda v: v**-2, lambda v: abs(v) ** 1.7, lambda v: jnp.clip(v, -0.5, 0.5), jnp.logical_not,
    lambda v: jnp.where(v != v, 0.0, v), lambda v: jnp.where((v > 0) ^ (v < 1) | (v == 2) & (v[:1] > v), v, 1.0),
    lambda v: jnp.where(v[0, 0] > 0, v, 2 * v), lambda v: jnp.eye(N, H, dtype=bool) ^ (v > 0),
)  # fmt: skip
VECTORS = (
    jax.nn.softmax, lambda v: v.sum(0), lambda v: v.max(1), lambda v: v.min(), lambda v: jnp.any(v > 1, 1),
    lambda v: v[:, 2], lambda v: jnp.all(v > -2, 0), lambda v: v[1], lambda v: v[1, 2],
    lambda v: v.sum(1)[:, None] * v.sum(0)[None],
    lambda v: v.sum(1) + v[:, 0], lambda v: v.sum(1).reshape(1, -1) * v.sum(1)[:, None],
)  # fmt: skip
PRODUCTS = (
    lambda v: v @ v[0], lambda v: v[:, 1] @ v, lambda v: v[0] @ v[1], lambda v: v @ v.T, lambda v: v.T @ v, lambda v: v.T,
    lambda v: jnp.outer(v[:, 0], v[0]), lambda v: v[:, :1] @ v[:1], lambda v: v[:1] @ v[1],
)  # fmt: skip
PIECES = (
    lambda v: jnp.roll(v, 1, 0), lambda v: jnp.concatenate([v[:, 3:], v[:, :1]], 1),
    lambda v: jnp.pad(v[1:], ((1, 0), (2, 1))),
    lambda v: jnp.pad(v[0], (1, 2)), lambda v: jnp.concatenate([v[0], v[:, 0], v[0, :1]]), lambda v: jnp.stack([v[0], v[1]]),
    lambda v: jnp.pad(v > 0, ((0, 0), (1, 0))), lambda v: v * jax.lax.broadcasted_iota(v.dtype, v.shape, 1),
    lambda v: jnp.split(v, [1, 3], 1)[1], lambda v: v[:, None, :] * 2, lambda v: v.astype(jnp.int32),
)  # fmt: skip


@pytest.mark.sample("pieces")
@pytest.mark.parametrize(
    "functions", [ELEMENTWISE, VECTORS, PRODUCTS, PIECES], ids=["each", "vectors", "products", "pieces"]
)
def test_operations_agree(functions, x64):
    xs = jnp.asarray(np.random.RandomState(0).randn(2, N, H))
    if functions is ELEMENTWISE:
        xs = xs.at[1, 0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))

    def run(xs, executor):
        def step(h, x):
            return h * 0.5 + x, [fn(h - x) for fn in functions]

        return scan(step, jnp.full((N, H), 0.25), xs, executor=executor)

    outs = jax.jit(lambda xs: [run(xs, name) for name in ("persistent", "scan")])(xs)
    jax.tree.map(close, *outs)


@pytest.mark.sample("13-False")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 13, 19, 34])  # one block, a prime number of steps, the last block shorter or not
def test_blocks_of_steps(steps, reverse, x64):
    def run(xs, executor):
        return scan(lambda h, x: (h * 0.9 + x, (h, x.sum())), jnp.ones((N, H)), xs, reverse=reverse, executor=executor)

    xs = jnp.asarray(np.random.RandomState(steps).randn(steps, N, H))
    jax.tree.map(close, *jax.jit(lambda xs: [run(xs, name) for name in ("persistent", "scan")])(xs))


def test_narrow_numbers_and_sums():
    """A step in bfloat16, a sum in it that is kept in float32, and products that round float32 factors to bfloat16."""
    rounded = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    p = {k: jnp.asarray(v, jnp.float32) for k, v in draw(1, w=(H, H), x=(T, N, H)).items()}

    def step(carry, x):
        h, total, t = carry
        z = jnp.dot(h, p["w"].astype(h.dtype)) + x.astype(h.dtype)
        wide = jnp.dot(z.astype(jnp.float32), p["w"], precision=rounded, preferred_element_type=jnp.float32)
        h = jnp.tanh(z + wide.astype(h.dtype))
        return (h, total + h, t + 1), (wide, x > 0, t)

    zeros = jnp.zeros((N, H), jnp.bfloat16)
    run = jax.jit(lambda x, name: scan(step, (zeros, zeros, 0), x, executor=name), static_argnums=1)
    ours, theirs = run(p["x"], "persistent"), run(p["x"], "scan")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.03, atol=0.03), ours, theirs
    )
    assert [v.dtype for v in jax.tree.leaves(ours)] == [v.dtype for v in jax.tree.leaves(theirs)]


@pytest.mark.parametrize(
    "step, why",
    [
        (lambda h, x: (jnp.sort(h, -1) + x, h), "the kernel has no sort"),
        (lambda h, x: (h[:, ::-1] + x, h), "the kernel has no rev"),
        (lambda h, x: (h + x, h[:, ::2]), "slices with steps"),
        (lambda h, x: (h + x, h.reshape(H, N)), r"reshape \[3, 6\] to \[6, 3\]"),
        (lambda h, x: (h + x, h[:, :, None] * h[:, None]), r"\[3, 6, 6\], which has more than two axes"),
        (lambda h, x: (h + x + jnp.einsum("nh,nh->n", h, h)[:, None], h), "batches of products"),
        (lambda h, x: (h + x, (h * 1j).imag), "the kernel has no complex64|the kernel has no imag"),
        (lambda h, x: (h + x, jax.lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h)), "the kernel has no cond"),
    ],
)
def test_steps_that_are_refused_by_name(step, why):
    with pytest.raises(ScanError, match=f"executor 'persistent' cannot run this step .*({why})"):
        scan(step, jnp.ones((N, H)), jnp.ones((T, N, H)), executor="persistent")
