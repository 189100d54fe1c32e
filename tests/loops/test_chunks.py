"""A loop in chunks of time: the same results and gradients, and little memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import CASES, T, lstm_step
from eager import eager_passes
from plans_of import plans_of

from jrnn.loops import scan
from jrnn.loops.affine.chunkwise.chunk_body import ChunkBody
from jrnn.loops.affine.rounds import all_finite

pytestmark = pytest.mark.usefixtures("rewritten")


@pytest.fixture
def two_steps_at_once(rewritten):
    with eager_passes(2):
        yield


@pytest.mark.sample("affine")
@pytest.mark.parametrize(
    "name", ["lstm", "gru_reversed", "accumulators", "embedding_in_the_step", "affine"]
)
def test_chunks_compute_the_same(name, x64, two_steps_at_once):
    """Also where the last chunk is shorter: 5 = 2 + 2 + 1."""
    if name == "affine":
        params = dict(x=np.random.RandomState(0).randn(T, 2, 3))
        make = lambda p: (lambda h, x: (h * jnp.tanh(x) + x,) * 2, jnp.ones((2, 3)), p["x"], {})  # noqa: E731
    else:
        make, params = CASES[name]
    params = jax.tree.map(jnp.asarray, params)

    def both(which):
        def run(p):
            step, carry, xs, keywords = make(p)
            return which(step, carry, xs, **keywords)

        def smooth(p):
            return sum(
                jnp.sum(v**2)
                for v in jax.tree.leaves(run(p))
                if jnp.issubdtype(v.dtype, jnp.inexact)
            )

        return lambda p: (run(p), jax.grad(smooth)(p))

    assert any(plan.description.chunk == 2 for plan in plans_of(both(scan), params))
    ours, theirs = jax.jit(both(scan))(params), by_numpy(both(jax.lax.scan))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), ours, theirs
    )


def temporary(which, step, carry, xs):
    """Bytes of temporary memory of the compiled forward pass; nothing is run."""
    compiled = jax.jit(lambda carry, xs: which(step, carry, xs)).lower(carry, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_large_scan_needs_little_memory(without_kernel):
    """4,000 steps of an LSTM: the projected inputs alone would be 65 MB."""
    h = jnp.zeros((16, 64))
    p = {k: jnp.zeros(s) for k, s in dict(wx=(8, 256), wh=(64, 256), b=(1, 256)).items()}
    x = jnp.zeros((4000, 16, 8))
    theirs = temporary(jax.lax.scan, lstm_step(p), (h, h), x)
    assert temporary(scan, lstm_step(p), (h, h), x) < 1.1 * theirs + 1e6


def test_a_loss_in_the_step_does_not_keep_its_logits_for_all_steps(without_kernel):
    """512 steps with 8 x 20,000 logits would be 328 MB."""
    out, own = jnp.ones((64, 20_000)), jnp.eye(64)

    def step(h, x):
        h = jnp.tanh(h @ own + x)
        z = h @ out
        return h, jax.nn.logsumexp(z, -1) - z[:, 0]

    given = jnp.zeros((8, 64)), jnp.ones((512, 8, 64))
    theirs = temporary(jax.lax.scan, step, *given)
    assert temporary(scan, step, *given) < 1.1 * theirs + 1e6


@pytest.mark.parametrize("reverse", [False, True])
def test_stacks_of_chunks_are_rows(reverse):
    """XLA:CPU compiles a copy of an array of several axes, to or from the stack of all chunks, many times slower."""

    def step(S, x):
        q, k, v = x
        return (S := S + k[..., None] * (v - k @ S)[..., None, :]), q @ S

    def loss(xs):
        return jnp.sum(scan(step, jnp.zeros((64, 64)), xs, reverse=reverse)[1] ** 2)

    text = jax.jit(jax.grad(loss)).lower([jnp.ones((160, 64))] * 3).as_text()
    # 5 chunks of 32 steps.
    stacks = re.findall(r"stablehlo.dynamic_(?:update_)?slice .*: \(tensor<5x([\dx]*)f32>", text)
    assert len(stacks) > 6 and all(re.fullmatch(r"\d+x", shape) for shape in stacks), stacks
    # XLA:CPU would join the reshape to a row with the sums in front of it, and run their kernel many times slower.
    results = re.findall(r"\) : \(tensor<i32>\) -> \((.*)\)", text)
    shapes = [shape for r in results for shape in re.findall(r"tensor<(.*?)xf32>", r)]
    assert len(results) == 2 and set(shapes) == {"64x64", "32x64"}, results


def test_a_chunk_is_traced_once_and_its_constants_stay_inside(monkeypatch):
    """JAX asks for the tangents of a loop's step twice, and moves what reads constants alone in front of the loop."""

    def step(S, x):
        q, k, v = x
        return (S := S + k[..., None] * (v - k @ S)[..., None, :]), q @ S

    traced, run = [], ChunkBody.run_by_products
    monkeypatch.setattr(
        ChunkBody, "run_by_products", lambda self, *args: traced.append(self) or run(self, *args)
    )
    xs = [jnp.ones((160, 64))] * 3
    slope = jax.make_jaxpr(
        jax.grad(lambda xs: jnp.sum(scan(step, jnp.zeros((64, 64)), xs)[1] ** 2))
    )(xs).jaxpr
    traced = [body for body in traced if body.steps == 32]  # others validate the program
    assert len(traced) == 2, "of its values, and of its tangents"
    outside = [v.aval.shape for e in slope.eqns for v in e.outvars if e.primitive.name != "scan"]
    assert (32, 32) not in outside, "a mask of the scores"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_detected(dtype, bad):
    arrays = [jnp.full(shape, 3e38, dtype) for shape in ((3, 4), (3, 4), (5,), ())]
    check = jax.jit(all_finite)
    assert check(arrays)
    for i, a in enumerate(arrays):
        for place in {0, a.size - 1}:
            planted = a.reshape(-1).at[place].set(bad).reshape(a.shape)
            assert not check([*arrays[:i], planted, *arrays[i + 1 :]])
