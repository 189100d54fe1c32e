"""Models made of jrnn.nn's layers: they are what jrnn.nn computes, from the first values that are asked for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.errors import ConfigError
from jrnn.nn import functional
from jrnn.train.config import Config
from jrnn.train.models import Compute, Signature
from jrnn.train.models.nn import NnConfig, NnModel, TokenNnConfig
from jrnn.train.tasks.task import Examples
from jrnn.train.text_streams import TextChunk
from jrnn.train.toml_codec import decode

T, B, D, CLASSES, H = 4, 3, 2, 5, 4
CLASSIFY = Signature(
    False, D, CLASSES, every_step=False, loss="cross_entropy", carried=False, lengths=True
)
LANGUAGE = Signature(True, CLASSES, CLASSES, every_step=True, loss="cross_entropy", carried=True)


@pytest.fixture
def batch():
    inputs = np.random.default_rng(0).standard_normal((T, B, D)).astype(np.float32)
    return Examples(inputs, np.array([0, 4, 2], np.int32), lengths=np.array([4, 1, 2], np.int32))


@pytest.fixture
def chunk():
    tokens = np.random.default_rng(0).integers(0, CLASSES, (T + 1, B)).astype(np.int32)
    return TextChunk(tokens[:-1], tokens[1:], np.asarray(True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cell", "bidirectional"), [("lstm", True), ("gru", False), ("rnn", True)])
def test_the_last_states_of_all_directions_are_read(cell, bidirectional, batch):
    model = NnModel(NnConfig(cell=cell, hidden=H, layers=2, bidirectional=bidirectional), CLASSIFY)
    params = model.init(jax.random.key(0))
    layers = {name: value for name, value in params.items() if not name.startswith("output_")}
    _, states = jax.jit(getattr(functional, cell))(layers, batch.inputs, lengths=batch.lengths)
    h = (states[0] if cell == "lstm" else states).reshape(2, -1, B, H)[
        -1
    ]  # of the upper layer, by direction
    expected = np.concatenate(h, axis=-1) @ params["output_w"].T + params["output_b"][None]
    logits, carry = jax.jit(model.predict)(params, {}, batch)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert carry == {}
    loss, _ = model.loss(params, {}, batch, None)
    picked = jax.nn.log_softmax(expected)[np.arange(B), batch.targets]
    np.testing.assert_allclose(loss, -picked.mean(), rtol=1e-5)


@pytest.mark.exhaustive("lstm")
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_carried_state_makes_two_chunks_one(cell, chunk):
    model = NnModel(TokenNnConfig(cell=cell, embedding=3, hidden=H, layers=2), LANGUAGE)
    params, start = model.init(jax.random.key(0)), model.initial_carry(B)
    of = jax.jit(model.loss)  # which gives the carry its names in alphabetical order
    loss, end = of(params, start, chunk, None)
    first, between = of(params, start, TextChunk(chunk.tokens[:2], chunk.targets[:2], True), None)
    second, end_again = of(
        params, between, TextChunk(chunk.tokens[2:], chunk.targets[2:], False), None
    )
    np.testing.assert_allclose((first + second) / 2, loss, rtol=1e-6)
    assert set(end) == ({"h", "c"} if cell == "lstm" else {"h"})
    for name in end:
        np.testing.assert_allclose(end_again[name], end[name], rtol=1e-5, atol=1e-7)


def test_the_gates_start_open():
    lstm = NnModel(NnConfig(hidden=H, forget_bias=2.0), CLASSIFY).init(jax.random.key(0))
    total = lstm["bias_ih_l0"] + lstm["bias_hh_l0"]
    np.testing.assert_array_equal(total[H : 2 * H], 2.0)  # the forget gate, exactly
    assert jnp.abs(total[:H]).max() <= 0.5  # the others as PyTorch draws them


@pytest.mark.exhaustive("lstm")
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_memory_is_the_chrono_initialization(cell):
    """The gate that keeps the state has the bias log u, u in [1, memory - 1]; an LSTM's input gate the opposite."""
    params = NnModel(NnConfig(cell=cell, hidden=400, layers=2, memory=50), CLASSIFY).init(
        jax.random.key(0)
    )
    for layer in range(2):
        total = params[f"bias_ih_l{layer}"] + params[f"bias_hh_l{layer}"]
        keep = np.exp(total[400:800])
        assert 1 <= keep.min() < 3 and 46 < keep.max() <= 49.01
        assert abs(keep.mean() - 25) < 2
        if cell == "lstm":
            np.testing.assert_array_equal(total[:400], -total[400:800])
    assert (params["bias_ih_l0"] != params["bias_ih_l1"]).all()


@pytest.mark.sample("embedding_dropout")
@pytest.mark.parametrize("where", ["dropout", "layer_dropout", "embedding_dropout"])
def test_dropout_acts_in_training_alone(where, chunk):
    plain = TokenNnConfig(embedding=3, hidden=H, layers=2)
    model = NnModel(replace(plain, **{where: 0.5}), LANGUAGE)
    params, carry = model.init(jax.random.key(0)), model.initial_carry(B)
    loss = jax.jit(model.loss)
    without, _ = jax.jit(NnModel(plain, LANGUAGE).loss)(params, carry, chunk, None)
    np.testing.assert_allclose(loss(params, carry, chunk, None)[0], without, rtol=1e-6)
    losses = [float(loss(params, carry, chunk, jax.random.key(k))[0]) for k in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.exhaustive
def test_bfloat16_leaves_parameters_states_and_loss_in_float32(chunk):
    model = NnModel(TokenNnConfig(embedding=8, hidden=8), LANGUAGE)
    params, carry = model.init(jax.random.key(0)), model.initial_carry(B)
    narrow = replace(model, compute=Compute(precision="bfloat16"))
    wide, outcome = (jax.jit(m.gradients)(params, carry, chunk, None) for m in (model, narrow))
    assert {str(x.dtype) for x in jax.tree.leaves(outcome)} == {"float32"}
    np.testing.assert_allclose(outcome.loss, wide.loss, rtol=0.01)
    assert outcome.loss != wide.loss


@pytest.mark.parametrize(
    ("config", "signature", "compute", "message"),
    [
        (NnConfig(), CLASSIFY, Compute("net"), "needs a model that is a net"),
        (
            TokenNnConfig(bidirectional=True),
            LANGUAGE,
            Compute(),
            "model.bidirectional must be false if the state is carried",
        ),
    ],
)
def test_what_it_cannot_do(config, signature, compute, message):
    with pytest.raises(ConfigError, match=message):
        NnModel(config, signature, compute)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 2}, "model.memory must be 0 or above 2"),
        ({"memory": 9, "cell": "rnn"}, "model.memory is for gates"),
        ({"layer_dropout": -0.1}, "model.layer_dropout must lie in"),
        (
            {"layer_dropout": 0.1},
            "model.layer_dropout acts between layers; with model.layers = 1 it must be 0",
        ),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        decode(Config, {"model": {"kind": "nn", **change}}, "c.toml")
