"""A scan in pieces of time: the same results and gradients, and only where pieces pay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, LSTM, T, draw, lstm_step

from jrnn.executor import explain_scan, pieces, scan


@pytest.mark.parametrize("name", ["lstm", "gru_reversed", "no_inputs", "accumulators", "embedding_in_the_step"])
def test_results_and_gradients_are_the_same(name, x64, monkeypatch):
    make, params = CASES[name]
    params = jax.tree.map(jnp.asarray, params)

    def both(which):
        def run(p):
            step, carry, xs, keywords = make(p)
            return which(step, carry, xs, **keywords)

        def loss(p):
            return sum(
                jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(p)) if jnp.issubdtype(leaf.dtype, jnp.inexact)
            )

        return jax.jit(lambda p: (run(p), jax.grad(loss)(p)))(params)

    expected = both(jax.lax.scan)
    asked = []
    monkeypatch.setattr(pieces, "count", lambda core, platform: asked.append(core.length) or 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), both(scan), expected)
    assert set(asked) == {T}


def test_lengths_in_pieces(x64, monkeypatch):
    p = jax.tree.map(jnp.asarray, draw(2, **LSTM))

    def run(p):
        return scan(lstm_step(p), (p["h0"], p["c0"]), p["x"], lengths=np.array([4, 1]))

    whole = run(p)
    monkeypatch.setattr(pieces, "count", lambda core, platform: 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), run(p), whole)


def test_many_at_once_in_pieces_and_chunks(monkeypatch):
    """JAX takes the batch axes of the whole for those of the pieces."""
    xs = jnp.linspace(-1, 1, 30).reshape(5, 2, 3)

    def loss(scale, **keywords):
        def step(h, x):
            mapped = jax.lax.map(jnp.tanh, x * scale)
            return h * 0.5 + mapped, (jnp.argmax(mapped, axis=1), mapped)

        h, (_, ys) = scan(step, xs[0], xs * scale, **keywords)
        return jnp.sum(h) + jnp.sum(ys**2)

    def gradient(**keywords):
        return jax.grad(lambda scales: jnp.sum(jax.vmap(lambda s: loss(s, **keywords))(scales)))(jnp.array([1.0, 0.5]))

    whole = gradient()
    monkeypatch.setattr(pieces, "count", lambda core, platform: 2)
    np.testing.assert_allclose(gradient(recompute=1), whole, rtol=1e-5)


@pytest.mark.parametrize("keywords", [{}, dict(recompute="sqrt")])
def test_many_at_once_of_which_some_results_are_the_same(keywords, monkeypatch):
    xs = jnp.linspace(-1, 1, 30).reshape(5, 2, 3)

    def loss(which, scale, xs, **keywords):
        def step(carry, x):
            same, h = carry
            return (same * 0.5 + x.T @ x, jnp.tanh(h * scale + x)), (same, x)

        (same, h), (ys, _) = which(step, (jnp.ones((3, 3)), xs[0]), xs, **keywords)
        return jnp.sum(same * scale) + jnp.sum(h) + jnp.sum(ys**2)

    def gradient(which, **keywords):
        many = jax.vmap(lambda s, xs: loss(which, s, xs, **keywords), (0, None))
        return jax.grad(lambda xs: jnp.sum(many(jnp.array([1.0, 0.5]), xs)))(xs)

    monkeypatch.setattr(pieces, "count", lambda core, platform: 2)
    np.testing.assert_allclose(gradient(scan, **keywords), gradient(jax.lax.scan), rtol=1e-5, atol=1e-5)


def test_without_derivatives_there_is_one_loop(monkeypatch):
    monkeypatch.setattr(pieces, "count", lambda core, platform: 2)
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(0, **LSTM))

    def last(p):
        return jnp.sum(scan(lstm_step(p), (p["h0"], p["c0"]), p["x"])[1])

    loops = [jax.jit(fn).lower(p).as_text().count("stablehlo.while") for fn in (last, jax.grad(last))]
    assert loops == [1, 4]


def told(monkeypatch, steps, batch, hidden, cores=2):
    monkeypatch.setattr(pieces, "_cores", lambda: cores)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    p = {k: jnp.zeros(s) for k, s in dict(wx=(8, 4 * hidden), wh=(hidden, 4 * hidden), b=(1, 4 * hidden)).items()}
    h = jnp.zeros((batch, hidden))
    return explain_scan(lstm_step(p), (h, h), jnp.zeros((steps, batch, 8)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="pieces are for a CPU")
def test_pieces_where_they_pay(monkeypatch):
    assert told(monkeypatch, 100, 32, 128).pieces > 1
    assert "pieces of time" in str(told(monkeypatch, 100, 32, 128))
    assert told(monkeypatch, 100, 32, 128, cores=1).pieces == 1, "nothing to run beside the loop"
    assert told(monkeypatch, 20, 128, 128).pieces == 1, "few steps"
    assert told(monkeypatch, 100, 1, 128).pieces == 1, "little work"
    assert told(monkeypatch, 100, 32, 640).pieces == 1, "a contraction that takes all cores by itself"


@pytest.mark.parametrize("name", ["lstm", "gru_reversed", "accumulators", "affine"])
@pytest.mark.parametrize("size", [2, 5])
def test_chunks_compute_the_same(name, size, x64, monkeypatch):
    """Also where the last chunk is shorter (5 = 2 + 2 + 1), and beside gradients, which are not formed in chunks."""
    if name == "affine":
        params = dict(x=jnp.asarray(np.random.RandomState(0).randn(T, 2, 3)))
        make = lambda p: (lambda h, x: (h * jnp.tanh(x) + x,) * 2, jnp.ones((2, 3)), p["x"], {})  # noqa: E731
    else:
        make, params = CASES[name]
        params = jax.tree.map(jnp.asarray, params)

    def run(p):
        step, carry, xs, keywords = make(p)
        return scan(step, carry, xs, **keywords)

    def both(p):
        def smooth(p):
            return sum(jnp.sum(v**2) for v in jax.tree.leaves(run(p)) if jnp.issubdtype(v.dtype, jnp.inexact))

        return run(p), jax.grad(smooth)(p)

    whole = jax.jit(both)(params)
    asked = []
    monkeypatch.setattr(pieces, "chunk", lambda *args, **kw: asked.append(1) or size)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), jax.jit(lambda p: both(p))(params), whole
    )
    assert asked


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chunks are for a CPU")
def test_a_large_scan_needs_little_memory(monkeypatch):
    """Forward, 4,000 steps of an LSTM: the projected inputs alone would be 65 MB. Nothing is run."""
    monkeypatch.setattr(pieces.host_memory, "kept", False)
    h = jnp.zeros((16, 64))
    p = {k: jnp.zeros(s) for k, s in dict(wx=(8, 256), wh=(64, 256), b=(1, 256)).items()}
    x = jnp.zeros((4000, 16, 8))

    def last(p, h, x):
        return scan(lstm_step(p), (h, h), x)[0]

    compiled = jax.jit(last).lower(p, h, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8e6
    assert "steps at a time where no gradients are asked for: 64" in str(explain_scan(lstm_step(p), (h, h), x))
    monkeypatch.setattr(pieces.host_memory, "kept", True)
    assert explain_scan(lstm_step(p), (h, h), x).chunk is None, "memory that is kept costs less than small chunks"
