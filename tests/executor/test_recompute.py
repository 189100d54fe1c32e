"""What is stored and what is computed again: same gradients, less memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GRU, LSTM, draw, lstm_step
from jax.ad_checkpoint import checkpoint_name

from jrnn.errors import ScanError
from jrnn.executor import explain_scan, scan


def named_step(p):
    def step(h, x):
        z = x @ p["wx"] + checkpoint_name(h @ p["wh"], "sums") + p["b"]
        r, u, n = jnp.split(z, 3, axis=-1)
        n = checkpoint_name(jnp.tanh(n) * jax.nn.sigmoid(r), "update")
        h = h + jax.nn.sigmoid(u) * (n - h)
        return h, h

    return step


@pytest.mark.parametrize(
    "recompute, reverse",
    [("contractions", False), ("sqrt", False), (1, False), (2, True), (100, False), (["sums", "update"], True)],
)
def test_gradients_are_the_same(recompute, reverse, x64):
    p = jax.tree.map(jnp.asarray, draw(0, **GRU))

    def loss(p, **keywords):
        carry, ys = keywords.pop("which", scan)(named_step(p), p["h0"], p["x"], reverse=reverse, **keywords)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(carry**2)

    expected = jax.grad(functools.partial(loss, which=jax.lax.scan))(p)
    ours = jax.jit(jax.grad(functools.partial(loss, recompute=recompute)))(p)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), ours, expected)


def test_lengths_with_checkpoints(x64):
    p = jax.tree.map(jnp.asarray, draw(1, **LSTM))

    def loss(p, recompute):
        (h, c), ys = scan(lstm_step(p), (p["h0"], p["c0"]), p["x"], lengths=jnp.array([4, 2]), recompute=recompute)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(h * c)

    whole, pieces = (jax.grad(loss)(p, recompute) for recompute in (None, 2))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), pieces, whole)


def test_named_values_are_not_stored():
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(0, **GRU))
    told = functools.partial(explain_scan, named_step(p), p["h0"], p["x"])
    assert any("dot_general" in i.what for i in told(recompute=["sums", "update"]).recomputed)
    assert told(recompute=["sums", "update"]).stored_bytes < told().stored_bytes
    assert all("dot_general" in i.what for i in told(recompute="contractions").stored)


def test_memory_with_square_root_checkpoints():
    """T=4096: within 1.5 of sqrt(T) carries and sqrt(T) steps of working memory; no output of all steps is asked for."""
    steps, batch, width = 4096, 4, 32
    p = dict(wx=jnp.ones((width, 4 * width)), wh=jnp.ones((width, 4 * width)), b=jnp.ones((1, 4 * width)))
    x, h = jnp.ones((steps, batch, width)), jnp.zeros((batch, width))

    def loss(p, x, recompute):
        (h_last, _), _ = scan(lstm_step(p), (h, h), x, recompute=recompute)
        return jnp.sum(h_last**2)

    def temporary(recompute):
        fn = jax.jit(jax.grad(functools.partial(loss, recompute=recompute)))
        return fn.lower(p, x).compile().memory_analysis().temp_size_in_bytes

    root, row = 64, batch * width * 4
    carries = root * 2 * row
    # In a chunk, a step holds: projected input (4), outputs and their cotangents (2), stored values (5), coefficients
    # of the reverse loop (6), and the cotangents of the pre-activations (4).
    working = root * 21 * row
    assert temporary("sqrt") < 1.5 * (carries + working) < temporary(4)
    assert temporary("sqrt") < temporary(None) / 5


def test_a_named_value_that_nothing_reads():
    def step(h, x):
        checkpoint_name(h * x, "unused")
        return jnp.tanh(h + x), h

    scan(step, jnp.zeros(2), jnp.ones((3, 2)), recompute=["unused"])
    with pytest.raises(ScanError, match="only 'unused'"):
        scan(step, jnp.zeros(2), jnp.ones((3, 2)), recompute=["other"])


@pytest.mark.parametrize(
    "recompute, message",
    [
        ("sqr", "did you mean 'sqrt'"),
        (0, "must be"),
        (True, "must be"),
        (2.5, "must be"),
        (["sum"], "did you mean 'sums'"),
    ],
)
def test_impossible_requests(recompute, message):
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(0, **GRU))
    with pytest.raises(ScanError, match=message):
        scan(named_step(p), p["h0"], p["x"], recompute=recompute)
