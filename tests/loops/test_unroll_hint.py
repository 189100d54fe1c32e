"""`unroll` is a hint on CPUs: one step in an iteration where that is estimated faster, or where loops are rewritten."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn

RNG = np.random.default_rng(0)
CURRENTS = RNG.normal(size=(64, 16, 100)).astype(np.float32)
MATRIX = (0.1 * RNG.normal(size=(68, 68))).astype(np.float32)


def fire(carry, current):
    """Neurons whose threshold rises when they fire."""
    voltage, threshold = carry
    voltage = 0.9 * voltage + current
    smooth = jax.nn.sigmoid(4 * (voltage - threshold))
    spike = smooth + jax.lax.stop_gradient((voltage > threshold).astype(jnp.float32) - smooth)
    return (voltage - spike * threshold, 0.95 * threshold + 0.1 * spike), spike


def fired(currents, unroll, scan=jrnn.scan):
    zeros = jnp.zeros(currents.shape[1:])
    return scan(fire, (zeros, zeros + 1), currents, unroll=unroll)[1]


def loss(currents, unroll):
    return jnp.sum(fired(currents, unroll) ** 2)


def steps_of_iterations(plans):
    """Returns the steps of an iteration of each loop that runs."""
    return [
        plan.loop.unroll if plan.node is None else _residual(plan.node).unroll for plan in plans
    ]


def _residual(node):
    while hasattr(node, "inner"):
        node = node.inner
    return node.loop


def test_an_elementwise_step_runs_one_by_one_forward_and_reverse():
    forward = jrnn.explain(fired, CURRENTS, 8).loops
    train = jrnn.explain(jax.grad(loss), CURRENTS, 8).loops
    assert steps_of_iterations(forward) == [1]
    assert steps_of_iterations(train) == [1, 1]
    assert all("unroll=8 is a hint" in str(plan) for plan in (*forward, *train))
    # The same as the loop without the option, which is left alone.
    assert jrnn.explain(fired, CURRENTS, 1).loops[0].strategy == "lax.scan"


def test_values_are_those_of_the_loop_without_the_option():
    short = CURRENTS[:40, :2]
    got = jax.jit(lambda x: fired(x, 8))(short)
    np.testing.assert_array_equal(got, jax.jit(lambda x: fired(x, 1, jax.lax.scan))(short))


@pytest.mark.parametrize("unroll", [10, True])
def test_a_step_of_products_and_a_loop_in_one_iteration_keep_the_option(unroll):
    def step(state, noise):
        state = state + 0.01 * (MATRIX @ state) + noise
        return state, state

    def run(noise):
        return jrnn.scan(step, noise[0], noise, unroll=unroll)

    (plan,) = jrnn.explain(run, CURRENTS[:, 0, :68]).loops
    assert plan.strategy == "lax.scan" and plan.loop.unroll in (10, 64)
    assert "is a hint" not in str(plan)


def test_a_rewritten_loop_of_products_runs_one_by_one():
    def step(weights, state, noise):
        state = jnp.tanh(state @ weights + noise)
        return state, state

    def loss(weights, noise):
        return jnp.sum(jrnn.scan(lambda h, x: step(weights, h, x), noise[0], noise, unroll=10)[1])

    plans = jrnn.explain(jax.grad(loss), MATRIX, CURRENTS[:, :, :68]).loops
    rewritten = [plan for plan in plans if plan.accumulated]
    assert rewritten and all(_residual(plan.node).unroll == 1 for plan in rewritten)
