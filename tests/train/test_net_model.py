"""The character model as a net: its two gradients, its carried state, and its predictions hang together."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.errors import GradientError
from jrnn.nets import registry
from jrnn.train.disagreements import GradientCheck
from jrnn.train.models import Compute, Signature
from jrnn.train.models.cells import TokenCellsConfig, cells_model
from jrnn.train.text_streams import TextChunk

CHARACTERS = 7
LANGUAGE = Signature(
    True, CHARACTERS, CHARACTERS, every_step=True, loss="cross_entropy", carried=True
)


@pytest.fixture(scope="module")
def model():
    return cells_model(TokenCellsConfig(embedding=3, hidden=5, layers=2), LANGUAGE)


def chunk(steps, streams, seed=0):
    tokens = (
        np.random.default_rng(seed).integers(0, CHARACTERS, (steps + 1, streams)).astype(np.int32)
    )
    return TextChunk(tokens[:-1], tokens[1:], np.asarray(True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [1, 2])
def test_both_gradients_agree_in_float64(layers):
    model = cells_model(TokenCellsConfig(embedding=3, hidden=5, layers=layers), LANGUAGE)
    params = model.init(jax.random.key(0))
    compared = GradientCheck(model, 3).compare(params, chunk(6, 3))
    assert set(compared) == set(params)
    for name, (size, difference) in compared.items():
        assert size > 1e-4, name
        assert difference < 1e-14, name


@pytest.mark.exhaustive
def test_the_net_gradient_trains_alike_in_float32(model):
    params = model.init(jax.random.key(0))
    carry = jax.tree.map(lambda z: z + 0.1, model.initial_carry(3))
    by_jax = model.gradients(params, carry, chunk(6, 3), None)
    by_net = replace(model, compute=Compute("net")).gradients(params, carry, chunk(6, 3), None)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), by_jax, by_net
    )


@pytest.mark.exhaustive
def test_a_wrong_gradient_operator_is_caught(model, monkeypatch):
    right = registry.lookup("LSTMUnitGradient")

    def wrong(*blobs, **kwargs):
        dh, *rest = right.forward(*blobs, **kwargs)
        return (dh * 1.0, rest[0], rest[1] * 1.001)

    monkeypatch.setitem(registry._OPS, "LSTMUnitGradient", replace(right, forward=wrong))
    with pytest.raises(GradientError) as e:
        GradientCheck(model, 3)(model.init(jax.random.key(0)), chunk(6, 3))
    marked = [line.split()[0] for line in str(e.value).splitlines() if line.endswith("<-")]
    assert "embedding" in marked
    assert "output_w" not in marked  # its gradient does not pass through the LSTM


@pytest.mark.exhaustive
def test_carried_state_makes_two_chunks_one(model):
    params = model.init(jax.random.key(0))
    whole = chunk(8, 3)
    halves = [
        TextChunk(whole.tokens[s], whole.targets[s], whole.fresh) for s in (slice(4), slice(4, 8))
    ]
    start = model.initial_carry(3)
    loss, end = model.loss(params, start, whole, None)
    first, between = model.loss(params, start, halves[0], None)
    second, end_again = model.loss(params, between, halves[1], None)
    np.testing.assert_allclose((first + second) / 2, loss, rtol=1e-6)
    for name in end:
        np.testing.assert_allclose(end_again[name], end[name], rtol=1e-5, atol=1e-7)


@pytest.mark.exhaustive
def test_predictions_explain_the_loss(model):
    params = model.init(jax.random.key(1))
    data = chunk(5, 2)
    logits, carry = model.predict(
        params, model.initial_carry(2), TextChunk(data.tokens, None, data.fresh)
    )
    assert logits.shape == (5, 2, CHARACTERS)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), data.targets[..., None], axis=-1)
    loss, carry_again = model.loss(params, model.initial_carry(2), data, None)
    np.testing.assert_allclose(-picked.mean(), loss, rtol=1e-6)
    for name in carry:
        np.testing.assert_array_equal(carry[name], carry_again[name])


def test_parameters_are_functions_of_the_key(model):
    first, again, other = (model.init(jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first["output_w"], again["output_w"])
    assert (first["output_w"] != other["output_w"]).any()
    assert first["lstm/layer_0/gates_t_w"].shape == (20, 5)
