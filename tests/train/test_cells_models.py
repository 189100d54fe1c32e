"""Models made of cells: any cell, both gradients, dropout in training alone, sequences of any length, bfloat16."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jrnn.errors import ConfigError
from jrnn.train.config import Config
from jrnn.train.disagreements import GradientCheck
from jrnn.train.models import Compute, Signature
from jrnn.train.models.cells import (
    AFFINE,
    LSTMS,
    OTHERS,
    CellsConfig,
    TokenCellsConfig,
    cells_model,
)
from jrnn.train.models.net import for_evaluation
from jrnn.train.tasks.task import Examples
from jrnn.train.text_streams import TextChunk
from jrnn.train.toml_codec import decode

T, B, D, CLASSES = 4, 3, 2, 5
CLASSIFY = Signature(
    False, D, CLASSES, every_step=False, loss="cross_entropy", carried=False, lengths=True
)
REGRESS = Signature(False, D, 2, every_step=False, loss="squared_error", carried=False)
LANGUAGE = Signature(True, CLASSES, CLASSES, every_step=True, loss="cross_entropy", carried=True)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def classified(rng, lengths=(4, 1, 2)):
    inputs = rng.standard_normal((T, B, D)).astype(np.float32)
    return Examples(inputs, np.array([0, 4, 2], np.int32), lengths=np.array(lengths, np.int32))


def text(rng):
    tokens = rng.integers(0, CLASSES, (T + 1, B)).astype(np.int32)
    return TextChunk(tokens[:-1], tokens[1:], np.asarray(True))


@pytest.mark.parametrize("cell", [*LSTMS, *OTHERS])
def test_every_cell_can_be_asked_for(cell):
    """Its parameters stand under its name; the state that is carried has the layers' states, one or two each."""
    model = cells_model(TokenCellsConfig(cell=cell, embedding=2, hidden=3, layers=2), LANGUAGE)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert shapes[f"{cell}/i2h_w"].shape[1] == 2 and shapes[f"{cell}/layer_1/i2h_w"].shape[1] == 3
    kinds = {"lru": ["real", "imaginary"]}.get(
        cell, ["hidden", "cell"] if cell in LSTMS else ["hidden"]
    )
    assert list(model.initial_carry(B)) == [f"{kind}_{k}" for k in range(2) for kind in kinds]
    assert cells_model(CellsConfig(cell=cell, hidden=3), CLASSIFY).initial_carry(B) == {}


@pytest.mark.parametrize("cell", AFFINE)
def test_cells_without_recurrent_products_have_none_dropped(cell):
    with pytest.raises(ConfigError, match=f"recurrent_dropout must be 0 for model.cell = '{cell}'"):
        CellsConfig(cell=cell, recurrent_dropout=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", ["gru", "lru"])
def test_both_gradients_agree_at_the_end_of_sequences(cell, rng):
    """Layers with a residual connection, read at the end of sequences of several lengths, in float64."""
    model = cells_model(CellsConfig(cell=cell, hidden=3, layers=2, residual=True), CLASSIFY)
    for name, (size, difference) in (
        GradientCheck(model, B).compare(model.init(jax.random.key(1)), classified(rng)).items()
    ):
        assert difference <= 1e-12 * max(size, 1), name


@pytest.mark.exhaustive
def test_what_padding_holds_shows_nowhere(rng):
    model = cells_model(CellsConfig(hidden=3), CLASSIFY)
    params, batch = model.init(jax.random.key(0)), classified(rng)
    padded = batch.inputs.copy()
    padded[1:, 1], padded[2:, 2] = np.nan, np.inf
    gradients = jax.jit(model.gradients)
    outcome, again = (
        gradients(params, {}, batch._replace(inputs=x), None) for x in (batch.inputs, padded)
    )
    jax.tree.map(np.testing.assert_array_equal, outcome, again)
    cut = batch._replace(inputs=batch.inputs[:2], lengths=np.array([2, 1, 2], np.int32))
    longer, shorter = (model.predict(params, {}, b)[0] for b in (batch, cut))
    np.testing.assert_allclose(longer[1:], shorter[1:], rtol=1e-5)


def test_the_loss_of_values_is_the_mean_squared_error(rng):
    model = cells_model(CellsConfig(cell="gru", hidden=3), REGRESS)
    params = model.init(jax.random.key(0))
    batch = Examples(
        rng.standard_normal((T, B, D)).astype(np.float32),
        rng.standard_normal((B, 2)).astype(np.float32),
    )
    values, _ = model.predict(params, {}, batch)
    loss, _ = model.loss(params, {}, batch, None)
    np.testing.assert_allclose(loss, np.mean((values - batch.targets) ** 2), rtol=1e-6)


def dropouts(net):
    """The outputs of the operators that drop something in training, in the net and in its step nets."""
    masks = [op.outputs[0] for op in net.ops if op.arg("ratio") and not op.arg("is_test")]
    return masks + [
        o
        for op in net.ops
        for name, inner in op.sub_nets()
        if name == "step_net"
        for o in dropouts(inner)
    ]


@pytest.mark.parametrize(
    ("where", "drops"),
    [
        ("dropout", ["lstm/layer_1/hidden_state_all_dropped"]),
        ("layer_dropout", ["lstm/layer_0/hidden_state_dropped"]),
        ("embedding_dropout", ["embedded_dropped"]),
    ],
)
def test_dropout_stands_where_it_is_asked_for(where, drops):
    model = cells_model(TokenCellsConfig(embedding=3, hidden=4, layers=2, **{where: 0.5}), LANGUAGE)
    assert dropouts(model.net) == drops
    assert dropouts(for_evaluation(model.net)) == []


@pytest.mark.exhaustive
def test_dropout_acts_in_training_alone(rng):
    """The two gradients agree with dropout too: they draw the same numbers from one key."""
    plain = TokenCellsConfig(embedding=3, hidden=4)
    model = cells_model(replace(plain, dropout=0.5), LANGUAGE)
    batch, params, carry = text(rng), model.init(jax.random.key(0)), model.initial_carry(B)
    evaluated = model.loss(params, carry, batch, None)[0]
    np.testing.assert_allclose(
        evaluated, cells_model(plain, LANGUAGE).loss(params, carry, batch, None)[0], rtol=1e-6
    )
    gradients = jax.jit(model.gradients)
    by_jax, again, other = (gradients(params, carry, batch, jax.random.key(k)) for k in (0, 0, 1))
    assert by_jax.loss == again.loss and by_jax.loss not in (other.loss, evaluated)
    by_net = jax.jit(replace(model, compute=Compute("net")).gradients)(
        params, carry, batch, jax.random.key(0)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), by_jax, by_net
    )


def products(jaxpr):
    """The types of the operands of every product in a jaxpr and what it holds."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(str(v.aval.dtype) for v in equation.invars)
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.exhaustive
def test_bfloat16_is_for_products_and_activations(rng):
    model = cells_model(TokenCellsConfig(embedding=8, hidden=8), LANGUAGE)
    narrow = replace(model, compute=Compute(precision="bfloat16"))
    batch, params, carry = text(rng), model.init(jax.random.key(0)), model.initial_carry(B)
    wide, outcome = (jax.jit(m.gradients)(params, carry, batch, None) for m in (model, narrow))
    assert {str(x.dtype) for x in jax.tree.leaves(outcome)} == {"float32"}
    np.testing.assert_allclose(outcome.loss, wide.loss, rtol=0.01)
    assert outcome.loss != wide.loss
    assert float(outcome.loss) != float(
        jnp.bfloat16(outcome.loss)
    )  # the loss itself is taken in float32
    for name, value in wide.gradients.items():
        error = float(jnp.linalg.norm(outcome.gradients[name] - value) / jnp.linalg.norm(value))
        assert error < 0.05, name
    dtypes = set(products(jax.make_jaxpr(narrow.loss)(params, carry, batch, None).jaxpr))
    assert dtypes == {("bfloat16", "bfloat16")}


def test_bfloat16_needs_the_gradient_of_jax():
    with pytest.raises(
        ConfigError, match=r'train.precision = "bfloat16" needs gradient.source = "jax"'
    ):
        decode(
            Config, {"train": {"precision": "bfloat16"}, "gradient": {"source": "net"}}, "c.toml"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "model.hidden must be at least 1"),
        ({"dropout": 1.0}, r"model.dropout must lie in \[0, 1\), is 1.0"),
        ({"embedding": 0}, "model.embedding must be at least 1"),
        ({"cell": "lstmm"}, "did you mean 'lstm'"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        decode(Config, {"model": change}, "c.toml")


V = 5
CONFIG = TokenCellsConfig(embedding=3, hidden=4)
EMBEDDING_FIRST = Signature(True, V, V, every_step=True, loss="cross_entropy", carried=True)
LOOKED_UP = replace(EMBEDDING_FIRST, tokens_of_a_batch=T * B)


@pytest.fixture
def batch():
    tokens = np.random.default_rng(0).integers(0, V, (T + 1, B)).astype(np.int32)
    return TextChunk(tokens[:-1], tokens[1:], np.asarray(True))


def has_lookup(model):
    return any(op.outputs[0].endswith("looked_up") for op in model.net.ops)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["jax", "net"])
@pytest.mark.parametrize("cell, layers", [("lstm", 1), ("gru", 2)])
def test_results_are_those_of_embedding_every_token(cell, layers, source, batch):
    config = replace(CONFIG, cell=cell, layers=layers)
    models = [cells_model(config, s, Compute(source)) for s in (EMBEDDING_FIRST, LOOKED_UP)]
    assert [has_lookup(m) for m in models] == [False, True]
    params = models[0].init(jax.random.key(0))
    assert {n: p.shape for n, p in models[1].init(jax.random.key(0)).items()} == {
        n: p.shape for n, p in params.items()
    }
    carry = jax.tree.map(lambda a: a + 0.5, models[0].initial_carry(B))
    first, second = (m.gradients(params, carry, batch, None) for m in models)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), first, second)


def test_both_gradients_agree(batch):
    model = cells_model(replace(CONFIG, dropout=0.5, recurrent_dropout=0.3), LOOKED_UP)
    for name, (size, difference) in (
        GradientCheck(model, B).compare(model.init(jax.random.key(1)), batch).items()
    ):
        assert difference <= 1e-12 * max(size, 1), name


def test_tokens_are_embedded_first_where_a_lookup_saves_nothing():
    assert not has_lookup(cells_model(CONFIG, replace(LOOKED_UP, tokens_of_a_batch=V)))
    assert not has_lookup(cells_model(replace(CONFIG, embedding_dropout=0.1), LOOKED_UP))


@pytest.mark.exhaustive
def test_recurrent_dropout_acts_in_training_alone(batch):
    model = cells_model(replace(CONFIG, layers=2, recurrent_dropout=0.5), LOOKED_UP)
    params = model.init(jax.random.key(0))
    carry = jax.tree.map(lambda a: a + 0.5, model.initial_carry(B))
    key = jax.random.key(3)
    evaluated, again, trained = (
        float(model.loss(params, carry, batch, k)[0]) for k in (None, None, key)
    )
    assert evaluated == again != trained == float(model.loss(params, carry, batch, key)[0])
