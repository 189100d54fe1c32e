"""What padding holds shows nowhere, bit for bit; a sequence's results do not depend on its neighbors."""

import jax
import numpy as np
import pytest

from jrnn import nn, testing
from jrnn.nn import units

T, N, D, H = 5, 4, 3, 4
LENGTHS = np.array([3, 0, 5, 1])
UNITS = {"rnn": units.RNN_TANH, "lstm": units.LSTM, "gru": units.GRU}
EXTRAS = {
    "plain": ({"num_layers": 1}, {}),
    "everything": (
        {"layer_norm": True},
        {"dropout": 0.3, "recurrent_dropout": 0.3, "zoneout": 0.3},
    ),
}


def normal(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def make(kind, num_layers=2, bidirectional=True, **settings):
    layout = nn.Layout(
        UNITS[kind], D, H, num_layers=num_layers, bidirectional=bidirectional, **settings
    )
    params = layout.init(jax.random.key(0))
    rows = num_layers * (2 if bidirectional else 1)
    states = tuple(normal(k, rows, N, H) for k in range(UNITS[kind].states))
    return getattr(nn.functional, kind), params, states if len(states) == 2 else states[0]


def padded(value, lengths=LENGTHS):
    x = normal(9, T, N, D)
    x[np.arange(T)[:, None] >= lengths[None, :]] = value
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("kind", UNITS)
def test_padding_shows_nowhere(kind, extras):
    options, settings = EXTRAS[extras]
    function, params, hx = make(kind, **options)
    key = jax.random.key(3) if settings else None

    def call(params, x, hx, lengths):
        return function(params, x, hx, lengths=lengths, key=key, **settings)

    testing.assert_padding_invariant(testing.Layer(call, params, padded(0.0), hx))


@pytest.mark.sample("gru")
@pytest.mark.parametrize("kind", UNITS)
def test_past_its_end_a_sequence_gives_zeros_and_holds_its_state(kind):
    function, params, hx = make(kind)
    output, last = function(params, padded(np.nan), hx, lengths=LENGTHS)
    assert not np.asarray(output)[np.arange(T)[:, None] >= LENGTHS[None, :]].any()
    for end, start in zip(jax.tree.leaves(last), jax.tree.leaves(hx), strict=True):
        np.testing.assert_array_equal(end[:, 1], start[:, 1])  # of length 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", UNITS)
def test_a_sequence_is_independent_of_its_batch(kind):
    function, params, hx = make(kind)

    def call(params, x, hx, lengths):
        return function(params, x, hx, lengths=lengths)

    layer = testing.Layer(call, params, padded(0.0), hx, state_axis=1)
    testing.assert_batch_invariant(layer, lengths=LENGTHS)


@pytest.mark.sample("gru")
@pytest.mark.parametrize("kind", UNITS)
def test_a_sequence_without_a_batch_is_that_of_a_batch(kind):
    function, params, hx = make(kind, num_layers=1)
    x = padded(0.0)
    output, last = function(params, x, hx, lengths=LENGTHS)
    n, length = 0, LENGTHS[0]
    alone, alone_last = function(params, x[:length, n], jax.tree.map(lambda leaf: leaf[:, n], hx))
    np.testing.assert_allclose(output[:length, n], alone, atol=1e-6)
    for actual, expected in zip(jax.tree.leaves(last), jax.tree.leaves(alone_last), strict=True):
        np.testing.assert_allclose(actual[:, n], expected, atol=1e-6)


def test_one_program_serves_all_lengths():
    function, params, hx = make("lstm", num_layers=1)
    traced = []

    @jax.jit
    def run(x, lengths):
        traced.append(1)
        return function(params, x, hx, lengths=lengths)[0], nn.pack_padded_sequence(
            x, lengths, enforce_sorted=False
        )

    for lengths in (LENGTHS, LENGTHS[::-1].copy(), np.zeros(N, int)):
        run(padded(0.0), lengths)
    assert len(traced) == 1
