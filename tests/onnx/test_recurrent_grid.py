"""RNN, GRU and LSTM over the grid of their attributes and optional inputs, next to onnxruntime.

ONNX's reference implementation ignores `sequence_lens`, so it is no oracle for this.
"""

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, checker, helper, numpy_helper

import jrnn

T, N, D, H = 5, 3, 2, 4
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DIRECTIONS = ("forward", "reverse", "bidirectional")
ACTIVATIONS = {  # one set for a direction, with alphas and betas; None: the defaults
    "RNN": [None, (["Relu"], [], []), (["LeakyRelu"], [0.3], []), (["ScaledTanh"], [0.7], [0.9])],
    "GRU": [None, (["HardSigmoid", "Softsign"], [0.25], [0.4]), (["Sigmoid", "Elu"], [0.8], [])],
    "LSTM": [
        None,
        (["HardSigmoid", "ScaledTanh", "Affine"], [0.25, 0.7, 0.6], [0.4, 0.9, 0.1]),
        (["Sigmoid", "Softplus", "ThresholdedRelu"], [0.2], []),
    ],
}
OWN = {"RNN": [{}], "GRU": [{}, {"linear_before_reset": 1}]}
OWN["LSTM"] = [{}, {"input_forget": 1}, {"peepholes": True}, {"peepholes": True, "input_forget": 1}]

CASES = [
    (
        kind,
        direction,
        lengths,
        states,
        clip,
        own,
        ACTIVATIONS[kind][k % len(ACTIVATIONS[kind])],
        bool(k % 5),
    )
    for kind in GATES
    for k, (own, clip, states, lengths, direction) in enumerate(
        itertools.product(
            OWN[kind], (None, 0.4), (False, True), (None, [5, 3, 1], [0, 2, 4]), DIRECTIONS
        )
    )
] + [
    ("RNN", direction, lengths, True, clip, {}, activation, True)
    for direction in DIRECTIONS
    for lengths in (None, [2, 5, 4])
    for clip in (None, 0.4)
    for activation in ACTIVATIONS["RNN"]
]


def build(kind, direction, lengths, states, clip, own, activations, bias):
    """The model, its inputs, and what it is named in an error."""
    rng, k, rows = (
        np.random.default_rng(1),
        2 if direction == "bidirectional" else 1,
        GATES[kind] * H,
    )
    feeds = {"x": rng.standard_normal((T, N, D)).astype(np.float32)}
    if lengths is not None:
        feeds["lengths"] = np.asarray(lengths, np.int32)
    weights = {"W": (k, rows, D), "R": (k, rows, H)} | ({"B": (k, 2 * rows)} if bias else {})
    if states:
        feeds |= {
            n: rng.standard_normal((k, N, H)).astype(np.float32)
            for n in ("h", "c")[: 1 + (kind == "LSTM")]
        }
    attributes = {name: value for name, value in own.items() if name != "peepholes"}
    if own.get("peepholes"):
        weights["P"] = (k, 3 * H)
    if clip:
        attributes["clip"] = clip
    if activations:
        names, alphas, betas = activations
        attributes["activations"] = names * k
        attributes |= {"activation_alpha": alphas * k} if alphas else {}
        attributes |= {"activation_beta": betas * k} if betas else {}
    names = [
        "x",
        "W",
        "R",
        *(n if n in {*weights, *feeds} else "" for n in ("B", "lengths", "h", "c", "P")),
    ]
    names = names[: 1 + max(k for k, name in enumerate(names) if name)]
    outputs = ["y", "y_h", "y_c"][: 2 + (kind == "LSTM")]
    node = helper.make_node(kind, names, outputs, direction=direction, hidden_size=H, **attributes)
    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "grid",
        [helper.make_tensor_value_info(n, types[v.dtype], v.shape) for n, v in feeds.items()],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (3 + (n == "y")))
            for n in outputs
        ],
        [
            numpy_helper.from_array(rng.uniform(-0.7, 0.7, shape).astype(np.float32), n)
            for n, shape in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return model, feeds


@pytest.mark.sample("RNN-forward-None-True-None4", "RNN-reverse-None-True-0.4_1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:5]))
def test_against_onnxruntime(case):
    model, feeds = build(*case)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    expected = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    for state, given in zip(
        expected[1:], ("h", "c"), strict=False
    ):  # of a length 0 the last state is the first; there, 0
        if given in feeds and "lengths" in feeds:
            state[:, feeds["lengths"] == 0] = feeds[given][:, feeds["lengths"] == 0]
    actual = jrnn.from_onnx(model)(feeds)
    for value, other in zip(actual.values(), expected, strict=True):
        np.testing.assert_allclose(value, other, atol=2e-6)


def test_the_grid_has_the_size_that_is_claimed():
    assert len(CASES) >= 300
