"""Operators of ONNX beyond recurrent ones: ONNX's own backend node tests, and what files of other exporters need."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.test.case import node as cases
from onnxruntime.quantization import quantize_dynamic

import jrnn
from jrnn.errors import ConversionError, UnknownOperatorError

# fmt: off
FAMILIES = [
    "averagepool", "cast", "castlike", "convinteger", "convtranspose", "dequantizelinear", "dynamicquantizelinear",
    "eyelike", "matmulinteger", "maxpool", "qlinearconv", "qlinearmatmul", "quantizelinear", "reducel1", "reducemax",
    "reducemin", "reducesumsquare", "resize", "upsample",
    "bitcast", "bitshift", "compress", "cumprod", "cumsum", "dft", "lpnormalization",
    "melweightmatrix", "stft", "tensorscatter", "unique",
]
# Those that ONNX defines by functions.
FUNCTIONS = [
    "affinegrid", "attention", "blackmanwindow", "causal_conv_with_state", "center_crop_pad", "depthtospace",
    "groupnormalization", "hammingwindow", "hannwindow", "linear_attention", "meanvariancenormalization",
    "negativeloglikelihoodloss", "rmsnormalization", "rotaryembedding", "sequence_map", "shrink",
    "softmax_cross_entropy_loss", "spacetodepth", "swiglu", "swish",
]
# fmt: on
HEAD = '<ir_version: 8, opset_import: ["" : 19]>'


def parsed(text):
    return parser.parse_model(HEAD + text)


def onnxruntime_of(model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {name: np.asarray(value) for name, value in feeds.items()})


def array(value):
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def node_cases(family):
    """The cases of a family, which its module computes when it is imported."""
    before = len(cases._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own warnings
        pytest.importorskip(
            f"onnx.backend.test.case.node.{family}"
        )  # older releases lack newer operators
    return cases._NodeTestCases[before:]


@pytest.mark.parametrize("family", FAMILIES + FUNCTIONS)
def test_node(family, x64, subtests, pytestconfig):
    """All cases of a family if exhaustive, else its first and every seventh of the others."""
    family_cases = node_cases(family)
    assert family_cases
    for case in family_cases if pytestconfig.getoption("--exhaustive") else family_cases[::7]:
        with subtests.test(case.name):
            assert_node(case)


def assert_node(case):
    model = jrnn.from_onnx(case.model)
    for inputs, expected in case.data_sets:
        actual = model(
            {spec.name: array(value) for spec, value in zip(model.inputs, inputs, strict=True)}
        )
        for value, other in zip(
            *(jax.tree.leaves(list(v)) for v in (actual.values(), map(array, expected))),
            strict=True,
        ):
            assert (value.shape, value.dtype) == (other.shape, other.dtype)
            coarse = {jnp.bfloat16: 1e-2, np.float16: 1e-3}.get(value.dtype.type, 1e-6)
            value, other = (np.asarray(v).astype(np.float64) for v in (value, other))
            largest = np.max(np.abs(other), initial=1.0, where=np.isfinite(other))
            np.testing.assert_allclose(
                value, other, rtol=max(case.rtol, coarse), atol=coarse * largest
            )


X = np.random.default_rng(0).standard_normal((1, 2, 5, 7)).astype(np.float32)
BYTES = (X * 40 + 128).astype(np.uint8)
W = np.random.default_rng(1).standard_normal((2, 3, 3, 2)).astype(np.float32)
ROWS, COLUMNS = X[0, 0], np.random.default_rng(2).standard_normal((7, 4)).astype(np.float32)
SCALES, HALVES = np.float32([0.02, 0.01, 0.03, 0.04]), np.full(7, 0.5, np.float32)
AGAINST = {  # what is compared with onnxruntime: an operator, its inputs, its attributes, and the number of outputs
    "float8 saturates": (
        "Cast",
        [np.float32([1e6, 449, -500])],
        {"to": TensorProto.FLOAT8E4M3FN},
        1,
    ),
    "diagonal of a type": ("EyeLike", [X[0, 0]], {"dtype": TensorProto.INT64, "k": 1}, 1),
    "pool of bytes": (
        "MaxPool",
        [BYTES],
        {"kernel_shape": [2, 2], "ceil_mode": 1, "strides": [2, 3]},
        1,
    ),
    "places of maxima": (
        "MaxPool",
        [X],
        {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1], "strides": [2, 2]},
        2,
    ),
    "padded windows": (
        "AveragePool",
        [X],
        {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1, "pads": [1] * 4},
        1,
    ),
    "transpose": (
        "ConvTranspose",
        [X, W],
        {"strides": [2, 3], "output_padding": [1, 2], "pads": [1, 0, 0, 1]},
        1,
    ),
    "transpose, size": ("ConvTranspose", [X, W], {"strides": [2, 3], "output_shape": [10, 21]}, 1),
    "transpose, groups": (
        "ConvTranspose",
        [X, W],
        {"group": 2, "dilations": [2, 1], "auto_pad": "SAME_UPPER"},
        1,
    ),
    "linear": ("Resize", [X, "", np.float32([1, 1, 1.7, 0.6])], {"mode": "linear"}, 1),
    "cubic": (
        "Resize",
        [X, "", "", np.array([1, 2, 9, 3])],
        {"mode": "cubic", "exclude_outside": 1},
        1,
    ),
    "nearest": (
        "Resize",
        [BYTES, "", np.float32([1, 1, 2, 0.5])],
        {"coordinate_transformation_mode": "asymmetric"},
        1,
    ),
    "corners": (
        "Resize",
        [X, "", "", np.array([1, 2, 3, 11])],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        1,
    ),
    "quantized": (
        "QuantizeLinear",
        [X, np.float32([0.02, 0.01]), np.int8([3, -5])],
        {"axis": 1},
        1,
    ),
    "dequantized": ("DequantizeLinear", [BYTES, np.float32(0.02), np.uint8(130)], {}, 1),
    "dynamic": ("DynamicQuantizeLinear", [X], {}, 3),
    "integers": (
        "MatMulInteger",
        [BYTES[0, 0], BYTES[0, 1].T, np.uint8(128), np.uint8(100)],
        {},
        1,
    ),
    "product": ("com.microsoft.FusedMatMul", [X, X], {"transB": 1, "alpha": 0.3}, 1),
    "product, batch": (
        "com.microsoft.FusedMatMul",
        [X[0], X[0]],
        {"transBatchA": 1, "transBatchB": 1, "transA": 1},
        1,
    ),
    "affine": (
        "com.microsoft.FusedGemm",
        [ROWS, COLUMNS, COLUMNS[0]],
        {"alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.2},
        1,
    ),
    "convolution": (
        "com.microsoft.FusedConv",
        [X, W[:, :2]],
        {"activation": "Clip", "activation_params": [-0.5, 2.0]},
        1,
    ),
    "convolution and sum": (
        "com.microsoft.FusedConv",
        [X, W[:, :2, :1, :1], HALVES[:2], -X],
        {"activation": "Relu"},
        1,
    ),
    "gelu": ("com.microsoft.Gelu", [X], {}, 1),
    "gelu with bias": ("com.microsoft.BiasGelu", [X, HALVES], {}, 1),
    "fast gelu": ("com.microsoft.FastGelu", [X, HALVES], {}, 1),
    "quick gelu": ("com.microsoft.QuickGelu", [X], {"alpha": 1.5}, 1),
    "residual norm": (
        "com.microsoft.SkipLayerNormalization",
        [X[0], -2 * X[0], HALVES, HALVES, HALVES],
        {"epsilon": 0.1},
        1,
    ),
    "residual sum": ("com.microsoft.SkipLayerNormalization", [X[0], X[0, 1:], HALVES], {}, (0, 3)),
    "residual root": (
        "com.microsoft.SkipSimplifiedLayerNormalization",
        [X[0], X[0], HALVES, HALVES],
        {},
        (0, 3),
    ),
    "root": ("SimplifiedLayerNormalization", [X, HALVES], {"epsilon": 0.1}, 1),
    "bytes by one scale": (
        "com.microsoft.DynamicQuantizeMatMul",
        [ROWS, BYTES[0, 0].T, np.float32(0.02), np.uint8(100), HALVES[:5]],
        {},
        1,
    ),
    "bytes by columns": (
        "com.microsoft.MatMulIntegerToFloat",
        [
            BYTES[0],
            BYTES[0, 0, :4].T,
            np.float32(0.1),
            SCALES,
            np.uint8(128),
            np.uint8([100, 90, 0, 255]),
            SCALES,
        ],
        {},
        1,
    ),
    "recurrence": (
        "LinearAttention",
        [X[0], X[0], X[0], "", -abs(X[0, :, :, :1]), 1 / (1 + abs(X[0, :, :, 1:2]))],
        {"q_num_heads": 1, "kv_num_heads": 1},
        2,
    ),
    "spectrum": ("DFT", [X[..., :1], np.int64(4), np.int64(2)], {"onesided": 1}, 1),
    "frames": ("STFT", [X[0, :, :, :1], np.int64(2), HALVES[:3]], {}, 1),
    "bits": ("BitShift", [BYTES, np.uint8([2])], {"direction": "LEFT"}, 1),
    "blocks": ("DepthToSpace", [X.reshape(1, 10, 1, 7)[:, :8]], {"blocksize": 2, "mode": "CRD"}, 1),
    "largest of none": ("ReduceMax", [np.zeros((2, 0), np.float32)], {"keepdims": 0}, 1),
}


@pytest.mark.parametrize("name", AGAINST)
def test_against_onnxruntime(name):
    kind, inputs, attributes, outs = AGAINST[name]
    given = {f"i{k}": v for k, v in enumerate(inputs) if not isinstance(v, str)}
    names = [f"i{k}" if f"i{k}" in given else "" for k in range(len(inputs))]
    outs = range(outs) if isinstance(outs, int) else outs
    outputs, (domain, _, kind) = [f"o{k}" for k in outs], kind.rpartition(".")
    places = [f"o{k}" if k in outs else "" for k in range(max(outs) + 1)]
    node = helper.make_node(kind, names, places, domain=domain, **attributes)
    consts = {n: v for n, v in given.items() if n != "i0"}
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(
                "i0", helper.np_dtype_to_tensor_dtype(inputs[0].dtype), inputs[0].shape
            )
        ],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        [numpy_helper.from_array(v, n) for n, v in consts.items()],
    )
    opset = {"DFT": 20, "LinearAttention": 27}.get(kind, 19)
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("onnx is older than the operator")
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=opsets, ir_version=9)
    )
    for value in model.graph.output:
        if not value.type.WhichOneof("value"):  # of an operator that this package does not know
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    if attributes.get("to"):  # onnxruntime has no arrays of these types
        model.graph.node.append(helper.make_node("Cast", ["o0"], ["wide"], to=TensorProto.FLOAT))
        model.graph.output[0].CopyFrom(
            helper.make_tensor_value_info("wide", TensorProto.FLOAT, [None])
        )
    expected = onnxruntime_of(model, {"i0": inputs[0]})
    actual = jax.jit(jrnn.from_onnx(model))({"i0": jnp.asarray(inputs[0])})
    for value, other in zip(actual.values(), expected, strict=True):
        assert value.shape == other.shape
        np.testing.assert_allclose(np.asarray(value, np.float64), other, atol=3e-6)


@pytest.mark.exhaustive("bidirectional")
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_quantized_lstm_equals_onnxruntime(direction, tmp_path):
    rng, steps, batch, size, hidden, k = (
        np.random.default_rng(0),
        6,
        3,
        5,
        8,
        2 if direction == "bidirectional" else 1,
    )
    shapes = {"W": (k, 4 * hidden, size), "R": (k, 4 * hidden, hidden), "B": (k, 8 * hidden)}
    graph = helper.make_graph(
        [
            helper.make_node(
                "LSTM", ["x", "W", "R", "B"], ["y", "h"], hidden_size=hidden, direction=direction
            )
        ],
        "lstm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, size])],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * rank)
            for n, rank in (("y", 4), ("h", 3))
        ],
        [
            numpy_helper.from_array(rng.uniform(-0.5, 0.5, s).astype(np.float32), n)
            for n, s in shapes.items()
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "f.onnx",
    )
    # Weights of 7 bits: sums of 8-bit products saturate in onnxruntime on processors without VNNI.
    quantize_dynamic(tmp_path / "f.onnx", tmp_path / "q.onnx", reduce_range=True)
    quantized = onnx.load(tmp_path / "q.onnx")
    assert [node.op_type for node in quantized.graph.node] == ["DynamicQuantizeLSTM"]
    x = rng.standard_normal((steps, batch, size)).astype(np.float32)
    model = jrnn.from_onnx(quantized)
    outputs = jax.jit(model)({"x": x})
    for name, other in zip(("y", "h"), onnxruntime_of(quantized, {"x": x}), strict=True):
        np.testing.assert_allclose(outputs[name], other, atol=1e-6)
    quantized.graph.node[0].op_type = "Attention"
    with pytest.raises(
        UnknownOperatorError, match="this operator of the domain 'com.microsoft' is not read"
    ):
        jrnn.from_onnx(quantized)


DRAWS = {
    "RandomNormalLike": (0.0, 1.0),
    "RandomUniformLike": (0.5, 12**-0.5),
    "Bernoulli": (0.25, 0.1875**0.5),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_come_from_the_key(kind):
    model = jrnn.from_onnx(
        parsed(
            f"agraph (float[N] x) => (float[N] y, float[N] z) {{ y = {kind}(x)  z = {kind}(x) }}"
        )
    )
    feeds = {"x": np.full(5000, 0.25, np.float32)}
    y, z = jax.jit(model)(feeds, key=jax.random.key(0)).values()
    mean, deviation = DRAWS[kind]
    assert abs(y.mean() - mean) < 0.05 and abs(y.std() - deviation) < 0.05 and (y != z).any()
    np.testing.assert_array_equal(model(feeds, key=jax.random.key(0))["y"], y)
    assert (model(feeds, key=jax.random.key(1))["y"] != y).any()
    with pytest.raises(
        ConversionError, match=r"-> .*: it draws random numbers and has no key; pass one: key="
    ):
        model(feeds)


def test_a_node_with_a_seed_needs_no_key():
    model = jrnn.from_onnx(
        parsed("""agraph (float[2, 3] x) => (float[4, 2] y, int32[2, 5] z) {
        y = RandomUniform <shape = [4, 2], low = 2.0, high = 3.0, seed = 1.5> ()
        z = Multinomial <sample_size = 5, seed = 1.0> (x)
    }""")
    )
    logits = np.float32([[-np.inf, 0, -np.inf], [0, -np.inf, -np.inf]])
    y, z = model({"x": logits}).values()
    assert y.min() >= 2 and y.max() < 3 and len(np.unique(y)) == 8
    assert z.tolist() == [[1] * 5, [0] * 5]
    np.testing.assert_array_equal(model({"x": logits})["y"], y)


def test_random_numbers_in_a_loop_are_refused():
    model = jrnn.from_onnx(
        parsed("""agraph (float[N] x) => (float[N] y) {
        n = Constant <value_int = 2> ()  go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <body = body (int64 i, bool c, float[N] a) => (bool d, float[N] b)
            { d = Identity(c)  b = RandomNormalLike(a) }>
    }""")
    )
    with pytest.raises(
        ConversionError, match="it is in a loop, where each step would draw the same numbers"
    ):
        model({"x": np.ones(2, np.float32)}, key=jax.random.key(0))


@pytest.mark.parametrize("opset", [11, 13, 18, 21, 23])
def test_functions_of_onnx_have_no_parameters_of_their_own(opset):
    """GroupNormalization is of operator set 18, with one scale a group before 21; DepthToSpace's function is of 28."""
    normalized = (
        "GroupNormalization <num_groups = 2> (x, scale, bias)" if opset >= 18 else "Identity(x)"
    )
    text = f"""agraph (float[2, 4, 3, 3] x, float[M] scale, float[M] bias) => (float[2, 1, A, B] y) {{
        w = Constant <value = float[1] {{2.0}}> ()  a = {normalized}  b = Mul(a, w)  y = DepthToSpace <blocksize = 2> (b)
    }}"""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>' + text)
    model = jrnn.from_onnx(proto)
    assert list(model.params) == ["w"]
    assert "DepthToSpace" in {node.op_type for node in model.proto.graph.node}  # what is saved
    per = np.ones(2 if opset < 21 else 4, np.float32)
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)
    y = model({"x": x, "scale": per, "bias": per})["y"]
    groups = x.reshape(2, 2, 18)
    normal = (groups - groups.mean(2, keepdims=True)) / np.sqrt(
        groups.var(2, keepdims=True) + 1e-5
    ) + 1
    blocks = (2 * (x if opset < 18 else normal)).reshape(2, 2, 2, 1, 3, 3)
    np.testing.assert_allclose(y, blocks.transpose(0, 3, 4, 1, 5, 2).reshape(2, 1, 6, 6), atol=1e-5)


def test_onnxruntime_adds_operators_to_older_sets():
    """It writes LayerNormalization, which is of operator set 17, into files of older ones."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        agraph (float[N, 3] x, float[3] s) => (float[N, 3] y) { y = LayerNormalization <epsilon = 0.1> (x, s) }"""
    )
    feeds = {"x": X[0, 0, :, :3], "s": np.float32([1, 2, 3])}
    np.testing.assert_allclose(
        jrnn.from_onnx(proto)(feeds)["y"], onnxruntime_of(proto, feeds)[0], atol=1e-6
    )


BAD_FRAMES = {
    "y = STFT(x, step, , length)": "frames of 9 samples every 2, without a window, of 8 samples",
    "y = STFT(x, step, window)": r"frames of 9 samples every 2, with a window of \[9\], of 8 samples",
}


@pytest.mark.parametrize("body", BAD_FRAMES)
def test_frames_that_do_not_fit_are_refused(body):
    head = "step = Constant <value_int = 2> ()  length = Constant <value_int = 9> ()"
    model = jrnn.from_onnx(
        parsed(
            f"n (float[1, 8, 1] x, float[9] window) => (float[A, B, C, 2] y) {{ {head}  {body} }}"
        )
    )
    with pytest.raises(ConversionError, match=BAD_FRAMES[body]):
        model({"x": np.ones((1, 8, 1), np.float32), "window": np.ones(9, np.float32)})


def test_unique_needs_values_that_are_known():
    model = jrnn.from_onnx(parsed("n (int64[N] x) => (int64[M] y) { y = Unique(x) }"))
    assert model({"x": np.array([3, 1, 3])})["y"].tolist() == [1, 3]
    with pytest.raises(ConversionError, match="its input depends on values that are not known"):
        jax.jit(lambda x: model({"x": x}))(jnp.array([3, 1, 3]))


DOUBLE = "agraph (float[N] x) => (float[N] y) { y = Add(x, x) }"


def test_sizes_and_shapes_that_exporters_leave_open():
    x = np.ones(3, np.float32)
    negative, plain = parsed(DOUBLE), parsed(DOUBLE)
    negative.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert str(jrnn.from_onnx(negative).inputs[0]) == "x: float32[?]"
    for value in (plain.graph.output[0], plain.graph.input[0]):
        value.type.tensor_type.ClearField("shape")
        (expected,) = onnxruntime_of(plain, {"x": x})
        np.testing.assert_array_equal(jrnn.from_onnx(plain)({"x": x})["y"], expected)
    for model in (negative, plain):
        assert jrnn.from_onnx(model)({"x": x})["y"].tolist() == [2.0] * 3


def test_a_loop_of_no_steps_has_outputs_without_rows():
    model = parsed("""agraph (float[N] x, float top, int64 n) => (float[N] y, float[K, N] all) {
        zero = Constant <value = float {0}> ()  on = Less(zero, top)
        y, all = Loop (n, on, x) <body = body (int64 i, bool c, float[N] a) => (bool d, float[N] b, float[N] s)
            { b = Add(a, a)  s = Identity(b)  t = ReduceMax <keepdims = 0> (b)  d = Less(t, top) }>
    }""")
    for top, steps in ((-1, 5), (1, 0), (5, 9)):
        feeds = {"x": np.ones(2, np.float32), "top": np.float32(top), "n": np.int64(steps)}
        y, rows = jrnn.from_onnx(model)(feeds).values()
        expected = onnxruntime_of(model, feeds)
        np.testing.assert_array_equal(y, expected[0])
        assert rows.shape == (len(expected[1]), 2)


COUNTERS = {  # Loops that compute with their counter, and what their inputs are
    "its square at every step": (
        """agraph (int64 n) => (int64[K] all) {
            go = Constant <value = bool {1}> ()
            all = Loop (n, go) <body = body (int64 i, bool c) => (bool d, int64 s) { d = Identity(c)  s = Mul(i, i) }>
        }""",
        {"n": 46342},
    ),
    "a carry that is set to it": (
        """agraph (int64 n, int64 z) => (int64 y) {
            go = Constant <value = bool {1}> ()
            y = Loop (n, go, z) <body = body (int64 i, bool c, int64 a) => (bool d, int64 b)
                { d = Identity(c)  b = Identity(i) }>
        }""",
        {"n": 2000, "z": 0},
    ),
    "a carry that ends it": (
        """agraph (int64 n, int64 z) => (int64 y) {
            top = Constant <value = int64 {3000000000}> ()  go = Constant <value = bool {1}> ()
            y = Loop (n, go, z) <body = body (int64 i, bool c, int64 a) => (bool d, int64 b)
                { b = Mul(i, i)  d = Less(b, top) }>
        }""",
        {"n": (1 << 63) - 1, "z": 0},
    ),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_the_counter_of_a_loop_is_an_int64_as_in_onnxruntime(name, x64):
    model, feeds = (
        parsed(COUNTERS[name][0]),
        {key: np.int64(value) for key, value in COUNTERS[name][1].items()},
    )
    (expected,), run = onnxruntime_of(model, feeds), jrnn.from_onnx(model)
    traced = jax.make_jaxpr(lambda: run(feeds))()
    assert any(f"{loop}[" in str(traced) for loop in ("scan", "while"))  # and not each of its steps
    (actual,) = run(feeds).values()
    assert actual.dtype == expected.dtype == np.int64
    np.testing.assert_array_equal(actual, expected)


def test_a_loop_with_32_bit_types_runs_to_a_limit_that_only_64_bits_hold():
    text, feeds = COUNTERS["a carry that ends it"]
    model = jrnn.from_onnx(parsed(text.replace("3000000000", "1000")))
    assert model({key: np.int64(value) for key, value in feeds.items()})["y"] == 1024


def test_integers_that_do_not_fit_32_bits_warn():
    proto = parsed("agraph (int64[N] x) => (int64[N] y) { y = Mul(x, x) }")
    square = jrnn.from_onnx(proto)
    with pytest.warns(
        UserWarning, match="the output 'y': a number does not fit int32 and wraps around"
    ):
        square({"x": np.array([1 << 16])})
    assert square({"x": np.array([3])})["y"].tolist() == [9]
    with jax.enable_x64(True):
        assert jrnn.from_onnx(proto)({"x": np.array([1 << 16])})["y"].tolist() == [1 << 32]
    known = jrnn.from_onnx(
        parsed("""agraph (int64[N] x) => (int64[N] y)
        { a = Constant <value_ints = [65536]> ()  b = Mul(a, a)  y = Add(x, b) }""")
    )
    with pytest.warns(UserWarning, match="a number does not fit int32 and wraps around"):
        jax.jit(known)({"x": jnp.array([1])})
    clipped = jrnn.from_onnx(
        parsed(f"""agraph (int64[N] x) => (int64[N] y)
        {{ low = Constant <value_int = 0> ()  high = Constant <value_int = {(1 << 63) - 1}> ()  y = Clip(x, low, high) }}""")
    )
    assert clipped({"x": jnp.array([-1, 5])})["y"].tolist() == [0, 5]


@pytest.mark.parametrize("activation", ["Affine", "ScaledTanh", "ThresholdedRelu"])
def test_an_activation_without_alpha_has_the_standard_one(activation):
    def model(**attributes):
        weights = {
            "W": np.full((1, 2, 2), 0.5, np.float32),
            "R": np.full((1, 2, 2), -0.2, np.float32),
        }
        graph = helper.make_graph(
            [
                helper.make_node(
                    "RNN",
                    ["x", "W", "R"],
                    ["y"],
                    hidden_size=2,
                    activations=[activation],
                    **attributes,
                )
            ],
            "rnn",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 1, 2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 1, 1, 2])],
            [numpy_helper.from_array(v, n) for n, v in weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    x = np.linspace(0.5, 3, 6, dtype=np.float32).reshape(3, 1, 2)
    given = {"activation_alpha": [1.0]} | (
        {}
        if activation == "ThresholdedRelu"
        else {"activation_beta": [float(activation != "Affine")]}
    )
    (expected,) = onnxruntime_of(model(**given), {"x": x})
    np.testing.assert_allclose(jrnn.from_onnx(model())({"x": x})["y"], expected, atol=1e-6)
