"""memory_optimization acts on JAX's own gradient too: only the states are stored, and the numbers do not change."""

import jax
import numpy as np
import pytest
from plans_of import scan_plans

import jrnn
from jrnn.loops import scan
from jrnn.nets import cells
from jrnn.nets.ops import recurrent_network

T, N, D, H = 40, 16, 3, 8
LENGTHS = np.arange(N, dtype=np.int32)
LAYERS = {
    "lstm": (cells.LSTM, {}),
    "layer_norm_lstm": (cells.LayerNormLSTM, {}),
    "milstm": (cells.MILSTM, {}),
    "gru": (cells.GRU, {}),
    "gru_linear_before_reset": (cells.GRU, {"linear_before_reset": True}),
    "basic": (cells.BasicRNN, {}),
    "min_lstm": (cells.MinLSTM, {}),
}


@pytest.fixture
def told(monkeypatch):
    """What every scan of a net is, as it is traced."""
    explained = []

    def scanned(step, carry, xs, **keywords):
        explained.append(scan_plans(step, carry, xs, **keywords))
        return scan(step, carry, xs, **keywords)

    monkeypatch.setattr(recurrent_network, "scan", scanned)
    return explained


def gradient(name, optimize):
    layers, options = LAYERS[name]
    b = jrnn.NetBuilder("net")
    record = type(layers.default_options)(memory_optimization=optimize, **options)
    out = layers(b, b.input("x"), b.input("lengths"), None, D, H, "cell", record)
    b.SumElements(b.Tanh(out.hidden_all), "loss")
    fn = jrnn.to_jax(b.build(), ["loss"])
    rng = np.random.default_rng(0)
    blobs = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in b.params.items()}
    blobs["x"] = rng.standard_normal((T, N, D)).astype(np.float32)
    return jax.grad(lambda p: fn({**p, "lengths": LENGTHS})["loss"].reshape(())), blobs


def stored(explanation):
    """Bytes that the forward loop writes for the reverse loop, besides states and what it writes without a gradient.

    Results of comparisons, a byte each, are always stored: computed again, they might differ.
    """
    written = [
        sum(
            item.bytes
            for item in loops[0].stacked
            if item.what != "carry" and not item.type.startswith("bool")
        )
        for loops in (explanation.training, explanation.forward)
    ]
    return written[0] - written[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_stored_but_the_states(name, told):
    for optimize in (False, True):
        jax.make_jaxpr(gradient(name, optimize)[0])(gradient(name, optimize)[1])
    plain, saving = map(stored, told)
    assert saving == 0
    assert plain >= T * N * H * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["layer_norm_lstm", "gru_linear_before_reset"])
def test_memory_is_less_and_gradients_the_same(name):
    results, sizes = [], []
    for optimize in (False, True):
        fn, blobs = gradient(name, optimize)
        compiled = jax.jit(fn).lower(blobs).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        results.append(compiled(blobs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), *results)
    assert sizes[1] < sizes[0] - 2 * T * N * H * 4
