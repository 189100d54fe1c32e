"""Weights of PyTorch, flax.nnx, Keras, ONNX and Arraymancer: round trips, and the functions stay the same."""

import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jrnn import interop, nn
from jrnn.errors import ConversionError, LayerError
from jrnn.nn import units
from jrnn.nn.conventions import convention

pytestmark = pytest.mark.usefixtures("little_compilation")

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def stack(kind, **settings):
    return KINDS[kind](3, 4, rngs=nnx.Rngs(1), **settings)


def numpy_params(module):
    return {name: np.asarray(value) for name, value in module.params().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(value), err_msg=name)


def test_the_table_agrees_with_the_units():
    for kind, unit in (("RNN", units.RNN_TANH), ("LSTM", units.LSTM), ("GRU", units.GRU)):
        assert convention("pytorch", kind).order == unit.gate_names


def test_unknown_rows_are_named():
    with pytest.raises(ConversionError, match=r"no system is called 'kears'; did you mean 'keras'"):
        convention("kears", "LSTM")
    with pytest.raises(ConversionError, match="arraymancer has no cell called 'LSTM'"):
        convention("arraymancer", "LSTM")


# PyTorch, through safetensors


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_state_dicts_keep_every_bit(tmp_path, dtype):
    layout = nn.Layout(units.LSTM, 3, 4, num_layers=2, bidirectional=True, proj_size=2)
    random = np.random.RandomState(0)
    params = {
        name: random.standard_normal(shape).astype(dtype) for name, shape in layout.shapes().items()
    }
    params["bias_ih_l0"][:3] = [np.nan, -0.0, np.inf]
    interop.save_state_dict(params, tmp_path / "w.safetensors", prefix="encoder.rnn.")
    back = interop.load_state_dict(tmp_path / "w.safetensors", prefix="encoder.rnn.")
    assert sorted(back) == sorted(params)
    assert sorted(
        interop.load_state_dict(tmp_path / "w.safetensors", prefix="encoder.rnn")
    ) == sorted(params)
    for name, value in params.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape
        assert back[name].tobytes() == value.tobytes()


def test_modules_load_what_they_saved(tmp_path):
    first, second = stack("LSTM", proj_size=2), nn.LSTM(3, 4, proj_size=2, rngs=nnx.Rngs(7))
    interop.save_state_dict(first.params(), tmp_path / "w.safetensors")
    second.load(interop.load_state_dict(tmp_path / "w.safetensors"))
    assert_same(second.params(), first.params())
    with pytest.raises(LayerError, match=r"weight_ih_l0 is \[16, 3\] but must be \[16, 5\]"):
        nn.LSTM(5, 4, proj_size=2, rngs=nnx.Rngs(0)).load(first.params())
    with pytest.raises(LayerError, match="the parameters lack 'bias_ih_l0'"):
        second.load({name: value for name, value in first.params().items() if "bias" not in name})
    with pytest.raises(
        LayerError,
        match=r"lack 'weight_ih_l0' \[16, 3\]; pass prefix='model.rnn.' to load_state_dict",
    ):
        second.load({f"model.rnn.{name}": value for name, value in first.params().items()})
    with pytest.raises(LayerError, match="'weight_hr_l0' has no place here"):
        stack("LSTM").load(
            nn.LSTM(3, 4, rngs=nnx.Rngs(0)).params() | {"weight_hr_l0": jnp.ones((2, 4))}
        )


class Tensor:
    """What of a tensor of torch is used: it is on a device, has a gradient, and bfloat16 is no type of numpy."""

    def __init__(self, value):
        self.value, self.dtype = value, "torch." + value.dtype.name

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.value.astype(np.float32))

    def numpy(self):
        assert self.value.dtype != ml_dtypes.bfloat16
        return self.value


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_dict_of_tensors_or_arrays_is_a_state_dict(dtype):
    value = np.linspace(-2, 2, 12).astype(dtype).reshape(4, 3)
    for given in (Tensor(value), value, jnp.asarray(value) if dtype != np.float64 else value):
        loaded = interop.load_state_dict({"rnn.w": given, "steps": 3}, prefix="rnn.")
        assert (
            list(loaded) == ["w"]
            and loaded["w"].dtype == dtype
            and loaded["w"].tobytes() == value.tobytes()
        )


def test_a_file_of_torch_is_read_by_torch_without_its_code(tmp_path, monkeypatch):
    path, value = tmp_path / "model.pt", np.ones((2, 3), np.float32)
    path.write_bytes(b"PK\x03\x04...")
    asked = []
    torch = types.ModuleType("torch")
    holds = {"rnn.w": Tensor(value), "rnn.n": Tensor(np.ones(2, np.int64))}
    torch.load = lambda path, **options: asked.append((path, options)) or holds
    monkeypatch.setitem(sys.modules, "torch", torch)
    np.testing.assert_array_equal(interop.load_state_dict(path, prefix="rnn.w")[""], value)
    assert asked == [(path, {"map_location": "cpu", "weights_only": True, "mmap": False})]
    with pytest.raises(ConversionError, match=r"model.pt: rnn.n is int64; weights must be"):
        interop.load_state_dict(path)
    holds = {"epoch": 3, "optimizer": {"state": {}, "groups": []}, "model": {"w": Tensor(value)}}
    for prefix in ("", "model"):
        with pytest.raises(
            ConversionError,
            match=r"model is a dict of \['w'\]; .*\(torch.load\(path, .*\)\['model'\]\)",
        ):
            interop.load_state_dict(path, prefix=prefix)
    holds = [1]
    with pytest.raises(ConversionError, match="holds a list; it must hold a state dict"):
        interop.load_state_dict(path)

    def refuse(path, **options):
        raise RuntimeError("Weights only load failed.\nMore")

    torch.load = refuse
    with pytest.raises(
        ConversionError, match=r"torch reads no state dict from it: Weights only load failed; in Py"
    ):
        interop.load_state_dict(path)
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(
        ConversionError,
        match=r"(?s)^\S*model.pt is a file of torch.save, .*import safetensors.torch, torch\n.*save_file\(.*model.saf",
    ):
        interop.load_state_dict(path)


def test_files_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(ConversionError, match="no such file"):
        interop.load_state_dict(path)
    path.write_bytes(b"\x80\x04\x95 a pickle, which is never run")
    with pytest.raises(ConversionError, match="cannot be read as safetensors"):
        interop.load_state_dict(path)
    save_file({"rnn.weight": np.ones(3), "rnn.steps": np.ones(3, np.int64)}, path)
    with pytest.raises(ConversionError, match=r"no name begins with 'lstm\.'"):
        interop.load_state_dict(path, prefix="lstm.")
    with pytest.raises(ConversionError, match=r"rnn\.steps is I64; .* a prefix"):
        interop.load_state_dict(path)
    with pytest.raises(ConversionError, match="cannot be written"):
        interop.save_state_dict({}, tmp_path / "missing" / "w.safetensors")
    with pytest.raises(ConversionError, match="torch.load cannot read; name it .safetensors"):
        interop.save_state_dict({}, tmp_path / "w.pt")


# flax.nnx


@pytest.mark.exhaustive("OptimizedLSTMCell-LSTM", "GRUCell-GRU")
@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (nnx.LSTMCell, "LSTM"),
        (nnx.OptimizedLSTMCell, "LSTM"),
        (nnx.GRUCell, "GRU"),
        (nnx.SimpleCell, "RNN"),
    ],
)
def test_flax_cells_compute_the_same(cell, kind):
    theirs = cell(3, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    params = interop.from_flax(theirs)
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    expected = nnx.RNN(theirs, time_major=True)(x)
    ours = stack(kind)
    ours.load(params)
    np.testing.assert_allclose(ours(x)[0], expected, atol=1e-6)

    other = cell(3, 4, rngs=nnx.Rngs(5))
    interop.to_flax(params, other)
    np.testing.assert_array_equal(nnx.RNN(other, time_major=True)(x), expected)
    assert_same(
        interop.from_flax(other, ""),
        {name.removesuffix("_l0"): value for name, value in params.items()},
    )


def test_flax_cells_take_a_stack_without_biases():
    params = stack("GRU", bias=False).params()
    cell = interop.to_flax(
        params, nnx.GRUCell(3, 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    )
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    np.testing.assert_allclose(
        nnx.RNN(cell, time_major=True)(x), nn.functional.gru(params, x)[0], atol=1e-6
    )


def test_what_flax_cannot_hold_is_an_error():
    params = stack("GRU").params()
    with pytest.raises(ConversionError, match="bias_hh_l0 of the candidate n is not zero"):
        interop.to_flax(params, nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ConversionError, match=r"the cell's array is \[5, 16\], the weight \[3, 16\]"
    ):
        interop.to_flax(stack("LSTM").params(), nnx.OptimizedLSTMCell(5, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ConversionError, match="Linear is not a cell"):
        interop.from_flax(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ConversionError, match="its activation_fn is relu, but jrnn.nn has tanh there"
    ):
        interop.from_flax(nnx.LSTMCell(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ConversionError, match="its gate_fn is hard_sigmoid, but jrnn.nn has sigmoid there"
    ):
        interop.to_flax(params, nnx.GRUCell(3, 4, gate_fn=nnx.hard_sigmoid, rngs=nnx.Rngs(0)))
    with pytest.raises(ConversionError, match="residual=True"):
        interop.from_flax(nnx.SimpleCell(4, 4, residual=True, rngs=nnx.Rngs(0)))
    assert interop.from_flax(nnx.SimpleCell(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0)))


# Keras and ONNX: their layers' definitions, written out step by step from their documentation


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def keras_lstm(x, kernel, recurrent, bias):
    h, c, outputs = np.zeros((len(x[0]), len(recurrent))), 0, []
    for x_t in x:
        i, f, candidate, o = np.split(x_t @ kernel + h @ recurrent + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(candidate)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


def keras_gru(x, kernel, recurrent, bias):
    h, outputs = np.zeros((len(x[0]), len(recurrent))), []
    for x_t in x:
        xz, xr, xh = np.split(x_t @ kernel + bias[0], 3, axis=1)
        hz, hr, hh = np.split(h @ recurrent + bias[1], 3, axis=1)
        z = sigmoid(xz + hz)
        h = z * h + (1 - z) * np.tanh(xh + sigmoid(xr + hr) * hh)
        outputs.append(h)
    return np.stack(outputs)


def onnx_lstm(x, W, R, B):
    Wb, Rb = np.split(B, 2)
    h, c, outputs = np.zeros((len(x[0]), R.shape[1])), 0, []
    for x_t in x:
        i, o, f, candidate = np.split(x_t @ W.T + h @ R.T + Wb + Rb, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(candidate)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


def onnx_gru(x, W, R, B):
    (wz, wr, wh), (rz, rr, rh) = np.split(W, 3), np.split(R, 3)
    (wbz, wbr, wbh, rbz, rbr, rbh) = np.split(B, 6)
    h, outputs = np.zeros((len(x[0]), R.shape[1])), []
    for x_t in x:
        z = sigmoid(x_t @ wz.T + h @ rz.T + wbz + rbz)
        r = sigmoid(x_t @ wr.T + h @ rr.T + wbr + rbr)
        h = (1 - z) * np.tanh(x_t @ wh.T + r * (h @ rh.T + rbh) + wbh) + z * h
        outputs.append(h)
    return np.stack(outputs)


@pytest.mark.parametrize(("kind", "theirs"), [("LSTM", keras_lstm), ("GRU", keras_gru)])
def test_keras_layers_compute_the_same(kind, theirs):
    random = np.random.RandomState(0)
    gates = 4 if kind == "LSTM" else 3
    bias = (gates * 4,) if kind == "LSTM" else (2, gates * 4)
    weights = [
        random.standard_normal(shape).astype(np.float32)
        for shape in ((3, gates * 4), (4, gates * 4), bias)
    ]
    x = random.standard_normal((5, 2, 3)).astype(np.float32)
    module = stack(kind)
    module.load(interop.from_keras(kind, weights))
    np.testing.assert_allclose(module(x)[0], theirs(x, *weights), atol=1e-5)
    for actual, expected in zip(interop.to_keras(kind, module.params()), weights, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.sample("True-LSTM")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_keras_bidirectional_lists_go_round(kind, bias):
    module = stack(kind, bidirectional=True, bias=bias)
    weights = interop.to_keras(kind, module.params())
    assert len(weights) == (6 if bias else 4)
    back = interop.from_keras(kind, weights, bidirectional=True, use_bias=bias)
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    again = stack(kind, bidirectional=True, bias=bias)
    again.load(back)
    np.testing.assert_allclose(again(x)[0], module(x)[0], atol=1e-6)


def test_keras_lists_that_do_not_fit_are_errors():
    weights = [np.ones((3, 12)), np.ones((4, 12)), np.ones(12)]
    with pytest.raises(ConversionError, match="reset_after is False"):
        interop.from_keras("GRU", weights)
    with pytest.raises(ConversionError, match="there are 3 weights"):
        interop.from_keras("GRU", weights, use_bias=False)
    with pytest.raises(ConversionError, match="have no layer 2"):
        interop.to_keras("GRU", stack("GRU").params(), layer=2)
    with pytest.raises(
        ConversionError, match=r"\[12, 3\] and \[12, 4\]; they must be \[H, D\] and \[H, H\]"
    ):
        interop.to_keras("RNN", stack("GRU").params())
    with pytest.raises(
        ConversionError, match=r"no cell called 'SimpleRNN'; known are \['RNN', 'LSTM', 'GRU'\]"
    ):
        interop.from_keras("SimpleRNN", weights)


@pytest.mark.parametrize(("kind", "theirs"), [("LSTM", onnx_lstm), ("GRU", onnx_gru)])
def test_onnx_operators_compute_the_same(kind, theirs):
    module = stack(kind)
    W, R, B = interop.to_onnx_arrays(kind, module.params())
    x = np.random.RandomState(0).standard_normal((5, 2, 3)).astype(np.float32)
    np.testing.assert_allclose(module(x)[0], theirs(x, W[0], R[0], B[0]), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_onnx_goes_round_exactly(kind, bias):
    params = numpy_params(stack(kind, bidirectional=True, bias=bias))
    assert_same(
        interop.from_onnx_arrays(
            kind, *interop.to_onnx_arrays(kind, params), linear_before_reset=True
        ),
        params,
    )


def test_onnx_tensors_that_do_not_fit_are_errors():
    W, R, B = interop.to_onnx_arrays("GRU", stack("GRU").params())
    with pytest.raises(ConversionError, match="linear_before_reset=1 converts"):
        interop.from_onnx_arrays("GRU", W, R, B)
    with pytest.raises(ConversionError, match=r"B is \[1, 12\] but must be \[1, 24\]"):
        interop.from_onnx_arrays("GRU", W, R, B[:, :12], linear_before_reset=True)
    with pytest.raises(ConversionError, match="their first axis must be 1 or 2"):
        interop.from_onnx_arrays("GRU", W[0], R[0], linear_before_reset=True)


# Arraymancer


@pytest.mark.parametrize("layers", [1, 3])
def test_arraymancer_goes_round_exactly(layers):
    params = numpy_params(stack("GRU", num_layers=layers))
    assert_same(interop.from_arraymancer(interop.to_arraymancer(params)), params)


def test_arraymancer_has_one_direction():
    with pytest.raises(ConversionError, match="one direction"):
        interop.to_arraymancer(stack("GRU", bidirectional=True).params())
