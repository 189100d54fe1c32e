"""`jrnn.testing`: what is right passes, and each kind of mistake is found and reported."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jrnn import testing
from jrnn.errors import LayerError
from jrnn.nets import cells
from jrnn.testing import subjects

pytestmark = pytest.mark.usefixtures("little_optimization")

T, N, D, H = 4, 3, 2, 2
RNG = np.random.default_rng(0)
XS = RNG.standard_normal((T, N, D)).astype(np.float32)
CARRY = RNG.standard_normal((N, H)).astype(np.float32)
PARAMS = {
    "w": RNG.standard_normal((H, H)).astype(np.float32),
    "u": RNG.standard_normal((D, H)).astype(np.float32),
}


def step(params, h, x):
    h = jnp.tanh(h @ params["w"] + x @ params["u"])
    return h, 2 * h


@pytest.mark.exhaustive
def test_a_step_passes():
    testing.assert_gradients_agree(step, CARRY, XS, params=PARAMS, max_elements=4)
    testing.assert_padding_invariant(step, CARRY, XS, params=PARAMS)
    testing.assert_batch_invariant(step, CARRY, XS, params=PARAMS, lengths=[2, 0, 4])
    testing.assert_executors_agree(step, CARRY, XS, params=PARAMS)


@pytest.mark.exhaustive
def test_a_jrnn_cell_passes():
    cell = cells.BasicRNNCell(D, H)
    testing.assert_gradients_agree(cell, None, XS, lengths=[2, 0, 4], max_elements=2)
    testing.assert_padding_invariant(cell, None, XS, lengths=[2, 0, 4], fills=[np.nan])
    testing.assert_batch_invariant(cell, None, XS)
    testing.assert_executors_agree(cell, None, XS)


@pytest.mark.exhaustive
def test_an_affine_step_runs_in_the_associative_executor_too():
    tried = []

    def affine(h, x):
        tried.append(0)
        return 0.5 * h + x, h

    testing.assert_executors_agree(affine, CARRY, XS, lengths=[1, 4, 0])
    assert len(tried) > 4


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


@pytest.mark.exhaustive
def test_a_wrong_derivative_rule_is_found():
    with pytest.raises(
        AssertionError, match=r"(?s)the gradients disagree.*custom_vjp_call of twice"
    ):
        testing.assert_gradients_agree(
            lambda h, x: (jnp.tanh(h + twice(x)), h), CARRY, XS[:2], max_elements=1
        )


def test_what_shows_of_padding_is_found():
    def leaks(weights, xs, state, lengths):
        return xs, state + xs.sum(0)

    with pytest.raises(
        AssertionError,
        match=r"with lengths \[3, 0, 4\] and nan instead of 0 behind them, y\[.* is nan, ",
    ):
        testing.assert_padding_invariant(testing.Layer(leaks, (), XS, CARRY))

    def selects(weights, xs, state, lengths):  # the results are right, the gradient is 0 x NaN
        alive = jnp.arange(len(xs))[:, None, None] < lengths[None, :, None]
        return jnp.where(alive, weights * xs, 0), state

    with pytest.raises(
        AssertionError, match="nan instead of 0 behind them, the gradient of params.* is nan"
    ):
        testing.assert_padding_invariant(testing.Layer(selects, jnp.float32(2), XS, CARRY))


def test_what_depends_on_the_batch_is_found():
    with pytest.raises(
        AssertionError, match="for sequence 0 of the batch, .* alone, by more than 1e-06"
    ):
        testing.assert_batch_invariant(lambda h, x: (h - x.mean(0, keepdims=True), h), CARRY, XS)
    placed = testing.Layer(lambda w, xs, s, n: (xs + s.at[0].set(0)[None], s), (), XS, CARRY)
    with pytest.raises(AssertionError, match="for sequence 0 of the batch, .* in another order"):
        testing.assert_batch_invariant(placed)


def test_an_executor_that_differs_is_found(monkeypatch):
    right = subjects.scan

    def wrong(*args, recompute=None, **options):
        last, ys = right(*args, recompute=recompute, **options)
        return last, ys * (1.001 if recompute == "sqrt" else 1)

    monkeypatch.setattr(subjects, "scan", wrong)
    with pytest.raises(
        AssertionError,
        match="recompute='sqrt', and by jax.lax.scan: .* is .*, not .*, by more than 1e-05",
    ):
        testing.assert_executors_agree(step, CARRY, XS, params=PARAMS)


def test_mistakes():
    with pytest.raises(
        LayerError, match="a cell is a function, a jrnn.nets.cells.Cell or a Layer, was given a str"
    ):
        testing.assert_batch_invariant("lstm", CARRY, XS)
    with pytest.raises(LayerError, match="the cell has 2 states, was given 1"):
        testing.assert_batch_invariant(cells.LSTMCell(D, H), (CARRY,), XS)


@pytest.mark.exhaustive
@settings(max_examples=4)
@given(testing.nets(max_ops=5))
def test_gradients_of_drawn_nets_agree(drawn):
    net, blobs = drawn
    testing.assert_gradients_agree(net, blobs, max_elements=2)


@settings(max_examples=50)
@given(testing.lengths(5, 7))
def test_drawn_lengths_fit(n):
    assert n.dtype == np.int32 and n.shape == (5,)
    assert (n >= 0).all() and (n <= 7).all()


def test_strategies_without_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match="need hypothesis: pip install hypothesis"):
        testing.lengths(2, 3)
