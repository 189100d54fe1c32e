"""The stacked GRU: its hand-written gradient equals JAX's, and both equal jrnn.nn.GRU on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

from jrnn import interop, nn
from jrnn.errors import LayerError
from jrnn.nn import stacked_gru as gru

T, N, D, H = 4, 3, 2, 5


def normal(seed, *shape):
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape))


def make(layers):
    return gru.StackWeights(
        normal(0, 3 * H, D),
        normal(1, layers - 1, 3 * H, H),
        normal(2, layers, 3 * H, H),
        normal(3, layers, 1, 3 * H),
        normal(4, layers, 1, 3 * H),
    )


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_cell_gradient_equals_jax(x64):
    x, h, d = normal(5, N, D), normal(6, N, H), normal(7, N, H)
    W3, U3, bW3, bU3 = make(1).layer(0)

    @by_numpy
    def runs():
        new, gates = gru.gru_cell_forward(x, W3, U3, bW3, bU3, h)
        gradients = gru.gru_cell_backward(d, x, h, W3, U3, gates)
        same, pull = jax.vjp(
            lambda x, h, *w: gru.gru_cell_inference(x, *w, h), x, h, W3, U3, bW3, bU3
        )
        return new, same, gradients, gru.CellGradients(*pull(d))

    new, same, actual, expected = runs()
    np.testing.assert_array_equal(same, new)
    close(actual, expected)


@pytest.mark.exhaustive("3")
@pytest.mark.parametrize("layers", [1, 3])
def test_stack_gradient_equals_jax(layers, x64):
    weights, x, hidden = make(layers), normal(5, T, N, D), normal(6, layers, N, H)
    d_output, d_hidden = normal(7, T, N, H), normal(8, layers, N, H)

    @by_numpy
    def by_jax():
        results, pull = jax.vjp(gru.gru_inference, x, weights, hidden)
        d_x, d_weights, d_start = pull((d_output, d_hidden))
        return results, (d_x, d_start, d_weights)

    @jax.jit
    def by_hand():
        output, last, cache = gru.gru_forward(x, weights, hidden)
        return (output, last), gru.gru_backward(d_output, d_hidden, weights, cache)

    close(by_hand(), by_jax())


@pytest.mark.exhaustive("3")
@pytest.mark.parametrize("layers", [1, 3])
def test_equals_the_module_on_the_same_weights(layers, x64):
    weights, x, hidden = make(layers), normal(5, T, N, D), normal(6, layers, N, H)
    params = interop.from_arraymancer(weights)

    @by_numpy
    def by_module(params, x, hidden):
        def loss(params, x, hidden):
            output, last = nn.functional.gru(params, x, hidden)
            return jnp.sum(output) + jnp.sum(last * last), (output, last)

        grads, results = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, hidden)
        return results, grads

    @jax.jit
    def by_hand(weights, x, hidden):
        output, last, cache = gru.gru_forward(x, weights, hidden)
        return (output, last), gru.gru_backward(jnp.ones_like(output), 2 * last, weights, cache)

    results, (d_params, d_x, d_hidden) = by_module(params, x, hidden)
    d_weights = gru.StackWeights(*map(jnp.asarray, interop.to_arraymancer(d_params)))
    close(by_hand(weights, x, hidden), (results, (d_x, d_hidden, d_weights)))


def test_sizes_that_do_not_fit_are_named():
    x, hidden = jnp.zeros((T, N, D)), jnp.zeros((2, N, H))
    shapes = [(3 * H, D), (1, 3 * H, H), (2, 3 * H, H), (2, 1, 3 * H), (2, 1, 3 * H)]
    weights = gru.StackWeights(*map(jnp.zeros, shapes))
    assert gru.gru_inference(x, weights, hidden)[0].shape == (T, N, H)
    with pytest.raises(LayerError, match=r"W3s0 is \[15, 2\] but must be \[15, 3\]"):
        gru.gru_inference(jnp.zeros((T, N, 3)), weights, hidden)
    with pytest.raises(LayerError, match=r"W3sN is \[1, 15, 5\] but must be \[0, 15, 5\]"):
        gru.gru_inference(x, weights, hidden[:1])
    with pytest.raises(
        LayerError, match=r"hidden is \[2, 3, 5\] but must be \[2, 4, 5\], as x is \[4, 4, 2\]"
    ):
        gru.gru_inference(jnp.zeros((T, 4, D)), weights, hidden)
    with pytest.raises(LayerError, match=r"they must be \[T, N, D\] and"):
        gru.gru_inference(x[0], weights, hidden)
    output, last, cache = gru.gru_forward(x, weights, hidden)
    with pytest.raises(
        LayerError,
        match=r"d_hidden is \[1, 3, 5\] but must be \[2, 3, 5\], as the cache is of 2 layers",
    ):
        gru.gru_backward(output, last[:1], weights, cache)
    cell = weights.layer(0)
    with pytest.raises(
        LayerError, match=r"x is \[3, 2\] and hidden \[1, 5\]; they must be \[N, D\] and \[N, H\]"
    ):
        gru.gru_cell_forward(x[0], *cell, hidden[0, :1])
    with pytest.raises(
        LayerError, match=r"W3 is \[15, 2\] but must be \[15, 1\], as x is \[3, 1\]"
    ):
        gru.gru_cell_inference(x[0, :, :1], *cell, hidden[0])
    with pytest.raises(LayerError, match=r"dnext is \[1, 5\] but must be \[3, 5\]"):
        gru.gru_cell_backward(
            hidden[0, :1],
            x[0],
            hidden[0],
            *cell[:2],
            gru.gru_cell_forward(x[0], *cell, hidden[0])[1],
        )
