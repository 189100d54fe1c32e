"""What padding holds shows nowhere, bit for bit; a sequence's results do not depend on its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import nn
from jrnn.nn import units

T, N, D, H = 5, 4, 3, 4
LENGTHS = np.array([3, 0, 5, 1])
UNITS = {"rnn": units.RNN_TANH, "lstm": units.LSTM, "gru": units.GRU}
EXTRAS = {
    "plain": ({"num_layers": 1}, {}),
    "everything": ({"layer_norm": True}, {"dropout": 0.3, "recurrent_dropout": 0.3, "zoneout": 0.3}),
}


def make(kind, num_layers=2, bidirectional=True, **settings):
    layout = nn.Layout(UNITS[kind], D, H, num_layers=num_layers, bidirectional=bidirectional, **settings)
    params = layout.init(jax.random.key(0))
    rows = num_layers * (2 if bidirectional else 1)
    states = tuple(jax.random.normal(jax.random.key(k), (rows, N, H)) for k in range(UNITS[kind].states))
    return getattr(nn.functional, kind), params, states if len(states) == 2 else states[0]


def padded(value, lengths=LENGTHS):
    x = np.array(jax.random.normal(jax.random.key(9), (T, N, D)))
    x[np.arange(T)[:, None] >= lengths[None, :]] = value
    return x


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("kind", UNITS)
def test_padding_shows_nowhere(kind, extras):
    made, settings = EXTRAS[extras]
    function, params, hx = make(kind, **made)
    key = jax.random.key(3) if settings else None

    @jax.jit
    def everything(params, x, hx, lengths):
        def loss(params, x, hx):
            results = function(params, x, hx, lengths=lengths, key=key, **settings)
            return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(results)), results

        (_, results), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, hx)
        return results, grads

    for lengths in (LENGTHS, np.full(N, T), np.zeros(N, int), np.ones(N, int)):
        expected = jax.tree.leaves(everything(params, padded(0.0, lengths), hx, lengths))
        assert all(np.isfinite(leaf).all() for leaf in expected)
        for value in (np.nan, np.inf, -np.inf, 1e30):
            found = jax.tree.leaves(everything(params, padded(value, lengths), hx, lengths))
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("kind", UNITS)
def test_past_its_end_a_sequence_gives_zeros_and_holds_its_state(kind):
    function, params, hx = make(kind)
    output, last = function(params, padded(np.nan), hx, lengths=LENGTHS)
    assert not np.asarray(output)[np.arange(T)[:, None] >= LENGTHS[None, :]].any()
    for end, start in zip(jax.tree.leaves(last), jax.tree.leaves(hx), strict=True):
        np.testing.assert_array_equal(end[:, 1], start[:, 1])  # of length 0


@pytest.mark.parametrize("kind", UNITS)
def test_a_sequence_is_independent_of_its_batch(kind):
    function, params, hx = make(kind)
    x = padded(0.0)
    output, last = function(params, x, hx, lengths=LENGTHS)
    for n, length in enumerate(LENGTHS):
        state = jax.tree.map(lambda leaf, n=n: leaf[:, n], hx)
        alone, alone_last = function(params, x[:length, n], state)
        np.testing.assert_allclose(output[:length, n], alone, atol=1e-6)
        for found, expected in zip(jax.tree.leaves(last), jax.tree.leaves(alone_last), strict=True):
            np.testing.assert_allclose(found[:, n], expected, atol=1e-6)


def test_one_program_serves_all_lengths():
    function, params, hx = make("lstm", num_layers=1)
    traced = []

    @jax.jit
    def run(x, lengths):
        traced.append(1)
        return function(params, x, hx, lengths=lengths)[0], nn.pack_padded_sequence(x, lengths, enforce_sorted=False)

    for lengths in (LENGTHS, LENGTHS[::-1].copy(), np.zeros(N, int)):
        run(padded(0.0), lengths)
    assert len(traced) == 1
