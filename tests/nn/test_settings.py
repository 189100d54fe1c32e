"""What jrnn.nn has beyond PyTorch's layers: noise, layer normalization, 16-bit products, recomputation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.errors import LayerError
from jrnn.nn import functional, units
from jrnn.nn.layers import draw
from jrnn.nn.settings import Settings

T, N, D, H = 6, 3, 4, 8
X = np.random.RandomState(0).standard_normal((T, N, D)).astype(np.float32)


def params_of(unit, **settings):
    return nn.Layout(unit, D, H, **settings).init(jax.random.key(0))


@pytest.mark.exhaustive
def test_without_a_key_nothing_is_random():
    params = params_of(units.GRU, num_layers=2)
    plain, _ = functional.gru(params, X)
    np.testing.assert_array_equal(
        functional.gru(params, X, dropout=0.5, recurrent_dropout=0.5)[0], plain
    )


def test_dropout_acts_between_layers_only():
    single, double = params_of(units.GRU), params_of(units.GRU, num_layers=2)
    key = jax.random.key(1)
    with pytest.warns(UserWarning, match="there is one layer: nothing is dropped"):
        output = functional.gru(single, X, dropout=0.5, key=key)[0]
    np.testing.assert_array_equal(output, functional.gru(single, X)[0])
    first = functional.gru({name: value for name, value in double.items() if "l0" in name}, X)[0]
    output, h_n = functional.gru(double, X, dropout=1.0, key=key)
    np.testing.assert_array_equal(h_n[0], first[-1])
    second = {name.replace("l1", "l0"): value for name, value in double.items() if "l1" in name}
    np.testing.assert_allclose(output, functional.gru(second, np.zeros_like(first))[0], atol=1e-6)


def test_recurrent_dropout_is_one_mask_for_the_whole_sequence():
    params = params_of(units.RNN_RELU)
    settings, key = Settings(recurrent_dropout=0.5), jax.random.key(1)
    mask = np.asarray(draw(settings, jax.random.split(key)[1], T, (jnp.zeros((N, H)),)).recurrent)
    assert set(np.unique(mask)) == {0.0, 2.0}
    h, expected = np.zeros((N, H)), []
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    for x in X:
        recurrent = (h * mask) @ p["weight_hh_l0"].T
        h = np.maximum(x @ p["weight_ih_l0"].T + p["bias_ih_l0"] + recurrent + p["bias_hh_l0"], 0)
        expected.append(h)
    output, _ = functional.rnn(params, X, nonlinearity="relu", recurrent_dropout=0.5, key=key)
    np.testing.assert_allclose(output, np.stack(expected), atol=1e-5)


LENGTHS = np.array([T, 0, 3], np.int32)
RESETS = np.random.RandomState(1).rand(T, N) < 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "layout", "more"),
    [
        ("lstm", {"proj_size": 2}, {"lengths": LENGTHS, "resets": RESETS}),
        ("gru", {"layer_norm": True}, {"lengths": LENGTHS}),
        ("rnn", {}, {"resets": RESETS, "dropout": 0.5, "key": jax.random.key(2)}),
    ],
)
def test_both_directions_in_one_loop_compute_the_same(kind, layout, more):
    unit = {"rnn": units.RNN_TANH}.get(kind) or getattr(units, kind.upper())
    params = params_of(unit, num_layers=2, bidirectional=True, **layout)

    def loss(params, x, merge):
        output, last = getattr(functional, kind)(params, x, merge_directions=merge, **more)
        return jnp.sum(jnp.sin(output)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(last)), (
            output,
            last,
        )

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    merged = jax.jit(functools.partial(run, merge=True))(params, X)
    with jrnn.plain_scans():
        apart = by_numpy(functools.partial(run, merge=False))(params, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), merged, apart)
    loops = [
        str(jax.make_jaxpr(loss, static_argnums=2)(params, X, merge)).count(" scan[")
        for merge in (False, True)
    ]
    assert loops == [4, 2]


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.5}])
def test_directions_with_noise_of_their_own_are_not_merged(noise):
    params, key = params_of(units.GRU, bidirectional=True), jax.random.key(3)
    apart, merged = (
        functional.gru(params, X, key=key, merge_directions=m, **noise)[0] for m in (False, True)
    )
    np.testing.assert_array_equal(apart, merged)


def test_directions_are_merged_on_gpus_alone(monkeypatch):
    assert not Settings().merges(None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Settings().merges(None) and Settings(zoneout=0.1).merges(None)
    assert not Settings(executor="associative").merges(None) and not Settings(
        merge_directions=False
    ).merges(None)


def test_zoneout_keeps_old_values_at_its_rate():
    params = params_of(units.LSTM)
    x = np.random.RandomState(0).standard_normal((400, N, D)).astype(np.float32)
    output, _ = functional.lstm(params, x, zoneout=(0.25, 0.0), key=jax.random.key(0))
    kept = float(np.mean(np.diff(output, axis=0) == 0))
    assert abs(kept - 0.25) < 0.03
    start = (jnp.full((1, N, H), 0.5), jnp.full((1, N, H), -0.25))
    frozen, (h, c) = functional.lstm(params, X, start, zoneout=1.0, key=jax.random.key(0))
    assert (frozen == 0.5).all() and (h == 0.5).all() and (c == -0.25).all()


def test_zoneout_without_randomness_is_its_expectation():
    params = params_of(units.GRU)
    once, _ = functional.gru(params, X[:1], jnp.ones((1, N, H)))
    mixed, _ = functional.gru(params, X[:1], jnp.ones((1, N, H)), zoneout=0.3)
    np.testing.assert_allclose(mixed, 0.3 + 0.7 * once, atol=1e-6)
    with pytest.raises(LayerError, match="this unit has 1 state; give one probability"):
        functional.gru(params, X, zoneout=(0.1, 0.1))


def test_noise_depends_on_the_key_alone():
    params = params_of(units.LSTM, num_layers=2)
    settings = dict(dropout=0.3, recurrent_dropout=0.3, zoneout=0.3)
    first = functional.lstm(params, X, key=jax.random.key(5), **settings)[0]
    np.testing.assert_array_equal(
        functional.lstm(params, X, key=jax.random.key(5), **settings)[0], first
    )
    assert (functional.lstm(params, X, key=jax.random.key(6), **settings)[0] != first).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["contractions", 2])
def test_noise_is_the_same_where_it_is_computed_again(recompute):
    """Bit for bit: an output keeps its old value where zoneout says so, and is 0 where its unit is dropped."""
    params, key = params_of(units.RNN_RELU, num_layers=2), jax.random.key(5)
    noise = dict(nonlinearity="relu", dropout=0.4, recurrent_dropout=0.3, zoneout=0.3, key=key)

    @functools.partial(jax.jit, static_argnames="recompute")
    def run(params, recompute=None):
        def loss(params):
            output, last = functional.rnn(params, X, recompute=recompute, **noise)
            return jnp.sum(output**2), (output, last)

        grads, results = jax.grad(loss, has_aux=True)(params)
        return results, grads

    (expected, _), expected_grads = run(params)
    (output, _), grads = run(params, recompute=recompute)
    assert 0.1 < np.mean(np.diff(expected, axis=0) == 0) < 0.9
    np.testing.assert_array_equal(np.diff(output, axis=0) == 0, np.diff(expected, axis=0) == 0)
    for name, want in expected_grads.items():
        np.testing.assert_array_equal(grads[name] == 0, want == 0, err_msg=name)
        np.testing.assert_allclose(grads[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


def normalize(z, gain):
    z = z - z.mean(-1, keepdims=True)
    return z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-5) * gain


@pytest.mark.sample("lstm")
@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_layer_normalization_acts_on_each_product(kind, x64):
    unit = {"rnn": units.RNN_TANH, "lstm": units.LSTM, "gru": units.GRU}[kind]
    random = np.random.RandomState(1)
    shapes = nn.Layout(unit, D, H, layer_norm=True).cell_shapes(D)
    params = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    x, h, c = (
        random.standard_normal((N, D)),
        random.standard_normal((N, H)),
        random.standard_normal((N, H)),
    )
    zx = normalize(x @ params["weight_ih"].T, params["norm_ih"]) + params["bias_ih"]
    zh = normalize(h @ params["weight_hh"].T, params["norm_hh"]) + params["bias_hh"]
    if kind == "rnn":
        actual, expected = functional.rnn_cell(params, x, h), np.tanh(zx + zh)
    elif kind == "lstm":
        i, f, g, o = np.split(zx + zh, 4, axis=1)
        new_c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        actual, expected = (
            functional.lstm_cell(params, x, (h, c))[0],
            np.tanh(new_c) / (1 + np.exp(-o)),
        )
    else:
        (xr, xz, xn), (hr, hz, hn) = np.split(zx, 3, axis=1), np.split(zh, 3, axis=1)
        n, z = np.tanh(xn + hn / (1 + np.exp(-xr - hr))), 1 / (1 + np.exp(-xz - hz))
        actual, expected = functional.gru_cell(params, x, h), (1 - z) * n + z * h
    np.testing.assert_allclose(actual, expected, atol=1e-10)


def products(jaxpr):
    """Every dot_general of a jaxpr and of the jaxprs inside it: the operands' types and the result's."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield {str(v.aval.dtype) for v in equation.invars}, str(equation.outvars[0].aval.dtype)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn"])
def test_16_bit_products_accumulate_in_float32(kind):
    unit = {"rnn": units.RNN_TANH, "lstm": units.LSTM, "gru": units.GRU}[kind]
    function, params = getattr(functional, kind), params_of(unit)
    with jrnn.plain_scans():
        exact, exact_last = by_numpy(function)(params, X)
    output, last = jax.jit(lambda params: function(params, X, dtype=jnp.bfloat16))(params)
    assert output.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(last))
    np.testing.assert_allclose(output.astype(jnp.float32), exact, atol=0.02)
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(exact_last), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)
    dtypes = list(
        products(jax.make_jaxpr(lambda x: function(params, x, dtype=jnp.bfloat16))(X).jaxpr)
    )
    assert len(dtypes) == 2 and all(pair == ({"bfloat16"}, "float32") for pair in dtypes)

    def loss(params, dtype):
        return jnp.sum(function(params, X, dtype=dtype)[0].astype(jnp.float32) ** 2)

    grads = jax.jit(jax.grad(lambda params: loss(params, jnp.bfloat16)))(params)
    with jrnn.plain_scans():
        expected = by_numpy(jax.grad(lambda params: loss(params, None)))(params)
    for name, value in expected.items():
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(
            grads[name], value, atol=0.03 * float(abs(value).max()), err_msg=name
        )


def test_a_bfloat16_module_works_in_bfloat16():
    module = nn.GRU(D, H, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    output, h_n = module(X.astype(jnp.bfloat16))
    assert module.weight_ih_l0.dtype == output.dtype == jnp.bfloat16 and h_n.dtype == jnp.float32


def test_settings_that_cannot_be_are_errors():
    params = params_of(units.GRU)
    with pytest.raises(
        LayerError, match="gru: no setting is called 'batchfirst'; did you mean 'batch_first'"
    ):
        functional.gru(params, X, batchfirst=True)
    with pytest.raises(LayerError, match=r"dropout is -0.1; a probability lies between 0 and 1"):
        functional.gru(params, X, dropout=-0.1)
    with pytest.raises(LayerError, match=r"zoneout is \(0.5, 2\)"):
        nn.LSTM(D, H, zoneout=(0.5, 2), rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match="it must be a floating type"):
        functional.gru(params, X, dtype=jnp.int32)
