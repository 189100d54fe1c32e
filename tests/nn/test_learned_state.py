"""Layers whose first state is trained: values, resets, streaming, gradients, export."""

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_recurrent_layers import LAYERS as FAMILIES

import jrnn
from jrnn import nn
from jrnn.errors import LayerError

T, N, D = 5, 3, 8
LENGTHS = np.array([5, 0, 3])
RESETS = np.zeros((T, N), bool)
RESETS[2, 0] = RESETS[1, 2] = RESETS[2, 2] = True


def _step(params, state, x):
    h, count = state
    h = jnp.tanh(x @ params["w"].T + h)
    return (h, count + 1), h


def _start(batch):
    return jnp.full((batch, 4), 0.5, _float()), jnp.zeros(batch, jnp.int32)


def _float():
    return np.float64 if jax.config.jax_enable_x64 else np.float32


def _recurrent(param_dtype=np.float32, **options):
    return nn.Recurrent(_step, D, _start, {"w": jnp.full((4, D), 1 / 8, param_dtype)}, **options)


STACKS = {
    "RNN": lambda **o: nn.RNN(D, 4, **o),
    "LSTM": lambda **o: nn.LSTM(D, 4, num_layers=2, proj_size=2, **o),
    "GRU": lambda **o: nn.GRU(D, 4, **o),
}
LAYERS = FAMILIES | {"Recurrent": _recurrent} | STACKS


def _made(name):
    """A layer without a learned state, one with it, and parameters of the second."""
    plain = LAYERS[name](rngs=nnx.Rngs(0), param_dtype=_float())
    layer = LAYERS[name](rngs=nnx.Rngs(0), param_dtype=_float(), learned_state=True)
    params = jax.device_get(layer.params())
    random = np.random.RandomState(1)
    for key in _learned(params):
        shape = params[key].shape
        params[key] = params[key] + 0.5 * random.standard_normal(shape).astype(_float())
    return plain, layer, params


def _learned(params):
    """The names of the learned state's parameters, in the order of the state."""
    names = [key for key in sorted(params) if key.startswith("state")]
    return names + [key for key in ("h_0", "c_0") if key in params]


def _apply(layer, params, x, state=None, **options):
    if isinstance(layer, nn.RecurrentLayer):
        return layer.apply(params, x, state, **options)
    function = getattr(nn.functional, type(layer).__name__.lower())
    return function(params, x, state, **options)


def _inputs():
    return np.random.RandomState(0).standard_normal((T, N, D)).astype(_float())


def _axis(layer):
    return 0 if isinstance(layer, nn.RecurrentLayer) else 1


@pytest.mark.parametrize("name", LAYERS)
def test_a_learned_state_is_the_one_of_the_start_and_of_resets(name):
    plain, layer, params = _made(name)
    own = {key: value for key, value in params.items() if key not in _learned(params)}
    for key, value in jax.device_get(plain.params()).items():
        np.testing.assert_array_equal(value, own[key])  # drawn as without a learned state
    layer.load(params)
    first = jax.device_get(layer.initial_state(N))
    x = _inputs()
    run = by_numpy.jit(lambda p, x: _apply(layer, p, x, lengths=LENGTHS, resets=RESETS))
    step = by_numpy.jit(lambda p, x, state: _apply(plain, p, x[None], state))
    y, end = run(params, x)
    axis = _axis(layer)
    state = first
    for t in range(T):
        rows = RESETS[t] & (t < LENGTHS)
        state = _in_rows(rows, first, state, axis)
        wanted, new = step(own, x[t], state)
        live = t < LENGTHS
        state = _in_rows(live, new, state, axis)
        np.testing.assert_allclose(y[t][live], wanted[0][live], rtol=1e-4, atol=1e-5)
    for ended, wanted in zip(jax.tree.leaves(end), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ended, wanted, rtol=1e-4, atol=1e-5)


def _in_rows(rows, new, old, axis):
    """`new` where a row of the batch is chosen, else `old`."""

    def choose(new, old):
        shape = [1] * np.ndim(new)
        shape[axis] = N
        return np.where(rows.reshape(shape), new, old)

    return jax.tree.map(choose, new, old)


@pytest.mark.parametrize("name", LAYERS)
def test_a_learned_state_is_a_parameter_written_by_hand(name, x64):
    """In float64: outputs from a first state that is given, and the sum over the batch of its gradient."""
    plain, layer, params = _made(name)
    own = {key: value for key, value in params.items() if key not in _learned(params)}
    layer.load(params)
    first = jax.device_get(layer.initial_state(N))
    x = _inputs()

    def weighed(y):
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype))  # no two errors cancel
        return jnp.sum(y * weights.reshape(y.shape))

    def loss(params):
        return weighed(_apply(layer, params, x)[0])

    def loss_of_state(state):
        return weighed(_apply(plain, own, x, state)[0])

    value, gradients = by_numpy.jit(jax.value_and_grad(loss))(params)
    differentiate = jax.value_and_grad(loss_of_state, allow_int=True)
    wanted_value, wanted = by_numpy.jit(differentiate)(first)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-12)
    parts = []
    for leaf in jax.tree.leaves(wanted):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            total = np.sum(leaf, axis=_axis(layer))
            complex_ = np.iscomplexobj(total)
            parts.append(np.stack([total.real, -total.imag], -1) if complex_ else total)
    learned = _learned(params)
    for key, part in zip(reversed(learned), reversed(parts)):  # windows come first
        np.testing.assert_allclose(gradients[key], part, rtol=1e-9, atol=1e-12)
    assert any(np.abs(gradients[key]).max() > 1e-4 for key in learned)


def test_a_learned_state_is_streamed_and_cut_into_chunks():
    _, layer, params = _made("LSTM")
    layer.load(params)
    x = _inputs()
    y, end = layer(x)
    step = nn.compiled_step(layer)
    state = layer.initial_state(N)
    for t in range(T):
        out, state = step(x[t], state)
    np.testing.assert_allclose(out, y[-1], atol=1e-6)
    pieces, last = nn.chunked(layer, x, size=2)
    np.testing.assert_allclose(pieces, y, atol=1e-6)
    for a, b, c in zip(end, state, last, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_allclose(a, c, atol=1e-6)
    both = nn.Sequential(layer, jax.nn.gelu)
    np.testing.assert_allclose(both(x)[0], jax.nn.gelu(y), atol=1e-6)


@pytest.mark.parametrize("name", ["GRU", "GatedDeltaNet"])
def test_a_learned_state_is_exported(name):
    """`to_onnx` compares the model with the layer, at other sizes of the batch, too."""
    pytest.importorskip("onnxruntime")
    _, layer, params = _made(name)
    layer.load(params)
    model = jrnn.to_onnx(layer, _inputs(), dims="T, N, ...")
    assert name != "GRU" or "GRU" in [node.op_type for node in model.graph.node]
    again = jrnn.from_onnx(model)({"x": _inputs()})
    np.testing.assert_allclose(again["output/0"], layer(_inputs())[0], atol=1e-5)


def test_what_cannot_be_learned():
    with pytest.raises(LayerError, match="CausalConv: .* no recurrent state"):
        nn.CausalConv(3, 4, 2, learned_state=True, rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match=r"params have \['state_0'\], the names of the learned"):
        params = {"w": jnp.ones((4, D)), "state_0": jnp.ones(4)}
        nn.Recurrent(_step, D, _start, params, learned_state=True, rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match="learned_state is 1"):
        nn.GRU(3, 4, learned_state=1, rngs=nnx.Rngs(0))
