"""Layers that look up the rows of an embedding: the values and gradients of `x = embedding[tokens]`."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx

from jrnn import jaxprs, nn
from jrnn.errors import LayerError
from jrnn.nn import functional

T, N, V, D, H = 7, 3, 5, 4, 6


def layer(kind, **options):
    return kind(D, H, num_layers=2, rngs=nnx.Rngs(0), **options)


@pytest.fixture
def table():
    return jax.random.normal(jax.random.key(1), (V, D))


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(2), (T, N), 0, V)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"layer_norm": True}, {"bidirectional": True}])
def test_values_and_gradients_are_those_of_the_rows(kind, options, table, tokens):
    module, lengths = layer(kind, **options), jnp.array([7, 0, 4])

    def loss(y, last):
        return jnp.sum(y * jnp.cos(y)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(last))

    def of_tokens(table):
        return loss(*module(tokens, lengths=lengths, embedding=table))

    def of_rows(table):
        return loss(*module(table[tokens], lengths=lengths))

    value, gradient = jax.jit(jax.value_and_grad(of_tokens))(table)
    other, wanted = by_numpy(jax.value_and_grad(of_rows))(table)
    np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=2e-5)  # float32


def products(fn, *arguments):
    """The shapes of all products of a function."""
    text = jax.jit(fn).lower(*arguments).as_text()
    return [
        line.rpartition("-> ")[2].strip() for line in text.splitlines() if "dot_general" in line
    ]


def test_the_product_with_the_input_is_made_once_for_each_row(table, tokens):
    """On CPUs, as these tests run: the loop and what precedes it have no product of all tokens."""
    gates = 4 * H
    lstm = nn.LSTM(D, H, rngs=nnx.Rngs(0))
    of_rows = products(lambda x, table: lstm(x, embedding=table)[0], tokens, table)
    assert any(f"tensor<{V}x{gates}xf32>" in shape for shape in of_rows)
    assert not any(
        f"tensor<{T}x{N}x{gates}xf32>" in shape or f"tensor<{T * N}x{gates}xf32>" in shape
        for shape in of_rows
    )
    many = jnp.ones((T * N, D))  # as many rows as tokens: nothing is saved
    assert not any(f"tensor<{T * N}x{gates}xf32>" in shape for shape in of_rows)
    assert products(lambda x, table: lstm(x, embedding=table)[0], tokens, many) == products(
        lambda x, table: lstm(table[x])[0], tokens, many
    )


def test_biases_are_added_once_for_each_row_and_gradients_are_not_copied(table, tokens):
    """The loop reads no bias, and what it reads is looked up with an axis for the one row."""
    params = nn.Layout(functional.LSTM, D, H).init(jax.random.key(0))
    loss = lambda params, table: jnp.sum(functional.lstm(params, tokens, embedding=table)[0])  # noqa: E731
    eqns = [
        *jaxprs.all_equations(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, table).jaxpr)
    ]
    loops = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    assert loops and not any(
        v.aval.shape in {(4 * H,), (1, 4 * H)} for eqn in loops for v in eqn.invars
    )
    (added,) = (e.params["dimension_numbers"] for e in eqns if e.primitive.name == "scatter-add")
    assert added.inserted_window_dims == ()


def test_places_from_the_end(table, tokens):
    lstm = nn.LSTM(D, H, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(
        lstm(tokens - V, embedding=table)[0], lstm(tokens, embedding=table)[0]
    )


def test_batch_first_and_one_sequence(table, tokens):
    lstm = nn.LSTM(D, H, batch_first=True, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        lstm(tokens.T, embedding=table)[0], lstm(table[tokens.T])[0], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        lstm(tokens[:, 0], embedding=table)[0], lstm(table[tokens[:, 0]])[0], rtol=1e-5, atol=1e-6
    )


def test_the_gradient_in_float64():
    """Against central differences, whose error is about 1e-9 here."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = nn.Layout(functional.LSTM, D, H).init(jax.random.key(0), jnp.float64)
        tokens, table = (
            jnp.asarray(rng.integers(0, 2, (3, 2))),
            jnp.asarray(rng.normal(size=(2, D))),
        )
        jax.test_util.check_grads(
            lambda params, table: functional.lstm(params, tokens, embedding=table)[0],
            (params, table),
            1,
            ["rev"],
            1e-7,
            1e-7,
        )


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (
            jnp.zeros((T, N, D)),
            jnp.zeros((V, D)),
            r"x is float32\[7, 3, 4\]; with embedding it must be integers",
        ),
        (
            jnp.zeros((T, N), int),
            jnp.zeros((V, D + 1)),
            r"embedding is \[5, 5\] but must be \[V, 4\]",
        ),
        (jnp.zeros((T, N), int), "rows", "embedding is of type str; it must be an array"),
        (
            nn.pack_padded_sequence(jnp.zeros((T, N, D)), [7, 5, 2]),
            jnp.zeros((V, D)),
            "give padded tokens",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(x, rows, message):
    with pytest.raises(LayerError, match=message):
        layer(nn.GRU)(x, embedding=rows)
