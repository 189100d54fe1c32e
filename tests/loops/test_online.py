"""`online_gradient`: real-time recurrent learning equals the gradient of a scan.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from newton_cells import example

import jrnn
from jrnn.errors import ScanError

T = 9
close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
)


def task(name):
    """`(params, carry, x) -> (carry, loss)`, with a readout of its own parameter."""
    make, p, carry, xs = example(name, T)
    p = {
        **p,
        "readout": jnp.asarray(np.random.RandomState(5).randn(jax.tree.leaves(carry)[0].shape[-1])),
    }

    def step(p, carry, x):
        carry, y = make(p)(carry, x)
        return carry, jnp.sum(jnp.sin(y @ p["readout"]) ** 2)

    return step, p, carry, xs


def streamed(learner, p, carry, xs):
    def one(state, x):
        loss, gradient, state = learner(p, state, x)
        return state, (loss, gradient)

    return jax.lax.scan(one, learner.init(p, carry, xs[0]), xs)[1]


@pytest.mark.sample("elman_diagonal")
@pytest.mark.parametrize(
    "name", ["elman_diagonal", "gru", "lstm", "slstm", "cfc", "mingru", "elman_dense"]
)
def test_the_sum_is_the_gradient_of_a_scan(name, x64):
    step, p, carry, xs = task(name)

    def losses(p):
        return jax.lax.scan(functools.partial(step, p), carry, xs)[1]

    total, gradients = jax.jit(functools.partial(streamed, jrnn.online_gradient(step)))(
        p, carry, xs
    )
    gradients = jax.device_get(gradients)
    close(total, by_numpy(losses)(p))
    close(
        jax.tree.map(lambda g: g.sum(axis=0), gradients),
        by_numpy(jax.grad(lambda p: losses(p).sum()))(p),
    )
    close(jax.tree.map(lambda g: g[4], gradients), by_numpy(jax.grad(lambda p: losses(p)[4]))(p))


def wide(p, h, x):
    h = jnp.tanh(h @ p["v"] + x)
    return h, jnp.sum(h**2)


def wide_task(size=20):
    random = np.random.RandomState(0)
    return (
        {"v": jnp.asarray(random.randn(size, size) * 0.1)},
        jnp.zeros((2, size)),
        jnp.asarray(random.randn(T, 2, size)),
    )


def test_dense_jacobians_are_refused_or_approximated(x64):
    p, h, xs = wide_task()
    with pytest.raises(ScanError, match="reads 20 elements of the carry.*approximate='diagonal'"):
        jrnn.online_gradient(wide).init(p, h, xs[0])
    learner = jrnn.online_gradient(wide, approximate="diagonal")
    _, gradients = jax.jit(functools.partial(streamed, learner))(p, h, xs)
    actual = gradients["v"].sum(axis=0)

    def diagonal_only(v):
        """Products with the carry's past pass their derivative along the diagonal alone, before the step of the loss."""
        off, total, past = v - jnp.diag(jnp.diag(v)), 0.0, h
        for x in xs:
            total += wide({"v": v}, past, x)[1]
            past = jnp.tanh(jax.lax.stop_gradient(past) @ off + past * jnp.diag(v)[None] + x)
        return total

    close(actual, by_numpy(jax.grad(diagonal_only))(p["v"]))
    exact = by_numpy(jax.grad(lambda p: jax.lax.scan(functools.partial(wide, p), h, xs)[1].sum()))(
        p
    )["v"]
    assert np.abs(actual - exact).max() > 1e-3


def test_the_state_does_not_grow_and_shares_columns():
    step, p, carry, xs = task("gru")
    p, carry, xs = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), (p, carry, xs))
    learner = jrnn.online_gradient(step)
    state = jax.eval_shape(learner.init, p, carry, xs[0])
    after = jax.eval_shape(learner, p, state, xs[0])[2]
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    sizes = dict(zip(sorted(p), (s.shape for s in state.derivatives)))
    assert sizes["w"] == (2, 4, 1, 3), "an element of h has the derivatives of its own column of w"
    assert sizes["readout"][-1] == 0, "the carry does not read it"


@pytest.mark.parametrize(
    "step, carry, message",
    [
        (
            lambda p, c, x: ((c[0] + 1, c[1] * p), jnp.sum(c[1])),
            (jnp.int32(0), jnp.ones(2)),
            "a carry is int32",
        ),
        (lambda p, c, x: (c * p, c), jnp.ones(2), "with a scalar loss"),
    ],
)
def test_what_has_no_gradient(step, carry, message):
    with pytest.raises(ScanError, match=message):
        jrnn.online_gradient(step).init(jnp.ones(2), carry, jnp.ones(2))
    with pytest.raises(ScanError, match="did you mean 'diagonal'"):
        jrnn.online_gradient(step, approximate="diagnal")
