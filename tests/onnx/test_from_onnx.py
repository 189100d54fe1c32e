"""from_onnx: parameters, transformations, control flow, files and their errors; ONNX's own backend node tests; models
that torch exports, recorded by scripts/record/torch_onnx.py; docs/onnx.md, whose examples run."""

import collections
import doctest
import importlib
import pkgutil
import random
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.test.case import node as cases

import jrnn
from jrnn.errors import ConversionError, FormatError, JrnnError, OpError, UnknownOperatorError

DOCS = Path(__file__).parents[2] / "docs"
with np.load(Path(__file__).parents[1] / "golden" / "torch_onnx.npz", allow_pickle=False) as stored:
    GOLDEN = dict(stored)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package's own warnings
    for family in ("rnn", "gru", "lstm", "if", "loop", "scan"):  # each module registers its cases
        names = [
            name
            for _, name, _ in pkgutil.iter_modules(cases.__path__)
            if name.rstrip("_") == family
        ]
        importlib.import_module(f"onnx.backend.test.case.node.{names[0]}")
NODE_CASES = {case.name: case for case in cases._NodeTestCases}
EXPORTS = sorted({name.split("|")[0] for name in GOLDEN})
HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def read(text):
    return jrnn.from_onnx(parser.parse_model(HEAD + text))


def lstm(opset=17):
    """A small tagger: LSTM, then a linear layer; its number of steps and sequences is open."""
    rng = np.random.default_rng(0)
    weights = {"W": (1, 16, 3), "R": (1, 16, 4), "B": (1, 32), "V": (4, 2)}
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", ["x", "W", "R", "B"], ["y4", "h", "c"], hidden_size=4),
            helper.make_node("Squeeze", ["y4", "one"], ["y"]),
            helper.make_node("MatMul", ["y", "V"], ["out"]),
        ],
        "tagger",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", 3])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["T", "N", 2])],
        [
            numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n)
            for n, s in weights.items()
        ]
        + [numpy_helper.from_array(np.array([1]), "one")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def onnxruntime_of(source, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(source, options).run(None, feeds)


def test_a_model_is_a_pure_function_with_parameters():
    model = jrnn.from_onnx(lstm())
    assert sorted(model.params) == ["B", "R", "V", "W"]
    assert [str(s) for s in (*model.inputs, *model.outputs)] == [
        "x: float32[T, N, 3]",
        "out: float32[T, N, 2]",
    ]
    x = jnp.ones((5, 2, 3))
    by_jit = jax.jit(model)({"x": x}, model.params)["out"]
    np.testing.assert_allclose(by_jit, model({"x": x})["out"], atol=1e-6)
    many = jax.vmap(lambda v: model({"x": x}, {"V": v})["out"])(
        jnp.stack([model.params["V"], 2 * model.params["V"]])
    )
    np.testing.assert_allclose(many[1], 2 * by_jit, atol=1e-5)


def test_a_model_is_fine_tuned_and_saved(tmp_path):
    model = jrnn.from_onnx(lstm())
    x, target = jax.random.normal(jax.random.key(0), (5, 2, 3)), jnp.ones((5, 2, 2))

    def loss(params):
        return jnp.mean((model({"x": x}, params)["out"] - target) ** 2)

    step = jax.jit(lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p)))
    params = model.params
    for _ in range(30):
        params = step(params)
    assert loss(params) < 0.5 * loss(model.params)
    model.save(tmp_path / "tuned.onnx", params)
    (out,) = onnxruntime_of(tmp_path / "tuned.onnx", {"x": np.asarray(x)})
    np.testing.assert_allclose(out, model({"x": x}, params)["out"], atol=1e-5)
    again = jrnn.from_onnx(tmp_path / "tuned.onnx")
    np.testing.assert_array_equal(again.params["R"], params["R"])
    with pytest.raises(OpError, match=r"'r' of shape \(1,\) is not a parameter"):
        model.save(tmp_path / "no.onnx", {"r": np.ones(1)})


COUNT = """agraph (float[N] x, int64 n) => (float[N] y, float[K, N] all) {
    go = Constant <value = bool {1}> ()
    y, all = Loop (n, go, x) <body = body (int64 i, bool c, float[N] a) => (bool d, float[N] b, float[N] s)
        { d = Identity(c)  b = Add(a, a)  s = Identity(b) }>
}"""


def test_a_loop_of_a_known_number_of_steps_is_a_scan():
    model = read(COUNT)
    grad = jax.jit(jax.grad(lambda x: model({"x": x, "n": 3})["all"].sum()))
    np.testing.assert_allclose(grad(jnp.ones(2)), [14.0, 14.0])
    assert "scan" in str(jax.make_jaxpr(lambda x: model({"x": x, "n": 3}))(jnp.ones(2)))
    with pytest.raises(
        ConversionError,
        match=r"Loop -> 'y', 'all': the number of steps depends on values that are not",
    ):
        jax.jit(model)({"x": jnp.ones(2), "n": jnp.int32(3)})


MASKED = """agraph (float[T, N, D] x, bool[T, N] mask, float[D, H] w) => (float[T, N, H] all, float[N, H] last) {
    shape = Shape(x)  at = Constant <value = int64 {0}> ()  count = Gather <axis = 0> (shape, at)
    steps = Cast <to = 6> (count)
    zero = Constant <value = int32 {0}> ()  one = Constant <value = int32 {1}> ()  go = Less(zero, steps)
    sizes = Constant <value_ints = [2, 4]> ()  none = Constant <value = float {0.0}> ()  start = Expand(none, sizes)
    a, b, last, all = Loop (MOST, go, zero, zero, start) <body = body
        (int64 i, bool on, int32 number, int32 time, float[N, H] h) =>
        (bool goes_on, int32 next_number, int32 next_time, float[N, H] new, float[N, H] y) {
            next_number = Add(number, one)  next_time = Add(time, one)
            p = Less(next_number, steps)  q = Less(next_time, steps)  goes_on = And(p, q)
            xt = Gather <axis = 0> (x, time)  z = MatMul(xt, w)  s = Add(z, h)  candidate = Tanh(s)
            mt = Gather <axis = 0> (mask, time)  axes = Constant <value_ints = [1]> ()  m = Unsqueeze(mt, axes)
            new = Where(m, candidate, h)  y = Identity(new) }>
}"""


@pytest.mark.parametrize("most", ["count", ""])
def test_a_loop_whose_condition_follows_from_known_integers_is_a_scan(most):
    """As tf2onnx writes a masked layer of Keras."""
    model = read(MASKED.replace("MOST", most))
    random = np.random.RandomState(0)
    mask = random.rand(5, 2) < 0.7
    w = random.randn(3, 4).astype(np.float32)
    for steps in (5, 1, 0):
        x = random.randn(steps, 2, 3).astype(np.float32)
        h = np.zeros((2, 4), np.float32)
        rows = []
        for t in range(steps):
            h = np.where(mask[t, :, None], np.tanh(x[t] @ w + h), h)
            rows.append(h)
        feeds = {"x": x, "mask": jnp.asarray(mask[:steps]), "w": w}
        result = jax.jit(lambda feeds: model(feeds))(feeds)
        np.testing.assert_allclose(result["last"], h, atol=1e-5)
        np.testing.assert_allclose(result["all"], np.reshape(rows, (steps, 2, 4)), atol=1e-5)
    feeds["x"] = jnp.ones((300, 2, 3))
    feeds["mask"] = jnp.ones((300, 2), bool)
    assert str(jax.make_jaxpr(model)(feeds)).count("tanh") == 1


WHILE = """agraph (float[N] x, float top) => (float[N] y) {
    y = Loop (, , x) <body = body (int64 i, bool c, float[N] a) => (bool d, float[N] b)
        { b = Add(a, a)  s = ReduceMax <keepdims = 0> (b)  d = Less(s, top) }>
}"""


def test_a_loop_until_a_value_is_reached_has_a_gradient():
    model = jax.jit(read(WHILE))
    assert model({"x": jnp.asarray([1.0, 3.0]), "top": jnp.float32(20)})["y"].tolist() == [
        8.0,
        24.0,
    ]
    grad = jax.grad(lambda x: model({"x": x, "top": jnp.float32(20)})["y"].sum())
    assert grad(jnp.asarray([1.0, 3.0])).tolist() == [8.0, 8.0]


def typed(name, kind=TensorProto.FLOAT, shape=(2,)):
    return helper.make_tensor_value_info(name, kind, list(shape))


LOOPS = {  # the inputs of a body, its nodes, its outputs and the inputs of the node
    "Loop": (
        [typed("i", TensorProto.INT64, ()), typed("c", TensorProto.BOOL, ()), typed("a")],
        [("Identity", ["c"], "d"), ("Mul", ["a", "w"], "b")],
        [typed("d", TensorProto.BOOL, ()), typed("b")],
        ["n", "", "x"],
    ),
    "Scan": (
        [typed("a"), typed("s")],
        [("Mul", ["a", "w"], "t"), ("Add", ["t", "s"], "b")],
        [typed("b")],
        ["x", "xs"],
    ),
    "If": ([], [("Mul", ["x", "w"], "b")], [typed("b")], ["c"]),
}


def twice(kind, version, weight_is_first):
    """Two nodes of one name, whose bodies have a parameter `w` of 2 and of 3; up to version 3 among their inputs."""
    inputs, rows, outputs, passed = LOOPS[kind]
    nodes = [helper.make_node(name, given, [made]) for name, given, made in rows]
    weight = [typed("w")] if version == 3 else []
    inputs = [*weight, *inputs] if weight_is_first else [*inputs, *weight]

    def body(value):
        tensor = numpy_helper.from_array(np.full(2, value, np.float32), "w")
        return helper.make_graph(nodes, "body", inputs, outputs, [tensor])

    whole = []
    for k, value in enumerate((2, 3)):
        bodies = {"body": body(value)}
        if kind == "If":
            bodies = {"then_branch": body(value), "else_branch": body(-value)}
        more = {"num_scan_inputs": 1} if kind == "Scan" else {}
        whole.append(helper.make_node(kind, passed, [f"y{k}"], name="same", **bodies, **more))
    given = [
        typed("x"), typed("xs", shape=(3, 2)), typed("n", TensorProto.INT64, ()), typed("c", TensorProto.BOOL, ()),
    ]  # fmt: skip
    graph = helper.make_graph(whole, "whole", given, [typed("y0"), typed("y1")])
    opset = helper.make_opsetid("", 9 if version == 3 else 17)
    return helper.make_model(graph, ir_version=version, opset_imports=[opset])


@pytest.mark.parametrize("version, weight_is_first", [(3, False), (3, True), (8, False)])
@pytest.mark.parametrize("kind", LOOPS)
def test_bodies_have_parameters_of_their_own(kind, version, weight_is_first, tmp_path):
    model = jrnn.from_onnx(twice(kind, version, weight_is_first))
    feeds = {"x": np.ones(2, np.float32), "xs": np.ones((3, 2), np.float32), "n": 3, "c": True}
    expected = {"Loop": (8, 27), "Scan": (15, 40), "If": (2, 3)}[kind]
    assert [float(y[0]) for y in model(feeds).values()] == list(expected)
    path = "same/then_branch/w" if kind == "If" else "same/body/w"
    assert {path, f"{path}_2"} <= model.params.keys()
    model.save(tmp_path / "new.onnx", {f"{path}_2": np.zeros(2, np.float32)})
    first, second = jrnn.from_onnx(tmp_path / "new.onnx")(feeds).values()
    assert first[0] == expected[0] and second[0] == (1 if kind == "Scan" else 0)


def test_an_argument_goes_before_a_default_of_a_body():
    """From version 4 of the format on, an initializer may be the default of an input."""
    model = twice("Loop", 8, False)
    for node in model.graph.node:
        (body,) = (a.g for a in node.attribute)
        tensor = numpy_helper.from_array(np.full(2, 9, np.float32), "a")
        body.initializer.append(tensor)
    feeds = {"x": np.ones(2, np.float32), "xs": np.ones((3, 2), np.float32), "n": 3, "c": True}
    assert [float(y[0]) for y in jrnn.from_onnx(model)(feeds).values()] == [8, 27]


def test_parameters_of_each_form_are_saved(tmp_path):
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> agraph (float[2] x) => (float[2] y) {
        floats = Constant <value_floats = [1.0, 2.0]> ()  a = Add(x, floats)  y = Mul(a, sparse) }"""
    )
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [3.0])
    indices = helper.make_tensor("indices", TensorProto.INT64, [1], [1])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2]))
    model = jrnn.from_onnx(proto)
    changed = {name: value + 1 for name, value in model.params.items()}
    model.save(tmp_path / "new.onnx", changed)
    again = jrnn.from_onnx(tmp_path / "new.onnx")
    jax.tree.map(np.testing.assert_array_equal, again.params, changed)
    assert again({"x": jnp.ones(2)})["y"].tolist() == [3.0, 16.0]


CHOOSE = """agraph (float[N] x, bool c) => (float[M] y) {
    y = If (c) <then_branch = yes () => (float[N] a) { a = Neg(x) },
                else_branch = no () => (float[M] b) { two = Constant <value_ints = [2]> ()  b = Tile(x, two) }>
}"""


def test_a_branch_that_changes_the_shape_must_be_known():
    model = read(CHOOSE)
    x = jnp.ones(2)
    assert jax.jit(lambda x: model({"x": x, "c": False}))(x)["y"].shape == (4,)
    assert model({"x": x, "c": np.asarray(True)})["y"].tolist() == [-1.0, -1.0]
    with pytest.raises(
        ConversionError,
        match=r"If -> 'y': 'y' is float32\[2\] in one branch and float32\[4\] in the other",
    ):
        jax.jit(model)({"x": x, "c": jnp.asarray(True)})


def test_layout_1_is_layout_0_transposed():
    """onnxruntime has no layout 1."""
    proto = lstm()
    batched = onnx.ModelProto()
    batched.CopyFrom(proto)
    batched.graph.node[0].attribute.append(helper.make_attribute("layout", 1))
    batched.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.array([2]), "one"))
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    out = jrnn.from_onnx(batched)({"x": jnp.swapaxes(x, 0, 1)})["out"]
    np.testing.assert_allclose(
        jnp.swapaxes(out, 0, 1), jrnn.from_onnx(proto)({"x": x})["out"], atol=1e-6
    )


def test_external_and_sparse_tensors_are_read(tmp_path):
    proto, x = lstm(), np.ones((5, 2, 3), np.float32)
    expected = jrnn.from_onnx(proto)({"x": x})["out"]
    onnx.save(
        proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0
    )
    np.testing.assert_array_equal(jrnn.from_onnx(tmp_path / "m.onnx")({"x": x})["out"], expected)
    (tmp_path / "m.data").unlink()
    with pytest.raises(FormatError, match="cannot be read as ONNX"):
        jrnn.from_onnx(tmp_path / "m.onnx")
    (tmp_path / "predict_net.pb").write_bytes(b"no ONNX")
    with pytest.raises(
        FormatError, match="cannot be read as ONNX: .*; jrnn.read_net reads nets of Caffe2"
    ):
        jrnn.from_onnx(tmp_path / "predict_net.pb")

    sparse = lstm()
    dense = numpy_helper.to_array(sparse.graph.initializer[3])
    values = numpy_helper.from_array(dense.reshape(-1), "V")
    del sparse.graph.initializer[3]
    indices = numpy_helper.from_array(np.arange(8), "V_indices")
    sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 2]))
    np.testing.assert_array_equal(jrnn.from_onnx(sparse)({"x": x})["out"], expected)


@pytest.mark.parametrize("where", [False, True])
@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("y = Gather <axis = 0> (x, i)", r"the index (7|-4) is out of range of an axis of size 3"),
        (
            "y = GatherElements <axis = 0> (x, i)",
            r"the index (7|-4) is out of range of an axis of size 3",
        ),
        ("y = GatherND (x, i)", r"the index (7|-4) is out of range of an axis of size 3"),
        (
            "f = Cast <to = 1> (i) y = ScatterElements (x, i, f)",
            r"the index (7|-4) is out of range of an axis of size 3",
        ),
        (
            "s = Constant <value = float[2] {0.0, 1.0}> () y = Resize (x, , s)",
            r"resizes by \[0.0, 1.0\]; scales and sizes",
        ),
        (
            "s = Constant <value = int64[2] {0, 2}> () y = Resize (x, , , s)",
            r"resizes by \[0.0, 1.0\]; scales and sizes",
        ),
    ],
)
def test_what_cannot_be_computed_is_no_number(op, rule, where):
    model = read(f"n (float[3,2] x, int64[3,1] i) => (float y) {{ {op} }}")
    indices = np.array([[0], [-4 if where else 7], [1]])
    with pytest.raises((ConversionError, OpError), match=rule):
        model({"x": np.ones((3, 2), np.float32), "i": indices})


def test_indices_that_are_traced_and_out_of_range_pick_nan():
    model = read(
        "n (float[3,2] x, int64[3,1] i) => (float[a, b, c] y) { y = Gather <axis = 0> (x, i) }"
    )
    x, indices = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[0], [3], [-1]], np.int32)
    y = jax.jit(lambda i: model({"x": x, "i": i})["y"])(indices)
    np.testing.assert_array_equal(y, [[[0, 1]], [[np.nan, np.nan]], [[4, 5]]])


def test_a_hidden_size_that_contradicts_the_weights_is_named():
    proto = lstm()
    next(a for a in proto.graph.node[0].attribute if a.name == "hidden_size").i = 5
    with pytest.raises((ConversionError, FormatError), match="hidden_size|4"):
        jrnn.from_onnx(proto)({"x": jnp.ones((5, 2, 3))})


def test_a_file_of_pytorch_0_3_is_read():
    """It names an operator set, which versions of the format below 3 do not know."""
    given = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    node = helper.make_node("Add", ["x", "b"], ["y"], broadcast=1, axis=1)
    shapes = {"x": [1, 2, 3], "b": [2], "y": [1, 2, 3]}
    infos = {
        name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    }
    bias = numpy_helper.from_array(np.float32([10, 20]), "b")
    graph = helper.make_graph([node], "old", [infos["x"], infos["b"]], [infos["y"]], [bias])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 2)], ir_version=2)
    y = jrnn.from_onnx(model)({"x": given})["y"]
    np.testing.assert_array_equal(y, given + np.float32([[10], [20]]))
    assert model.ir_version == 2


def test_what_is_wrong_is_named(tmp_path):
    model = jrnn.from_onnx(lstm())
    with pytest.raises(OpError, match=r"the input x: float32\[T, N, 3\] is missing"):
        model({})
    with pytest.raises(OpError, match=r"no input is called 'X'; the inputs are \['x'\]"):
        model({"X": 1})
    with pytest.raises(
        OpError, match=r"inputs are a dict .*, as in model\(\{'x': x\}\), but are a ndarray"
    ):
        model(np.ones((5, 2, 3)))
    with pytest.raises(OpError, match=r"int64\[5, 2, 3\] was given for the input x: float32"):
        model({"x": np.ones((5, 2, 3), np.int64)})
    with pytest.raises(OpError, match=r"float32\[5, 2, 4\] was given"):
        model({"x": jnp.ones((5, 2, 4))})
    with pytest.raises(OpError, match="no parameter is called 'w'"):
        model({"x": jnp.ones((5, 2, 3))}, {"w": 1})
    with pytest.raises(
        ConversionError, match=r"node LSTM -> .*: W is \[1, 16, 3\] but must be \[1, 20, 3\]"
    ):
        model({"x": jnp.ones((5, 2, 3))}, {"R": jnp.ones((1, 16, 5))})
    with pytest.raises(UnknownOperatorError, match=r"node Det -> 'y': jrnn has no operator 'Det'"):
        read("agraph (float[2, 2] x) => (float y) { y = Det(x) }")
    with pytest.raises(FormatError, match="no such file"):
        jrnn.from_onnx(tmp_path / "missing.onnx")
    with pytest.raises(
        OpError, match=r"node Reshape -> 'y': cannot be run on \(float32\[2\], int64\[1\]\)"
    ):
        read(
            "agraph (float[2] x) => (float[3] y) { s = Constant <value_ints = [3]> ()  y = Reshape(x, s) }"
        )({"x": jnp.ones(2)})


def test_damaged_files_end_in_an_error():
    """Bytes changed at random: an error of jrnn, or a model that runs or refuses in the same way."""
    rng, good = random.Random(0), lstm().SerializeToString()
    ends = {"read": 0, "refused": 0}
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 2, 8])):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            jrnn.from_onnx(bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])]))
            ends["read"] += 1
        except JrnnError:
            ends["refused"] += 1
    assert min(ends.values()) > 10, ends


def test_all_cases_were_found():
    families = collections.Counter(
        name.removeprefix("test_").removeprefix("simple_")[:2] for name in NODE_CASES
    )
    least = {
        "rn": 4,
        "gr": 4,
        "ls": 4,
        "if": 3,
        "lo": 3,
        "sc": 2,
    }  # onnx 1.19; 1.23 has 6, 6, 6, 3, 3, 4
    assert families.keys() == least.keys() and all(
        families[name] >= count for name, count in least.items()
    ), families


@pytest.mark.sample(
    "test_simple_rnn_batchwise",
    "test_simple_rnn_reverse",
    "test_lstm_with_initial_bias",
    "test_if",
    "test_if_seq",
    "test_if_opt",
    "test_loop11",
    "test_loop13_seq",
    "test_loop16_seq_none",
    "test_scan_sum",
    "test_scan9_sum",
    "test_scan9_multi_state",
    "test_scan9_scalar",
)
@pytest.mark.parametrize("name", NODE_CASES)
def test_node(name):
    case = NODE_CASES[name]
    model = jrnn.from_onnx(case.model)
    for inputs, expected in case.data_sets:
        actual = model({spec.name: value for spec, value in zip(model.inputs, inputs, strict=True)})
        assert len(actual) == len(expected)
        for value, other in zip(actual.values(), expected, strict=True):
            same(value, other, case.rtol)


def same(value, other, rtol):
    if isinstance(other, list):
        assert len(value) == len(other)
        for a, b in zip(value, other, strict=True):
            same(a, b, rtol)
        return
    assert value.shape == np.shape(other)
    np.testing.assert_allclose(
        np.asarray(value, np.float64), np.asarray(other, np.float64), rtol=rtol, atol=1e-6
    )


@pytest.mark.sample("dynamo-GRU-0")
@pytest.mark.parametrize("case", EXPORTS)
def test_export(case):
    model = jrnn.from_onnx(GOLDEN[f"{case}|file"].tobytes())
    (tokens,) = model.inputs
    outputs = jax.jit(lambda x: model({tokens.name: x}))(GOLDEN[f"{case}|tokens"])
    for k, spec in enumerate(model.outputs):
        np.testing.assert_allclose(outputs[spec.name], GOLDEN[f"{case}|output{k}"], atol=1e-6)


def test_every_exporter_and_kind_was_recorded():
    assert len(EXPORTS) == 18


@pytest.mark.exhaustive
def test_page():
    failed, attempted = doctest.testfile(str(DOCS / "onnx.md"), module_relative=False)
    assert failed == 0 and attempted > 20


LATE = """
import sys, jrnn
assert not {'onnx', 'onnxruntime'} & set(sys.modules)
assert jrnn.from_onnx.__name__ == 'from_onnx'
"""


@pytest.mark.exhaustive
def test_onnx_loads_when_it_is_asked_for():
    subprocess.run([sys.executable, "-c", LATE], check=True)
    without = """
import sys; sys.modules["onnx"] = None
import inspect, pydoc, jrnn
from jrnn import *
from jrnn import from_onnx
assert scan is jrnn.scan and "onnx" not in globals() and not hasattr(jrnn, "onnx")
members = dict(inspect.getmembers(jrnn))
assert members["to_onnx"] is jrnn.to_onnx and "needs the extra" in pydoc.render_doc(jrnn)
from_onnx(b"")
"""
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.stderr.endswith(
        "ImportError: jrnn.from_onnx needs the extra 'onnx': pip install 'jrnn[onnx]'\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        "s = Constant <value = int64[2] {1099511627776, 3}> () y = Expand(x, s)",
        "s = Constant <value = int64[1] {1099511627776}> () y = Tile(x, s)",
        "s = Constant <value = int64[2] {0, 1099511627776}> () y = Pad(x, s)",
        "s = Constant <value = int64[2] {1099511627776, 1099511627776}> () y = ConstantOfShape(s)",
        "s = Constant <value = int64[2] {0, 4611686018427387904}> () y = ConstantOfShape(s)",
        "a = Constant <value = int64 {0}> () b = Constant <value = int64 {1099511627776}> () "
        "c = Constant <value = int64 {1}> () y = Range(a, b, c)",
        "s = Constant <value = float[1] {3000000000.0}> () y = Resize(x, , s)",
        "s = Constant <value = int64[3] {1, 1, 3}> () z = Reshape(x, s) "
        "y = AveragePool <kernel_shape = [2], pads = [4000000000, 4000000000]> (z)",
        "a = Constant <value = int64 {0}> () b = Constant <value = int64 {90000}> () c = Constant <value = int64 {1}> () "
        "s = Constant <value = int64[1] {1}> () r = Range(a, b, c) q = Unsqueeze(r, s) y = Add(r, q)",
    ],
)
def test_no_node_begins_what_does_not_fit(body):
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    model = jrnn.from_onnx(
        onnx.parser.parse_model(head + f"n (float[N] x) => (float[M] y) {{ {body} }}")
    )
    with pytest.raises(OpError, match="node .*-> 'y': .*bytes"):
        model({"x": jnp.ones(3)})
