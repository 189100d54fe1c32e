"""What is stored and what is computed again: same gradients, less memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import GRU, LSTM, draw, lstm_step
from jax.ad_checkpoint import checkpoint_name
from plans_of import scan_plans

from jrnn import plain_scans
from jrnn.errors import ScanError
from jrnn.loops import scan

pytestmark = pytest.mark.usefixtures("rewritten")


def named_step(p):
    def step(h, x):
        z = x @ p["wx"] + checkpoint_name(h @ p["wh"], "sums") + p["b"]
        r, u, n = jnp.split(z, 3, axis=-1)
        n = checkpoint_name(jnp.tanh(n) * jax.nn.sigmoid(r), "update")
        h = h + jax.nn.sigmoid(u) * (n - h)
        return h, h

    return step


@pytest.mark.sample("recompute4-True")
@pytest.mark.parametrize(
    "recompute, reverse",
    [
        ("contractions", False),
        (1, False),
        (2, True),
        ("sqrt", False),
        (["sums", "update"], True),
        (100, False),
    ],
)
def test_gradients_are_the_same(recompute, reverse, x64):
    p = jax.tree.map(jnp.asarray, draw(0, **GRU))

    def loss(p, **keywords):
        carry, ys = keywords.pop("which", scan)(
            named_step(p), p["h0"], p["x"], reverse=reverse, **keywords
        )
        return jnp.sum(jnp.sin(ys)) + jnp.sum(carry**2)

    expected = by_numpy(jax.grad(functools.partial(loss, which=jax.lax.scan)))(p)
    ours = jax.jit(jax.grad(functools.partial(loss, recompute=recompute)))(p)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), ours, expected
    )


@pytest.mark.exhaustive
def test_lengths_with_checkpoints(x64):
    p = jax.tree.map(jnp.asarray, draw(1, **LSTM))

    def loss(p, recompute):
        (h, c), ys = scan(
            lstm_step(p), (p["h0"], p["c0"]), p["x"], lengths=jnp.array([4, 2]), recompute=recompute
        )
        return jnp.sum(jnp.sin(ys)) + jnp.sum(h * c)

    with plain_scans():
        whole = by_numpy(jax.grad(functools.partial(loss, recompute=None)))(p)
    pieces = jax.jit(jax.grad(functools.partial(loss, recompute=2)))(p)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), pieces, whole
    )


def test_named_values_are_not_stored():
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(0, **GRU))

    def loops(**keywords):
        forward, reverse = scan_plans(named_step(p), p["h0"], p["x"], **keywords).training
        return [item.what.rsplit("/")[-1] for item in forward.stacked], forward, reverse

    stored, forward, reverse = loops()
    fewer, less, again = loops(recompute=["sums", "update"])
    assert sum(i.bytes for i in less.stacked) < sum(i.bytes for i in forward.stacked)
    assert again.contractions > reverse.contractions, "h @ wh is computed again"
    contractions = loops(recompute="contractions")[1]
    assert sum(i.bytes for i in contractions.stacked) <= sum(i.bytes for i in forward.stacked)


def test_contractions_never_store_more_than_none():
    """A Runge-Kutta step, whose contractions have more values than its carry."""
    w, v = jnp.ones((8, 32)), jnp.ones((32, 8))

    def step(h, x):
        f = lambda h: jnp.tanh(h @ w + x) @ v  # noqa: E731
        a = f(h)
        return h + f(h + 0.1 * a), None

    def stored(recompute):
        forward, _ = scan_plans(
            step, jnp.ones((4, 8)), jnp.ones((6, 4, 32)), recompute=recompute
        ).training
        return sum(item.bytes for item in forward.stacked)

    assert stored("contractions") <= stored(None)


@pytest.mark.exhaustive("recompute1")
@pytest.mark.parametrize("recompute", ["contractions", ["sums"]])
def test_steps_with_control_flow_keep_to_what_was_asked(recompute, x64):
    """Their derivative is JAX's own, under a policy of `jax.checkpoint`."""
    p = jax.tree.map(jnp.asarray, draw(0, **GRU))

    def step(h, x):
        sums = checkpoint_name(jnp.tanh(h @ p["wh"][:, :4]), "sums")
        return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, sums) + h, sums

    def loss(which, h0, **keywords):
        return jnp.sum(which(step, h0, p["x"], **keywords)[1] ** 2)

    ours = jax.jit(jax.grad(functools.partial(loss, scan, recompute=recompute)))(p["h0"])
    np.testing.assert_allclose(
        ours, by_numpy(jax.grad(functools.partial(loss, jax.lax.scan)))(p["h0"]), rtol=1e-11
    )
    stacks = [
        sum(
            item.bytes
            for item in scan_plans(step, p["h0"], p["x"], recompute=r).training[0].stacked
        )
        for r in (recompute, None)
    ]
    assert stacks[0] < stacks[1]


@pytest.mark.exhaustive
def test_memory_with_square_root_checkpoints():
    """T=4096: within 1.5 of sqrt(T) carries and sqrt(T) steps of working memory; no output of all steps is asked for."""
    steps, batch, width = 4096, 4, 32
    p = dict(
        wx=jnp.ones((width, 4 * width)), wh=jnp.ones((width, 4 * width)), b=jnp.ones((1, 4 * width))
    )
    x, h = jnp.ones((steps, batch, width)), jnp.zeros((batch, width))

    def loss(p, x, recompute):
        (h_last, _), _ = scan(lstm_step(p), (h, h), x, recompute=recompute)
        return jnp.sum(h_last**2)

    def temporary(recompute):
        fn = jax.jit(jax.grad(functools.partial(loss, recompute=recompute)))
        return fn.lower(p, x).compile().memory_analysis().temp_size_in_bytes

    root, row = 64, batch * width * 4
    carries = root * 2 * row
    # In a chunk, a step holds: projected input (4), outputs and their cotangents (2), stored values (5), and the
    # cotangents of the pre-activations (4).
    working = root * 15 * row
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
