"""Layers of one shape have one plan and one derivative, and jaxprs that differ in anything have their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import scan
from jrnn.jaxprs.interned import interned
from jrnn.loops import compile as compiling

LAYERS = 3


def twice(x):
    return 2 * x


def traced(fn=twice, x=1.0):
    return jax.make_jaxpr(lambda x: fn(x))(x)


def scaled_by(factor):
    return lambda x: jax.lax.mul(x, jnp.float32(factor))


def summed_over(axis):
    return lambda x: x.sum(axis)


def branches(factor):
    return lambda x: jax.lax.cond(x > 0, lambda x: factor * x, lambda x: x, x)


def in_scope(name):
    def fn(x):
        with jax.named_scope(name):
            return 2 * x

    return fn


PAIRS = {
    "type": [traced(), traced(x=1)],
    "weak type": [traced(x=jnp.float32(1)), traced()],
    "shape": [traced(x=jnp.ones(2)), traced(x=jnp.ones(3))],
    "primitive": [traced(jnp.sin), traced(jnp.cos)],
    "parameter": [traced(summed_over(axis), jnp.ones((2, 2))) for axis in (0, 1)],
    "operands": [traced(lambda x: x[0] - x[1], jnp.ones(2)), traced(lambda x: x[1] - x[0], jnp.ones(2))],
    "literal": [traced(scaled_by(2)), traced(scaled_by(3))],
    "sign of zero": [traced(scaled_by(0.0)), traced(scaled_by(-0.0))],
    "jaxpr inside": [traced(branches(2)), traced(branches(3))],
    "scope": [traced(in_scope("a")), traced(in_scope("b"))],
    "line": [traced(lambda x: x + x), traced(
        lambda x: x + x
    )],
}  # fmt: skip


@pytest.mark.parametrize("differs", PAIRS)
def test_jaxprs_that_differ_have_their_own(differs):
    first, second = PAIRS[differs]
    assert interned(first) is not interned(second)


def test_the_options_of_jax_are_compared():
    closed = traced()
    assert interned(closed) is interned(traced())
    with jax.default_matmul_precision("highest"):
        assert interned(traced()) is not interned(closed)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.checkpoint], ids=["plain", "checkpoint"])
def test_layers_of_one_shape_are_planned_once(wrap):
    """Each has its own weights: values and gradients are those of `jax.lax.scan`."""
    draw = np.random.default_rng(0).normal
    weights = [jnp.float32(0.3 * draw(size=(8, 8))) for _ in range(LAYERS)]
    xs = jnp.float32(draw(size=(100, 4, 8)))
    carry = jnp.zeros((4, 8))

    def step(w, h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    def loss(loop, count, weights):
        ys = xs[
            count:
        ]  # so that the number of layers is also one of steps, and plans of others are not found
        for w in weights[:count]:
            ys = loop(wrap(lambda h, x, w=w: step(w, h, x)), carry, ys)[1]
        return jnp.sum(ys**2)

    def plans(count):
        compiling.compile_loop.cache_clear()
        jax.jit(jax.grad(lambda weights: loss(scan, count, weights))).lower(weights)
        return compiling.compile_loop.cache_info().misses

    assert plans(LAYERS) == plans(2)
    ours = jax.grad(lambda weights: loss(scan, LAYERS, weights))(weights)
    theirs = jax.grad(lambda weights: loss(jax.lax.scan, LAYERS, weights))(weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), ours, theirs)
