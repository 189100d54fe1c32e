"""Tokens whose input projection is looked up: the same losses and gradients as embedding every token first."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jrnn.train.check import GradientCheck
from jrnn.train.models import Compute, Signature
from jrnn.train.models.cells import TokenCellsConfig, cells_model
from jrnn.train.text import Chunk

T, B, V = 4, 3, 5
CONFIG = TokenCellsConfig(embedding=3, hidden=4)
EMBEDDING_FIRST = Signature(True, V, V, every_step=True, loss="cross_entropy", carried=True)
LOOKED_UP = replace(EMBEDDING_FIRST, tokens_of_a_batch=T * B)


@pytest.fixture
def batch():
    tokens = np.random.default_rng(0).integers(0, V, (T + 1, B)).astype(np.int32)
    return Chunk(tokens[:-1], tokens[1:], np.asarray(True))


def has_lookup(model):
    return any(op.outputs[0].endswith("looked_up") for op in model.net.ops)


@pytest.mark.grid(every=3)
@pytest.mark.parametrize("source", ["jax", "net"])
@pytest.mark.parametrize("cell, layers", [("lstm", 1), ("gru", 2)])
def test_results_are_those_of_embedding_every_token(cell, layers, source, batch):
    config = replace(CONFIG, cell=cell, layers=layers)
    models = [cells_model(config, s, Compute(source)) for s in (EMBEDDING_FIRST, LOOKED_UP)]
    assert [has_lookup(m) for m in models] == [False, True]
    params = models[0].init(jax.random.key(0))
    assert {n: p.shape for n, p in models[1].init(jax.random.key(0)).items()} == {n: p.shape for n, p in params.items()}
    carry = jax.tree.map(lambda a: a + 0.5, models[0].initial_carry(B))
    first, second = (m.gradients(params, carry, batch, None) for m in models)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), first, second)


def test_both_gradients_agree(batch):
    model = cells_model(replace(CONFIG, dropout=0.5, recurrent_dropout=0.3), LOOKED_UP)
    for name, (size, difference) in GradientCheck(model, B).compare(model.init(jax.random.key(1)), batch).items():
        assert difference <= 1e-12 * max(size, 1), name


def test_tokens_are_embedded_first_where_a_lookup_saves_nothing():
    assert not has_lookup(cells_model(CONFIG, replace(LOOKED_UP, tokens_of_a_batch=V)))
    assert not has_lookup(cells_model(replace(CONFIG, embedding_dropout=0.1), LOOKED_UP))


def test_recurrent_dropout_acts_in_training_alone(batch):
    model = cells_model(replace(CONFIG, layers=2, recurrent_dropout=0.5), LOOKED_UP)
    params = model.init(jax.random.key(0))
    carry = jax.tree.map(lambda a: a + 0.5, model.initial_carry(B))
    key = jax.random.key(3)
    evaluated, again, trained = (float(model.loss(params, carry, batch, k)[0]) for k in (None, None, key))
    assert evaluated == again != trained == float(model.loss(params, carry, batch, key)[0])
