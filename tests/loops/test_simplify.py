"""Views of views in a step are simplified, and their values do not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.jaxprs import jax_internals
from jrnn.loops import scan
from jrnn.loops.ir import traced_loops
from jrnn.loops.passes import compose_views

pytestmark = pytest.mark.usefixtures("rewritten")

N, H = 2, 3
H0, XS = jnp.linspace(-1, 1, N * H).reshape(N, H), jnp.linspace(0, 1, 4 * N * H).reshape(4, N, H)


def gates_joined(h, x):
    """As the operators of a net do it: [N, H] made [1, N, H], joined, and cut again."""
    joined = jnp.concatenate([h[None], (h * x)[None], x.reshape(1, N, H)], axis=-1)
    _, u, o = jnp.split(joined.reshape(1, N, 3 * H), 3, axis=-1)
    new = (jax.nn.sigmoid(u.reshape(N, H)) * h)[None] + jnp.tanh(o)
    return new[0], new.reshape(N, H)


def parts_of_parts(h, x):
    joined = jnp.concatenate([h, x], axis=1)
    return joined[:, 1:3] @ jnp.ones((2, H)), joined[:, :2]


def across_parts(h, x):
    joined = jnp.concatenate([h, x], axis=1)
    return joined[:, 2 : 2 + H] * 0.5, joined.T.reshape(N, 2 * H)


def uneven(h, x):
    a, b, c = jnp.split(jnp.concatenate([h, x], axis=1), [1, H], axis=1)
    return jnp.concatenate([a, b], axis=1) + c, a.reshape(N)


def carry_passed_on(h, x):
    return h[None][0], h.reshape(H, N).reshape(N, H)


@pytest.mark.sample("carry_passed_on")
@pytest.mark.parametrize(
    "step", [gates_joined, parts_of_parts, across_parts, uneven, carry_passed_on]
)
def test_results_and_gradients_stay(step):
    def loss(run, h, xs):
        last, ys = run(step, h, xs)
        return jnp.sum(jnp.sin(last)) + jnp.sum(jnp.cos(ys) * jnp.arange(ys.size).reshape(ys.shape))

    for actual, wanted in zip(
        jax.tree.leaves(scan(step, H0, XS)), jax.tree.leaves(jax.lax.scan(step, H0, XS))
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)
    actual, wanted = (jax.grad(loss, (1, 2))(run, H0, XS) for run in (scan, jax.lax.scan))
    for one, two in zip(actual, wanted):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def primitives(step):
    (loop,) = traced_loops(lambda h, xs: scan(step, h, xs), H0, XS)
    return [e.primitive.name for e in compose_views(loop).eqns]


def test_joined_gates_are_taken_from_where_they_come():
    seen = primitives(gates_joined)
    assert "concatenate" not in seen and "split" not in seen and "slice" not in seen


def test_composed_views_are_not_traced_and_keep_their_lines(monkeypatch):
    (loop,) = traced_loops(lambda: jax.lax.scan(gates_joined, H0, XS))
    monkeypatch.setattr(jax_internals, "traced", None)
    changed = compose_views(loop)
    views = [e for e in changed.eqns if e.primitive.name in ("reshape", "slice")]
    assert views and len(changed.eqns) < len(loop.eqns)
    assert all("gates_joined" in jax_internals.source_line(e) for e in views)


@pytest.mark.parametrize("step", [across_parts, parts_of_parts])
def test_what_is_no_part_stays_joined(step):
    assert "concatenate" in primitives(step)


@pytest.mark.parametrize(
    "dtype, bits, goes",
    [
        ("float32", (8, 23), True),
        ("float32", (8, 22), False),
        ("float64", (11, 52), True),
        ("bfloat16", (8, 7), False),
    ],
)
def test_a_reduction_to_the_precision_of_a_value_goes(dtype, bits, goes):
    """As `jax.checkpoint` writes one for what it stores. XLA computes bfloat16 with more bits."""

    def step(h, x):
        stored = jax.lax.reduce_precision(h * x, *bits)
        return jnp.tanh(stored), stored

    with jax.enable_x64(True):
        h = jnp.ones((N, H), dtype)
        (loop,) = traced_loops(
            lambda *given: jax.lax.scan(step, *given), h, jnp.ones((4, N, H), dtype)
        )
        names = [eqn.primitive.name for eqn in compose_views(loop).eqns]
    assert ("reduce_precision" not in names) == goes
