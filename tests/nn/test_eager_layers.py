"""Layers outside of `jax.jit` are compiled once for each structure and shape, with gradients, whatever module holds them."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from flax import nnx

from jrnn import nn
from jrnn.errors import LayerError
from jrnn.nn.recurrent import RecurrentLayer

X = jnp.sin(jnp.arange(5 * 2 * 4, dtype=jnp.float32)).reshape(5, 2, 4)
LENGTHS, RESETS = jnp.array([5, 2]), jnp.arange(10).reshape(5, 2) % 3 == 0
close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
)


def rnn(p, h, x):
    h = jnp.tanh(x @ p["w"].T + p["u"][None] * h)
    return h, h


def layer_of(step):
    start = {"w": jnp.ones((3, 4)) / 5, "u": jnp.full(3, 0.5)}
    return nn.Recurrent(step, 4, lambda n: jnp.zeros((n, 3)), start, rngs=nnx.Rngs(0))


def make(name, seed=0):
    if name == "Recurrent":
        return layer_of(rnn)
    options = {"num_heads": 2} if name in ("MLSTM", "RetNet") else {}
    hidden = (4,) if name in ("RNN", "LSTM", "GRU") else ()
    return getattr(nn, name)(4, *hidden, **options, rngs=nnx.Rngs(seed))


def loss(layer, x, **options):
    return jnp.sum(jnp.sin(layer(x, **options)[0]))


CALLS = {
    "value": lambda layer: layer(X),
    "lengths and resets": lambda layer: layer(X, lengths=LENGTHS, resets=RESETS),
    "gradient": lambda layer: nnx.grad(functools.partial(loss, x=X, lengths=LENGTHS))(layer),
}


@pytest.mark.sample("lengths and resets-LSTM", "gradient-MinGRU", "value-Recurrent")
@pytest.mark.parametrize(
    "name", ["RNN", "LSTM", "GRU", "MinGRU", "LRU", "MLSTM", "RetNet", "Recurrent"]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_second_call_compiles_nothing(call, name):
    layer = make(name)
    first = CALLS[call](layer)
    close(nnx.state(first) if call == "gradient" else first, nnx.jit(CALLS[call])(layer))
    with compilations() as compiled:
        again = CALLS[call](layer)
    assert not compiled
    close(
        nnx.state(first) if call == "gradient" else first,
        nnx.state(again) if call == "gradient" else again,
    )


def test_layers_of_one_structure_share_a_program():
    params, others = (make("LSTM", seed).params() for seed in (0, 1))
    x = X * 2
    first = nn.functional.lstm(params, x)[0]
    with compilations() as compiled:
        second = nn.functional.lstm(others, x)[0]
    assert not compiled and not jnp.allclose(first, second)


def test_what_is_set_later_counts():
    layer = make("MinGRU")
    y, _ = layer(X)
    layer.weight_z.set_value(layer.weight_z[...] * 2)
    assert not jnp.allclose(layer(X)[0], y)
    rows = make("MinGRU")
    rows.batch_first = True
    close(rows(jnp.swapaxes(X, 0, 1))[0], jnp.swapaxes(y, 0, 1))


def test_masks_of_each_call_are_drawn_anew():
    layer = nn.LSTM(4, 4, recurrent_dropout=0.5, rngs=nnx.Rngs(0))
    first = layer(X)[0]
    with compilations() as compiled:
        second = layer(X)[0]
    assert not compiled and not jnp.allclose(first, second)


def test_lengths_are_checked_in_every_call():
    layer = make("GRU")
    layer(X, lengths=[5, 2])
    for _ in range(2):
        with pytest.raises(LayerError, match="lengths.0. is 6"):
            layer(X, lengths=[6, 2])


def test_a_layer_with_parts_of_its_own_is_run_itself():
    class WithPart(RecurrentLayer):
        def __init__(self, rngs):
            self.part = nnx.Linear(4, 4, rngs=rngs)
            super().__init__(4, 4, rngs=rngs)

        def _fresh(self, batch, dtype):
            return jnp.zeros((batch, 4), dtype)

        def _run(self, params, x, state, span):
            state, y = span.scan(lambda h, x: ((h := jnp.tanh(h + self.part(x))), h), state, x)
            return y, state

    layer = WithPart(nnx.Rngs(0))
    y, _ = layer(X)
    layer.part.kernel.set_value(layer.part.kernel[...] * 2)
    assert y.shape == X.shape and not jnp.allclose(layer(X)[0], y)


def test_a_step_is_freed_with_its_layer():
    def run():
        weights = jnp.ones((1, 3))
        layer = layer_of(lambda p, h, x: rnn(p, h * weights, x))
        layer(X)
        nnx.grad(functools.partial(loss, x=X))(layer)
        return weakref.ref(weights)

    weights = run()
    gc.collect()
    assert weights() is None
