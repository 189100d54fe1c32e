"""Every recurrent layer since 2018 against its formula in numpy, and the promises that all layers keep."""

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import written_out
from flax import nnx

from jrnn import nn
from jrnn.errors import LayerError
from jrnn.nn import span
from jrnn.testing import check_layer

T, N, D = 6, 3, 8
LENGTHS = np.array([6, 0, 4])
LAYERS = {
    "MinGRU": lambda **o: nn.MinGRU(D, 5, **o),
    "MinLSTM": lambda **o: nn.MinLSTM(D, 5, **o),
    "IndRNN": lambda **o: nn.IndRNN(D, 5, **o),
    "LRU": lambda **o: nn.LRU(D, 5, r_min=0.5, **o),
    "S5": lambda **o: nn.S5(D, 5, **o),
    "RGLRU": lambda **o: nn.RGLRU(D, num_heads=2, **o),
    "SLSTM": lambda **o: nn.SLSTM(D, 6, num_heads=2, **o),
    "MLSTM": lambda **o: nn.MLSTM(D, 6, num_heads=2, **o),
    "Mamba": lambda **o: nn.Mamba(D, 6, state_size=3, dt_rank=2, conv_size=3, **o),
    "Mamba2": lambda **o: nn.Mamba2(D, 6, num_heads=2, state_size=3, **o),
    "RetNet": lambda **o: nn.RetNet(D, num_heads=2, value_size=6, **o),
    "GLA": lambda **o: nn.GLA(D, num_heads=2, gate_rank=3, value_size=6, **o),
    "DeltaNet": lambda **o: nn.DeltaNet(D, num_heads=2, key_size=4, conv_size=2, **o),
    "GatedDeltaNet": lambda **o: nn.GatedDeltaNet(D, num_heads=2, value_size=6, **o),
    "RWKV7": lambda **o: nn.RWKV7(D, num_heads=2, rank=3, **o),
}
# Layers whose loops are compiled in every run, and not only with --exhaustive.
COMPILED = ("MinGRU", "SLSTM", "Mamba2", "GatedDeltaNet")
pytestmark = pytest.mark.usefixtures("little_optimization")


def made(name, **options):
    """A layer whose parameters are all random, so that each of them changes the output."""
    layer = LAYERS[name](rngs=nnx.Rngs(0), **options)
    random = np.random.RandomState(5)
    layer.load(
        {
            n: np.asarray(v + 0.3 * random.standard_normal(v.shape), v.dtype)
            for n, v in host(layer.params()).items()
        }
    )
    return layer


host = jax.device_get  # of numpy arrays, what is not under test compiles nothing


def inputs():
    resets = np.zeros((T, N), bool)
    resets[[2, 3, 0], [0, 2, 2]] = True
    return np.random.RandomState(0).standard_normal((T, N, D)).astype(np.float32), resets


def ragged(x, filler=np.nan):
    return np.where((np.arange(T)[:, None] < LENGTHS)[..., None], x, np.float32(filler))


def loss(layer, params, x, state, lengths, resets):
    """Every output and every floating state with weights of its own, so that no error cancels; and these."""
    y, end = layer.apply(params, x, state, lengths=lengths, resets=resets)
    leaves = [
        leaf for leaf in [y, *jax.tree.leaves(end)] if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    weighed = [
        jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape) for leaf in leaves
    ]
    return sum(jnp.sum(jnp.real(leaf) * weight) for leaf, weight in zip(leaves, weighed)), (y, end)


@pytest.fixture(scope="module", params=LAYERS)
def runs(request):
    """A layer and what it makes of sequences, by two programs: one of any call with its gradient, one of a step."""
    layer = made(request.param)
    x, resets = inputs()
    params, none = host(layer.params()), np.zeros_like(resets)
    everything = request.config.getoption("--exhaustive")
    jit = jax.jit if everything or request.param in COMPILED else by_numpy.jit

    @jit
    def call(x, state, lengths, resets):
        differentiate = jax.grad(
            lambda p, x: loss(layer, p, x, state, lengths, resets), (0, 1), has_aux=True
        )
        return differentiate(params, x), layer.apply(params, x, state)

    step = jit(lambda x, state: layer.apply_step(params, x, state))

    def run(x, state, steps=T, lengths=None, resets=none):
        padded = np.pad(x, ((0, T - len(x)), (0, 0), (0, 0)), constant_values=np.nan)
        y, end = host(
            call(padded, state, np.full(N, steps) if lengths is None else lengths, resets)[0][1]
        )
        return y[:steps], end

    start = host(layer.initial_state(N))
    steps, state = [], start
    for t in range(T):
        y, state = host(step(x[t], state))
        steps.append(y)
    first, middle = run(x[:2], start, 2)
    second, last = run(x[2:], middle, T - 2)
    results = {
        "whole": host(call(x, start, np.full(N, T), none)[1]),
        "steps": (np.stack(steps), state),
        "chunks": (np.concatenate([first, second]), last),
        "middle": middle,
        "ragged": run(ragged(x), middle, T, LENGTHS),
        "gradient": host(call(ragged(x), middle, LENGTHS, none)[0][0]),
        "prefix": run(x[:4], middle, 4),
        "reset": run(x, middle, T, LENGTHS, resets),
        "after": run(x[2:], start, T - 2),
    }
    return layer, x, results


def close(actual, expected, **tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 2e-5, "atol": 2e-5} | tolerance)


def at(tree, n):
    return jax.tree.map(lambda leaf: leaf[n], tree)


@pytest.mark.sample("IndRNN")
def test_it_computes_the_formula(runs):
    layer, x, actual = runs
    params = {name: np.asarray(value, np.float64) for name, value in layer.params().items()}
    expected = [
        getattr(written_out, type(layer).__name__.lower())(layer, params, np.float64(x[:, n]))
        for n in range(N)
    ]
    np.testing.assert_allclose(actual["whole"][0], np.stack(expected, 1), rtol=2e-4, atol=2e-5)


def test_steps_and_chunks_are_the_whole(runs):
    _, _, results = runs
    close(results["steps"], results["whole"])
    close(results["chunks"], results["whole"])


def test_lengths_end_sequences(runs):
    _, _, results = runs
    y, end = results["ragged"]
    short, short_end = results["prefix"]
    close((y[:4, 2], at(end, 2)), (short[:, 2], at(short_end, 2)))
    assert not np.asarray(y[4:, 2]).any() and not np.asarray(y[:, 1]).any()
    close(at(end, 1), at(results["middle"], 1), rtol=0, atol=0)
    assert np.isfinite(y).all()


def test_resets_start_anew(runs):
    _, _, results = runs
    y, end = results["reset"]
    after, after_end = results["after"]
    close((y[2:, 0], at(end, 0)), (after[:, 0], at(after_end, 0)))
    whole, _ = results["whole"]
    close(y[:3, 2], whole[:3, 2])  # a reset at the first step forgets the given state
    assert not np.allclose(y[:2, 0], whole[:2, 0], atol=1e-4)  # before it, the given state counts


def test_gradients_are_finite(runs):
    _, _, results = runs
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results["gradient"]))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(results["gradient"])), (
        "a parameter has no gradient"
    )


@pytest.mark.sample("MinGRU", "LRU")
def test_gradients_are_those_of_lax_scan(runs, monkeypatch):
    layer, x, results = runs

    def lax_scan(step, state, xs, lengths, resets, recompute, executor):
        assert resets is None

        def held(state, at):
            t, x = at
            new, y = step(state, x)
            alive = t < lengths
            keep = lambda a, b: jnp.where(alive.reshape(alive.shape + (1,) * (a.ndim - 1)), a, b)  # noqa: E731
            return jax.tree.map(keep, new, state), keep(y, jnp.zeros_like(y))

        return jax.lax.scan(held, state, (jnp.arange(T), xs))

    monkeypatch.setattr(span, "scan", lax_scan)
    differentiate = by_numpy.by_numpy(
        jax.grad(lambda p, x: loss(layer, p, x, results["middle"], LENGTHS, None)[0], (0, 1))
    )
    ours, expected = results["gradient"], host(differentiate(host(layer.params()), ragged(x, 0)))
    for name in ours[0]:
        scale = float(np.abs(expected[0][name]).max())
        np.testing.assert_allclose(
            ours[0][name], expected[0][name], rtol=1e-3, atol=2e-4 * scale, err_msg=name
        )
    close(ours[1], expected[1], rtol=1e-3, atol=1e-4 * float(np.abs(expected[1]).max()))


def test_sequences_without_a_batch_and_batches_first():
    layer = made("GatedDeltaNet", batch_first=True)
    x, resets = inputs()
    call = jax.jit(layer.__call__)
    y, end = host(call(np.swapaxes(x, 0, 1), lengths=LENGTHS, resets=resets.T))
    for n in (0, 2):
        alone, state = call(x[:, n], lengths=LENGTHS[n], resets=resets[:, n])
        close((alone, state), (y[n], at(end, n)))
    close(nn.compiled_step(layer)(x[0, 0]), at(host(jax.jit(layer.step)(x[0, :1])), 0))
    with pytest.raises(LayerError, match="GatedDeltaNet: chunked is for RNN, LSTM and GRU"):
        nn.chunked(layer, x, size=2)
    assert jax.tree.map(jnp.shape, layer.initial_state(2)) == ((2, 3, 22), (2, 2, 4, 3))


@pytest.mark.exhaustive
def test_products_in_16_bits_accumulate_in_32():
    layer = made("Mamba2", dtype=jnp.bfloat16)
    x, _ = inputs()
    y, state = layer(x)
    assert y.dtype == jnp.bfloat16 and {leaf.dtype for leaf in state} == {jnp.dtype("float32")}
    expected = made("Mamba2")(x)[0]
    np.testing.assert_allclose(
        y.astype(jnp.float32), expected, atol=0.05 * float(jnp.abs(expected).max())
    )


@pytest.mark.exhaustive
def test_a_step_of_ones_own():
    def step(p, state, x):
        h = jnp.tanh(x @ p["w"] + state["h"] @ p["r"])
        return {"h": h, "sum": state["sum"] + h.sum(-1)}, {"h": h, "x": x[:, 0]}

    def start(batch):
        return {"h": jnp.ones((batch, 4)), "sum": jnp.zeros(batch)}

    def params(key):
        return {"w": jax.random.normal(key, (D, 4)), "r": jnp.eye(4)}

    layer = nn.Recurrent(step, D, start, params, rngs=nnx.Rngs(0))
    assert sorted(layer.params()) == ["r", "w"] and layer.w[...].shape == (D, 4)
    x, resets = inputs()
    y, end = layer(x, resets=resets, lengths=LENGTHS)
    alone, alone_end = layer(x[2:, :1])
    close(
        (jax.tree.map(lambda leaf: leaf[2:, :1], y), jax.tree.map(lambda leaf: leaf[:1], end)),
        (alone, alone_end),
    )
    state, expected = start(N), []
    for t in range(T):
        state, out = step(layer.params(), state, x[t])
        expected.append(out["h"])
    close(layer(x)[0]["h"], jnp.stack(expected))


def test_what_does_not_fit_is_named():
    layer = nn.MLSTM(D, 6, num_heads=2, rngs=nnx.Rngs(0))
    x, resets = inputs()
    with pytest.raises(
        LayerError, match=r"MLSTM: x is \[6, 3, 7\] but must be \[T, 8\] or \[T, N, 8\]"
    ):
        layer(x[..., :7])
    with pytest.raises(
        LayerError,
        match=r"the state has the shapes \[3, 2, 3, 3\] but must have \(\[3, 2, 3, 3\], ",
    ):
        layer(x, jnp.zeros((3, 2, 3, 3)))
    with pytest.raises(LayerError, match="resets is float32"):
        layer(x, resets=resets * 1.0)
    with pytest.raises(LayerError, match="num_heads is 4, which does not divide hidden_size, 6"):
        nn.MLSTM(D, 6, num_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match="MLSTM: the parameters lack 'W_q'"):
        layer.load({})
    with pytest.raises(LayerError, match="LRU: r_min is 0.9 and r_max 0.5"):
        nn.LRU(4, r_min=0.9, r_max=0.5, rngs=nnx.Rngs(0))


def test_an_exponential_gate_does_not_overflow():
    layer = nn.SLSTM(D, 4, rngs=nnx.Rngs(0))
    run = jax.jit(layer.apply)
    y, _ = run(layer.params() | {"b_i": jnp.full(4, 200.0)}, inputs()[0])
    assert np.isfinite(y).all() and np.abs(y).max() > 0.1
    y, _ = run(layer.params() | {"b_i": jnp.full(4, -200.0)}, inputs()[0])
    assert np.isfinite(y).all() and np.abs(y).max() > 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["GatedDeltaNet", "MinGRU"])
def test_it_learns_to_recall_the_first_symbol(name):
    layer = LAYERS[name](rngs=nnx.Rngs(1))
    random = np.random.RandomState(3)
    symbols = random.randint(0, 4, 64)
    x = 0.3 * random.standard_normal((8, 64, D)).astype(np.float32)
    x[0], x[:, :, -1] = np.eye(D)[symbols], (np.arange(8) == 0)[:, None]
    params = layer.params() | {
        "read": 0.1 * random.standard_normal((layer.output_size, 4)).astype(np.float32)
    }
    optimizer = optax.adam(0.02)

    def objective(params):
        read = params["read"]
        y, _ = layer.apply({k: v for k, v in params.items() if k != "read"}, x)
        return optax.softmax_cross_entropy_with_integer_labels(y[-1] @ read, symbols).mean()

    def update(at, _):
        params, state = at
        value, gradient = jax.value_and_grad(objective)(params)
        change, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, change), state), value

    _, values = host(
        jax.jit(lambda p: jax.lax.scan(update, (p, optimizer.init(p)), length=120))(params)
    )
    assert values[0] > 1.2 and values[-1] < 0.3


@pytest.mark.sample("MinGRU")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_conforms(name):
    """`jrnn.testing.check_layer` finds nothing wrong with the layers that come with it."""
    x = inputs()[0][:4]
    report = check_layer(made(name), x)
    assert not report.findings, str(report.findings[0])
    assert set(report.skipped) == {"directions"} and len(report.holds) > 12


def test_an_own_step_conforms():
    def step(params, h, x):
        h = jnp.tanh(h @ params["w"] + x)
        return h, h

    layer = nn.Recurrent(
        step, D, lambda n: jnp.zeros((n, D)), {"w": jnp.eye(D) / 2}, rngs=nnx.Rngs(0)
    )
    report = check_layer(
        layer, inputs()[0][:3], only=["causality", "resets", "lengths", "initial state"]
    )
    assert not report.findings and not report.skipped
