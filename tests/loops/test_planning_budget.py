"""A loop whose planning takes too much work is left to `jax.lax.scan`, and one whose planning takes long is reported."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

import jrnn
from jrnn.loops.ir import observers, planning

XS = jnp.ones((3000, 8, 64))
INIT = jnp.ones((8, 64))


def new_step():
    """A step that no other test has planned, with shared subexpressions."""

    def step(c, x):
        for _ in range(3):
            c = c + 0.1 * jnp.tanh(c)
        return c + x, c[:, :2]

    return step


@pytest.fixture
def no_budget(monkeypatch):
    """Planning may ask no more than a few questions. Plans of other budgets are forgotten, before and after."""
    monkeypatch.setattr(planning, "MOST_OF_SMALL_LOOPS", 20)
    monkeypatch.setattr(planning, "MOST_PER_EQUATION", 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_loop_beyond_the_budget_is_left_to_jax(no_budget):
    step = new_step()
    explained = jrnn.explain(lambda init, xs: jrnn.scan(step, init, xs), INIT, XS)
    assert "left to lax.scan" in str(explained)
    assert "planning it takes more than" in explained.loops[0].text()


def test_its_values_and_gradients_are_those_of_the_loop(no_budget):
    step = new_step()
    xs = XS[:5, :2, :3]
    init = INIT[:2, :3]

    def total(run, init, xs):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(run(step, init, xs)))

    with observers.collected() as plans:
        results = by_numpy(jax.value_and_grad(lambda *a: total(jrnn.scan, *a), (0, 1)))(init, xs)
        jax.jit(jax.grad(lambda *a: total(jrnn.scan, *a))).lower(init, xs)
    assert any("left to JAX where a loop is differentiated" in note for note in plans.notes)
    expected = by_numpy(jax.value_and_grad(lambda *a: total(jax.lax.scan, *a), (0, 1)))(init, xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), results, expected)


def test_a_loop_that_is_planned_for_long_is_reported_once(monkeypatch, caplog):
    seconds = itertools.count(step=6)
    monkeypatch.setattr(planning, "clock", lambda: next(seconds))
    monkeypatch.setattr(planning.work, "_OFTEN", 10)
    jax.clear_caches()
    step = new_step()
    with caplog.at_level(logging.WARNING, "jrnn.loops"):
        jax.jit(lambda init, xs: jrnn.scan(step, init, xs)).lower(INIT, XS)
    (record,) = caplog.records
    message = record.getMessage()
    assert "test_planning_budget.py" in message
    assert "still being planned after 10 s" in message
    assert "plain_scans" in message
