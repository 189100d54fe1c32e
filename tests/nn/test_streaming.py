"""Chunks with the state carried, steps for serving, the states of every step, and what masks of dropout are drawn for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx

from jrnn import models, nn
from jrnn.errors import LayerError
from jrnn.nn import functional

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
X = np.random.RandomState(0).standard_normal((10, 3, 2)).astype(np.float32)


def close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 5, 20])
def test_chunks_compute_what_the_whole_does(kind, size):
    @nnx.jit
    def pairs(module):
        _, hx = module(X)
        compared = [(nn.chunked(module, X, size=size), module(X))]
        for lengths in (None, jnp.array([10, 0, 4])):
            compared.append(
                (
                    nn.chunked(module, X, hx, size=size, lengths=lengths),
                    module(X, hx, lengths=lengths),
                )
            )
        return compared

    close(*zip(*pairs(KINDS[kind](2, 4, num_layers=2, rngs=nnx.Rngs(0)))))


@pytest.mark.exhaustive
def test_chunks_cut_gradients_and_nothing_else():
    module = nn.LSTM(2, 4, batch_first=True, rngs=nnx.Rngs(0))
    x, graph = np.swapaxes(X, 0, 1), nnx.split(module)
    weigh = np.random.RandomState(1).standard_normal((3, 10, 4)).astype(np.float32)

    def by_chunks(params, hx):
        return jnp.sum(nn.chunked(nnx.merge(graph[0], params), x, hx, size=4)[0] * weigh)

    def by_hand(params, hx):
        total = 0.0
        for start in (0, 4, 8):
            output, hx = nnx.merge(graph[0], params)(x[:, start : start + 4], hx)
            total += jnp.sum(output * weigh[:, start : start + 4])
            hx = jax.lax.stop_gradient(hx)
        return total

    hx = jax.tree.map(jnp.ones_like, module.initial_state(3))
    actual = jax.jit(jax.grad(by_chunks, argnums=(0, 1)))(graph[1], hx)
    expected = by_numpy(jax.grad(by_hand, argnums=(0, 1)))(graph[1], hx)
    close(actual, expected)
    assert all(np.any(g) for g in actual[1])
    whole = by_numpy(
        jax.grad(lambda params: jnp.sum(nnx.merge(graph[0], params)(x, hx)[0] * weigh))
    )(graph[1])
    assert float(jnp.abs(whole.weight_hh_l0[...] - actual[0].weight_hh_l0[...]).max()) > 1e-3


def test_what_cannot_go_in_chunks_is_named():
    with pytest.raises(
        LayerError, match="GRU: chunked: a bidirectional stack needs the whole sequence"
    ):
        nn.chunked(nn.GRU(2, 4, bidirectional=True, rngs=nnx.Rngs(0)), X, size=2)
    with pytest.raises(LayerError, match="size is 0; it must be an integer of at least 1"):
        nn.chunked(nn.GRU(2, 4, rngs=nnx.Rngs(0)), X, size=0)
    noisy = nn.GRU(2, 4, recurrent_dropout=0.5, rngs=nnx.Rngs(0))
    first, again = (nn.chunked(noisy, X, size=4)[0] for _ in range(2))
    assert float(jnp.abs(first - again).max()) > 0.01


def test_a_compiled_step_streams():
    module = nn.LSTM(2, 4, num_layers=2, zoneout=0.1, rngs=nnx.Rngs(0))
    module.eval()
    step, state = nn.compiled_step(module), module.initial_state(3)
    for x in X:
        y, state = step(x, state)
    output, last = by_numpy(lambda x: module(x))(X)
    close((y, state), (output[-1], last))
    y, _ = step(X[0, 0])
    close(y, by_numpy(lambda x: module(x))(X[:1, 0])[0][0])
    with pytest.raises(LayerError, match="it has no step"):
        nn.compiled_step(nn.LSTM(2, 4, bidirectional=True, rngs=nnx.Rngs(0)))


class Tagger(nnx.Module):
    def __init__(self):
        self.rnn, self.head = nn.GRU(2, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def step(self, x, state=None):
        y, state = self.rnn.step(x, state)
        return self.head(y), state


def test_a_compiled_step_of_a_model_streams():
    config = {
        "model_type": "mamba",
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "state_size": 2,
    }
    language, tagger, token = models.create(config, jax.random.key(0)), Tagger(), jnp.array([3])
    for model, x, first in ((language, token, language.initial_state(1)), (tagger, X[0], None)):
        step = nn.compiled_step(model)
        y, state = step(x, first)
        close(step(x, state), model.step(x, model.step(x, first)[1]))
    step, first = nn.compiled_step(language, donate=True), language.initial_state(1)
    _, state = step(token, first)
    assert all(leaf.is_deleted() for leaf in first.values()) and not any(
        leaf.is_deleted() for leaf in state.values()
    )
    for neither in (nn.LSTMCell(2, 4, rngs=nnx.Rngs(0)), nn.GRU, {"step": 1}, None):
        with pytest.raises(LayerError, match="compiled_step takes a layer of jrnn.nn, or a model"):
            nn.compiled_step(neither)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_all_states_are_those_after_every_step(kind):
    lengths = jnp.array([10, 0, 6])

    @nnx.jit
    def runs(module):
        _, hx = module(X)
        return hx, [
            module(X, hx, lengths=lengths, return_states=which)
            for which in ("last", "all", "all+initial")
        ]

    hx, results = runs(KINDS[kind](2, 4, num_layers=2, bidirectional=True, rngs=nnx.Rngs(0)))
    (plain, last), (output, states), (_, more) = results
    close(output, plain)
    for all_, with_initial, final, start in zip(
        *map(jax.tree.leaves, (states, more, last, hx)), strict=True
    ):
        assert all_.shape == (10, 4, 3, 4) and with_initial.shape == (11, 4, 3, 4)
        close((with_initial[1:, ::2], with_initial[:-1, 1::2]), (all_[:, ::2], all_[:, 1::2]))
        close((with_initial[0, ::2], with_initial[-1, 1::2]), (start[::2], start[1::2]))
        close((all_[-1, ::2], all_[0, 1::2]), (final[::2], final[1::2]))
        close(
            all_[6:, 1::2, 2], jnp.broadcast_to(start[1::2, 2], (4, 2, 4))
        )  # a reverse direction has not begun yet
    top = jax.tree.leaves(states)[0][:, 2:]  # h of the last layer's directions
    live = (jnp.arange(10)[:, None] < lengths[None])[..., None]
    close(output, jnp.where(live, jnp.concatenate([top[:, 0], top[:, 1]], -1), 0))


def test_all_states_of_a_prefix_are_its_last_states():
    params = nn.LSTM(2, 4, rngs=nnx.Rngs(0)).params()
    _, (h, c) = functional.lstm(params, X, return_states="all")
    for t in (1, 6):
        close((h[t - 1], c[t - 1]), functional.lstm(params, X[:t])[1])
    _, (h, c) = functional.lstm(params, X[:, 0], return_states="all")
    assert h.shape == c.shape == (10, 1, 4)
    with pytest.raises(
        LayerError, match="lstm: return_states is 'every'; it must be 'last' or 'all' or 'all"
    ):
        functional.lstm(params, X, return_states="every")


def carrying(size):
    """Parameters of a relu layer that hands on its input, or where that is zero, its state."""
    return {"weight_ih_l0": jnp.eye(size), "weight_hh_l0": jnp.eye(size)}


def test_masks_of_dropout_are_for_a_step_or_for_a_sequence():
    params = carrying(16) | {"weight_ih_l1": jnp.eye(16), "weight_hh_l1": jnp.zeros((16, 16))}
    x = (
        jnp.zeros((8, 4, 16)).at[0].set(1.0)
    )  # the first layer holds 1, the second shows what reaches it

    def run(name):
        key = jax.random.key(0)
        return functional.rnn(
            params, x, nonlinearity="relu", dropout=0.5, dropout_mask=name, key=key
        )[0]

    sequence, step = run("sequence"), run("step")
    assert set(np.unique(sequence)) == set(np.unique(step)) == {0.0, 2.0}
    np.testing.assert_array_equal(sequence, jnp.broadcast_to(sequence[:1], sequence.shape))
    assert (np.asarray(step[1:] != step[:-1]).mean() > 0.3).all()


def test_recurrent_masks_are_for_a_sequence_or_for_a_step():
    x, h = jnp.zeros((8, 4, 16)), jnp.ones((1, 4, 16))

    def kept(name):
        settings = {
            "recurrent_dropout": 0.5,
            "recurrent_dropout_mask": name,
            "nonlinearity": "relu",
        }
        return float(
            (functional.rnn(carrying(16), x, h, key=jax.random.key(1), **settings)[1] > 0).mean()
        )

    assert 0.3 < kept("sequence") < 0.7  # a unit that its mask keeps is kept at every step
    assert kept("step") < 0.1  # and at half of 8 steps, in all of them rarely
    with pytest.raises(
        LayerError, match="dropout_mask is 'batch'; it must be 'step' or 'sequence'"
    ):
        nn.RNN(2, 4, dropout_mask="batch", rngs=nnx.Rngs(0))


@pytest.mark.exhaustive
def test_many_series_with_weights_of_their_own_are_one_vmap():
    modules = [nn.GRU(2, 4, rngs=nnx.Rngs(k)) for k in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(m.params() for m in modules))
    outputs = jax.vmap(functional.gru)(stacked, jnp.swapaxes(X, 0, 1))[0]
    for k, module in enumerate(modules):
        close(outputs[k], module(X[:, k])[0])
