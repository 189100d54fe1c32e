"""Caffe2's cells, with weights converted, compute what the real Caffe2 recorded (scripts/record/caffe2_cells.py)."""

from pathlib import Path

import numpy as np
import pytest

from jrnn.errors import ConversionError
from jrnn.interop import from_caffe2, to_caffe2
from jrnn.nn import functional

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe2_cells.npz"


@pytest.fixture(scope="module")
def recorded():
    with np.load(GOLDEN, allow_pickle=False) as stored:
        return dict(stored)


def part(recorded, case, name):
    prefix = f"{case}|{name}|"
    return {
        key.removeprefix(prefix): value for key, value in recorded.items() if key.startswith(prefix)
    }


@pytest.mark.exhaustive("rnn_tanh-settings0", "lstm_stack-settings4", "gru-settings5")
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("rnn_tanh", {}),
        ("rnn_relu", {}),
        ("lstm", {}),
        ("lstm_forget", {"forget_bias": 1.5}),
        ("lstm_stack", {"num_layers": 3}),
        ("gru", {"linear_before_reset": True}),
    ],
)
def test_converted_cells_compute_the_same(recorded, case, settings):
    kind = case.split("_")[0].upper()
    params = from_caffe2(kind, part(recorded, case, "blobs"), "cell", **settings)
    inputs, expected = part(recorded, case, "in"), part(recorded, case, "out")
    layers = settings.get("num_layers", 1)
    states = [
        np.concatenate([inputs[f"{letter}{k}"] for k in range(layers)])
        for letter in "hc"
        if f"{letter}0" in inputs
    ]
    if kind == "LSTM":
        output, (h, c) = functional.lstm(params, inputs["x"], tuple(states))
        np.testing.assert_allclose(c[-1:], expected["c_last"], atol=1e-5)
    elif kind == "GRU":
        output, h = functional.gru(params, inputs["x"], states[0])
    else:
        output, h = functional.rnn(params, inputs["x"], states[0], nonlinearity=case.split("_")[1])
    np.testing.assert_allclose(output, expected["h_all"], atol=1e-5)
    np.testing.assert_allclose(h[-1:], expected["h_last"], atol=1e-5)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("rnn_tanh", {}),
        ("lstm", {}),
        ("lstm_stack", {"num_layers": 3}),
        ("gru", {"linear_before_reset": True}),
    ],
)
def test_round_trip_is_exact(recorded, case, settings):
    kind = case.split("_")[0].upper()
    blobs = part(recorded, case, "blobs")
    back = to_caffe2(kind, from_caffe2(kind, blobs, "cell", **settings), "cell")
    assert sorted(back) == sorted(blobs)
    for name, value in blobs.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_the_other_gru_is_refused_because_it_is_another_function(recorded):
    blobs = part(recorded, "gru_before_product", "blobs")
    with pytest.raises(ConversionError, match="linear_before_reset=True converts"):
        from_caffe2("GRU", blobs, "cell")
    forced = from_caffe2("GRU", blobs, "cell", linear_before_reset=True)
    inputs = part(recorded, "gru_before_product", "in")
    output, _ = functional.gru(forced, inputs["x"], inputs["h0"])
    assert np.abs(output - part(recorded, "gru_before_product", "out")["h_all"]).max() > 0.05


def test_what_does_not_fit_is_named(recorded):
    blobs = part(recorded, "lstm", "blobs")
    with pytest.raises(
        ConversionError, match=r"the blob 'cel/i2h_w' is missing; did you mean 'cell/i2h_w'"
    ):
        from_caffe2("LSTM", blobs, "cel")
    with pytest.raises(ConversionError, match="num_layers is 0"):
        from_caffe2("LSTM", blobs, "cell", num_layers=0)
    with pytest.raises(ConversionError, match=r"weights are \[8, 3\] and \[6, 2\]; they must be"):
        from_caffe2("LSTM", blobs | {"cell/gates_t_w": np.ones((6, 2))}, "cell")
    with pytest.raises(ConversionError, match="only an LSTM has one"):
        from_caffe2("RNN", part(recorded, "rnn_tanh", "blobs"), "cell", forget_bias=1.0)
    params = from_caffe2("LSTM", blobs, "cell")
    with pytest.raises(ConversionError, match="bias_ih_l0 and bias_hh_l0 go together"):
        to_caffe2(
            "LSTM", {name: value for name, value in params.items() if name != "bias_hh_l0"}, "cell"
        )
    both = params | {name.replace("_l0", "_l0_reverse"): value for name, value in params.items()}
    with pytest.raises(ConversionError, match="one direction"):
        to_caffe2("LSTM", both, "cell")
    with pytest.raises(ConversionError, match="its cells have no 'weight_hr_l0'"):
        to_caffe2("LSTM", params | {"weight_hr_l0": np.ones((1, 2))}, "cell")
