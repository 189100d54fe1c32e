"""Models of residual blocks: every cell by its name, with carried states, lengths, and a whole run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.errors import ConfigError
from jrnn.train.models import Compute, Signature
from jrnn.train.models.blocks import CELLS, BlocksModel
from jrnn.train.models.nn import NnConfig, TokenNnConfig, nn_model
from jrnn.train.tasks.task import Examples
from jrnn.train.text_streams import TextChunk

T, B, D, CLASSES, H = 4, 3, 2, 5, 4
LANGUAGE = Signature(True, CLASSES, CLASSES, every_step=True, loss="cross_entropy", carried=True)
CLASSIFY = Signature(
    False, D, CLASSES, every_step=False, loss="cross_entropy", carried=False, lengths=True
)
pytestmark = pytest.mark.usefixtures("little_optimization")


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS)
def test_the_state_is_carried_from_chunk_to_chunk(cell):
    tokens = np.random.default_rng(0).integers(0, CLASSES, (T + 1, B)).astype(np.int32)
    model = nn_model(TokenNnConfig(cell=cell, embedding=3, hidden=H, layers=2, heads=2), LANGUAGE)
    params, start = jax.jit(model.init)(jax.random.key(0)), model.initial_carry(B)
    predict = jax.jit(model.predict)
    logits, end = predict(params, start, TextChunk(tokens[:-1], None, True))
    first, between = predict(params, start, TextChunk(tokens[:2], None, True))
    second, last = predict(params, between, TextChunk(tokens[2:4], None, False))
    np.testing.assert_allclose(jnp.concatenate([first, second]), logits, atol=1e-5)
    assert {name: leaf.shape for name, leaf in last.items()} == {
        name: leaf.shape for name, leaf in start.items()
    }
    assert all(leaf.shape[1] == B for leaf in start.values())
    for name, leaf in last.items():
        np.testing.assert_allclose(leaf, end[name], atol=1e-5)
    loss, _, gradients = jax.jit(model.gradients)(
        params, start, TextChunk(tokens[:-1], tokens[1:], True), jax.random.key(1)
    )
    assert np.isfinite(loss) and all(np.isfinite(leaf).all() for leaf in gradients.values())


@pytest.mark.exhaustive
def test_the_last_valid_step_is_read():
    inputs = np.random.default_rng(0).standard_normal((T, B, D)).astype(np.float32)
    lengths = np.array([4, 1, 2], np.int32)
    model = nn_model(NnConfig(cell="min_gru", hidden=H), CLASSIFY, Compute(precision="bfloat16"))
    params = model.init(jax.random.key(0))
    predict = jax.jit(model.predict)
    logits, carry = predict(params, {}, Examples(inputs, None, lengths=lengths))
    assert logits.shape == (B, CLASSES) and carry == {}
    for n, length in enumerate(lengths):
        alone, _ = predict(
            params, {}, Examples(inputs[:length, n : n + 1], None, lengths=lengths[n : n + 1])
        )
        np.testing.assert_allclose(logits[n], alone[0], atol=0.05)


def test_keys_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="model.heads must divide model.hidden"):
        NnConfig(cell="mamba2", hidden=6, heads=4)
    with pytest.raises(ConfigError, match="model.bidirectional is for the cells lstm, gru, rnn"):
        NnConfig(cell="mamba2", bidirectional=True)
    with pytest.raises(ConfigError, match="needs a model that is a net"):
        BlocksModel(NnConfig(cell="s5"), CLASSIFY, Compute(gradient="net"))
