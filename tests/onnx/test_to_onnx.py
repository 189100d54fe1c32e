"""to_onnx: each call below has been compared with onnxruntime by `to_onnx` itself, at the examples' sizes and at others."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.errors import ConversionError
from jrnn.onnx import primitives, write

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
OPTIONS = [{}, {"bidirectional": True, "num_layers": 2}, {"batch_first": True}, {"bias": False}]
X = jax.random.normal(jax.random.key(0), (4, 3, 2))


INTEGERS_OF = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


def types(model):
    return collections.Counter(node.op_type for node in model.graph.node)


def run(model, *args):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    inputs = zip(session.get_inputs(), args, strict=True)
    return session.run(None, {i.name: np.asarray(a, INTEGERS_OF.get(i.type)) for i, a in inputs})


LAYERS = {
    "MinGRU": {}, "MinLSTM": {}, "LRU": {}, "S5": {},
    "IndRNN": {}, "RGLRU": {}, "SLSTM": {}, "Mamba": {}, "MLSTM": {"num_heads": 2},
    "Mamba2": {"num_heads": 2}, "RetNet": {"num_heads": 2}, "GLA": {"num_heads": 2}, "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2}, "RWKV7": {"num_heads": 2},
}  # fmt: skip


@pytest.mark.sample("RGLRU")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_are_steps_become_scans_with_open_sizes(kind):
    layer = getattr(nn, kind)(16, rngs=nnx.Rngs(0), **LAYERS[kind])
    x = jax.random.normal(jax.random.key(1), (3, 2, 16))
    model = jrnn.to_onnx(layer, x, dims="T, N, ...")
    assert types(model)["Scan"]
    longer = jax.random.normal(jax.random.key(2), (5, 1, 16))
    parts = jax.tree.map(
        lambda a: {"real": a.real, "imag": a.imag} if jnp.iscomplexobj(a) else a, layer(longer)
    )
    for actual, expected in zip(run(model, longer), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["LRU", "S5"])
def test_layers_with_complex_states_have_lengths(kind):
    layer = getattr(nn, kind)(4, rngs=nnx.Rngs(0))

    def call(x, lengths):
        return layer(x, lengths=lengths)[0]

    x = jax.random.normal(jax.random.key(1), (3, 2, 4))
    model = jrnn.to_onnx(call, x, jnp.array([3, 1]), dims=("T, N, ...", "N"))
    args = jax.random.normal(jax.random.key(2), (5, 3, 4)), jnp.array([2, 0, 5])
    np.testing.assert_allclose(run(model, *args)[0], call(*args), rtol=1e-5, atol=1e-5)


def test_packed_sequences():
    layer = nn.LSTM(2, 5, rngs=nnx.Rngs(0))

    def call(x, lengths):
        packed, state = layer(nn.pack_padded_sequence(x, lengths, enforce_sorted=False))
        return nn.pad_packed_sequence(packed), state

    model = jrnn.to_onnx(call, X, jnp.array([4, 2, 1]))
    for lengths in ([4, 2, 1], [1, 4, 4], [3, 0, 2]):
        args = X[::-1], jnp.array(lengths)
        for ours, theirs in zip(jax.tree.leaves(call(*args)), run(model, *args), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_are_native_nodes_with_open_sizes(kind, options):
    module = KINDS[kind](2, 5, rngs=nnx.Rngs(0), **options)
    batch = 0 if "batch_first" in options else 1
    lengths, dims = jnp.array([3, 0, 2, 1])[: X.shape[batch]], ("A, B, ...", "AB"[batch])
    model = jrnn.to_onnx(lambda x, lengths: module(x, lengths=lengths), X, lengths, dims=dims)
    assert types(model)[kind] == options.get("num_layers", 1) and not types(model)["Scan"]
    (node, *_) = [node for node in model.graph.node if node.op_type == kind]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes.get("linear_before_reset") == (1 if kind == "GRU" else None)
    assert attributes["direction"] == (
        b"bidirectional" if options.get("bidirectional") else b"forward"
    )
    x = jax.random.normal(jax.random.key(1), (6, 4, 2) if batch else (4, 6, 2))
    lengths = jnp.array([6, 1, 0, 3])
    actual = jrnn.from_onnx(model)({"x": x, "lengths": lengths})
    for ours, back, theirs in zip(
        jax.tree.leaves(module(x, lengths=lengths)), actual.values(), run(model, x, lengths)
    ):
        np.testing.assert_allclose(back, ours, atol=1e-5)
        np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.exhaustive
def test_layers_with_resets_are_scans():
    module = nn.LSTM(2, 5, bidirectional=True, rngs=nnx.Rngs(0))

    def call(x, resets, lengths):
        return module(x, resets=resets, lengths=lengths)

    args = X, jnp.zeros((4, 3), bool).at[2].set(True), jnp.array([4, 0, 3])
    model = jrnn.to_onnx(call, *args, dims=("A, B, ...", "A, B", "B"))
    assert types(model)["Scan"] == 2 and not types(model)["LSTM"]
    args = (
        jax.random.normal(jax.random.key(1), (6, 2, 2)),
        jnp.arange(12).reshape(6, 2) % 5 == 3,
        jnp.array([6, 4]),
    )
    for ours, theirs in zip(jax.tree.leaves(call(*args)), run(model, *args), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.sample("21")
@pytest.mark.parametrize("opset", write.OPSETS)
def test_a_whole_model_in_every_operator_set(opset):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.rnn, self.head = (
                nnx.Embed(7, 2, rngs=rngs),
                nn.LSTM(2, 5, rngs=rngs),
                nnx.Linear(5, 3, rngs=rngs),
            )

        def __call__(self, tokens, state):
            y, state = self.rnn(self.embed(tokens), state)
            return jax.nn.log_softmax(self.head(y).max(0)), state

    module, tokens = Model(nnx.Rngs(0)), jnp.array([[1, 2], [6, 0], [3, 3]])
    state = (jnp.ones((1, 2, 5)), -jnp.ones((1, 2, 5)))
    model = jrnn.to_onnx(
        module, tokens, state, dims=("T, N", ("_, N, _", "_, N, _")), opset=opset, name="tagger"
    )
    assert model.opset_import[0].version == opset and model.graph.name == "tagger"
    assert [i.name for i in model.graph.input] == ["tokens", "state/0", "state/1"]
    assert {"embed/embedding", "head/kernel", "LSTM_W"} <= {t.name for t in model.graph.initializer}


@pytest.mark.exhaustive
def test_scans_are_scan_nodes():
    def model(w, x, lengths):
        def step(carry, x):
            h, k = carry
            h = jnp.tanh(x @ w + h) * jnp.float32(0.9) ** k
            return (h, k + 1), (h[:, 0], k)

        return jrnn.scan(step, (jnp.zeros((x.shape[1], 2)), jnp.int32(0)), x, reverse=True)

    def padded(w, x, lengths):
        return jrnn.scan(
            lambda c, x: (c + x @ w, c), jnp.zeros((x.shape[1], 2)), x, lengths=lengths
        )

    w, lengths = jnp.ones((2, 2)) / 3, jnp.array([4, 0, 2])
    assert types(jrnn.to_onnx(model, X, lengths, params=w, dims=("T, N, _", "N")))["Scan"] == 1
    assert types(jrnn.to_onnx(padded, X, lengths, params=w, dims=("T, N, _", "N")))["Scan"] == 1
    grads = jrnn.to_onnx(jax.grad(lambda x: padded(w, x, lengths)[0].sum()), X)
    assert types(grads)["Scan"]
    normed = nn.GRU(2, 5, layer_norm=True, rngs=nnx.Rngs(0))  # no node of ONNX is this
    assert types(jrnn.to_onnx(normed, X, dims="T, N, _"))["Scan"] == 1
    batch = jrnn.to_onnx(jax.vmap(nn.RNN(2, 5, rngs=nnx.Rngs(0))), X)
    assert types(batch)["Scan"] and not types(batch)["RNN"]
    counted = jrnn.to_onnx(
        lambda x: jrnn.scan(lambda c, _: (2 * c, c), x, None, length=3), jnp.ones(2)
    )
    assert run(counted, jnp.ones(2))[1].tolist() == [[1, 1], [2, 2], [4, 4]]


EMPTY = {  # functions of a loop of no steps
    "scan": lambda c, xs: jax.lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), c, xs),
    "reverse": lambda c, xs: jrnn.scan(lambda c, x: (c + x, x), c, xs, reverse=True),
    "length": lambda c, xs: jax.lax.scan(lambda c, _: (c * 2, c), c, None, length=0),
    "inside": lambda c, xs: jax.lax.scan(
        lambda c, x: jax.lax.scan(lambda d, y: (d + y, d), c, xs), c, jnp.ones((2, 2))
    ),
    "fori": lambda c, xs: jax.lax.fori_loop(0, 0, lambda k, c: c * 2, c),
}
EMPTY_LAYERS = {"LSTM": {"bidirectional": True}, "GRU": {}, "MinGRU": {}}


@pytest.mark.parametrize("name", [*EMPTY, *EMPTY_LAYERS])
def test_loops_of_no_steps(name):
    function = EMPTY.get(name)
    args = (jnp.ones(2), jnp.ones((0, 2)))
    if function is None:
        function = getattr(nn, name)(2, 2, rngs=nnx.Rngs(0), **EMPTY_LAYERS[name])
        args = (jnp.ones((0, 3, 2)),)
    expected = jax.tree.leaves(function(*args))
    for actual, value in zip(run(jrnn.to_onnx(function, *args), *args), expected, strict=True):
        assert actual.shape == value.shape
        np.testing.assert_array_equal(actual, value)


def test_an_example_may_have_no_steps_where_the_size_is_open():
    model = jrnn.to_onnx(EMPTY["scan"], jnp.ones(2), jnp.ones((0, 2)), dims=("...", "T, ..."))
    args = (jnp.ones(2), jnp.ones((3, 2)))
    for actual, value in zip(run(model, *args), jax.tree.leaves(EMPTY["scan"](*args)), strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-6)


def test_loops_branches_and_windows():
    def fn(x, k):
        looped = jax.lax.while_loop(
            lambda s: s[1].sum() < 50, lambda s: (s[0] + 1, 2 * s[1]), (0, jnp.abs(x))
        )
        chosen = jax.lax.switch(k, [jnp.sin, lambda x: -x, lambda x: x * looped[0]], x)
        window = jax.lax.dynamic_slice(x, (k, 1), (2, 2))
        written = jax.lax.dynamic_update_slice(x, window, (k, 0))
        return (
            looped,
            chosen,
            window,
            written,
            jnp.where(jnp.cumsum(x, 1) > 0, x[:, ::-1], x[k]),
            jnp.argmax(x, 0),
        )

    model = jrnn.to_onnx(fn, X[:, :, 0], jnp.int32(1))
    assert types(model)["Loop"] == 1 and types(model)["If"] == 1
    for k in (-3, 0, 2, 9):
        for ours, theirs in zip(
            jax.tree.leaves(fn(X[:, :, 0], k)), run(model, X[:, :, 0], np.int32(k)), strict=True
        ):
            np.testing.assert_allclose(theirs, ours, atol=1e-6)


def count_down(x):
    """Ends for whole numbers."""
    return jax.lax.while_loop(lambda s: jnp.sum(s) != 0, lambda s: s - 1, x)


def test_token_ids_are_int64_and_counters_are_as_they_come_back():
    module, table = nn.GRU(2, 5, rngs=nnx.Rngs(0)), jnp.arange(14.0).reshape(7, 2)

    def call(tokens, lengths, count, seen, logits):
        y, _ = module(table[tokens], lengths=lengths)
        last = jrnn.scan(
            lambda s, t: ((s[0] + jnp.take(table, t, axis=0).sum(), s[1] + 1), None),
            (jnp.float32(0), count),
            tokens[:, 0],
        )[0]
        looped = jax.lax.while_loop(
            lambda s: s[0] < 3,
            lambda s: (s[0] + 1, s[1] + jnp.take(table, seen, axis=0)[0]),
            (0, y[0, 0, 0]),
        )[1]
        return y, last, jnp.where(count > 0, jnp.argmax(logits), 0), seen.astype(float) + looped

    args = (
        jnp.array([[1, 2], [6, 0], [3, 3]]),
        jnp.array([3, 1]),
        jnp.int32(4),
        jnp.int32(2),
        jnp.ones(3),
    )
    model = jrnn.to_onnx(call, *args, dims=("T, N", "N", "", "", "_"))
    kinds = {
        i.name: onnx.TensorProto.DataType.Name(i.type.tensor_type.elem_type)
        for i in model.graph.input
    }
    assert kinds == {
        "tokens": "INT64",
        "lengths": "INT64",
        "count": "INT32",
        "seen": "INT64",
        "logits": "FLOAT",
    }
    for ours, theirs in zip(jax.tree.leaves(call(*args)), run(model, *args), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert jrnn.from_onnx(model)(dict(zip(kinds, args)))["output/1/1"] == 7
    with jax.enable_x64(True):
        own = jrnn.to_onnx(
            lambda x: 2 * x, jnp.ones(2, jnp.int32)
        )  # what comes back keeps its type
    assert own.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT32


NWC, NHWC = ("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC")
KERNEL, IMAGES = jnp.ones((3, 2, 5)).at[0].set(-0.3), jnp.cos(jnp.arange(120.0)).reshape(2, 5, 6, 2)
SQUARE = jnp.sin(jnp.arange(90.0)).reshape(3, 3, 2, 5)
SQUARES = jnp.cos(jnp.arange(27.0)).reshape(3, 3, 3)
INTEGERS, BOUND = jnp.arange(12).reshape(3, 4) - 5, jnp.array([0, 31, 32, 2])
WRITTEN = {  # a function, its argument, the sizes that stay open, and an operator of ONNX that it becomes
    "conv": (
        lambda x: jax.lax.conv_general_dilated(x, KERNEL, (2,), [(2, 0)], (1,), (2,), NWC),
        X,
        "N, _, _",
        "Conv",
    ),
    "conv of images": (
        lambda x: jax.lax.conv_general_dilated(x, SQUARE, (1, 2), "SAME", dimension_numbers=NHWC),
        IMAGES,
        None,
        "Conv",
    ),
    "transposed": (
        lambda x: jax.lax.conv_transpose(x, SQUARE, (2, 3), "VALID", dimension_numbers=NHWC),
        IMAGES,
        None,
        "ConvTranspose",
    ),
    "gradient of conv": (
        jax.grad(
            lambda x: jnp.sum(
                jax.lax.conv_general_dilated(x, KERNEL, (2,), "SAME", dimension_numbers=NWC) ** 2
            )
        ),
        X,
        None,
        "ConvTranspose",
    ),
    "depthwise": (
        lambda x: jax.lax.conv_general_dilated(
            x, jnp.ones((3, 1, 2)), (1,), "SAME", dimension_numbers=NWC, feature_group_count=2
        ),
        X,
        "N, T, _",
        "Conv",
    ),
    "pool": (
        lambda x: nnx.max_pool(x, (2, 3), (1, 2), "SAME") + nnx.avg_pool(x, (2, 3), (1, 2), "SAME"),
        IMAGES,
        "N, ...",
        "MaxPool",
    ),
    "sort": (
        lambda x: (jnp.sort(x, 1), jnp.argsort(-x, 0), jnp.sort(x > 0, 2)),
        X,
        "A, B, _",
        "TopK",
    ),
    "sort by two keys": (
        lambda x: jax.lax.sort((jnp.round(x), x, 2 * x), num_keys=2),
        X,
        None,
        "TopK",
    ),
    "largest": (lambda x: jax.lax.top_k(x, 2), X, "A, B, _", "TopK"),
    "running": (
        lambda x: (
            jnp.cumprod(x, 1),
            jax.lax.cummax(x, 0, reverse=True),
            jax.lax.cumlogsumexp(x, 1),
        ),
        X,
        "A, B, _",
        "Scan",
    ),
    "associative scan": (
        lambda x: jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x)),
        X,
        "_, B, _",
        "Pad",
    ),
    "pad between": (
        lambda x: jax.lax.pad(x, 0.5, ((0, 0, 0), (1, 2, 3), (0, -1, 1))),
        X,
        "A, ...",
        "Pad",
    ),
    "add at": (lambda x: x.at[:, jnp.array([1, 1, 9])].add(2.0), X, "A, B, _", "ScatterElements"),
    "set at, drop": (
        lambda x: x.at[jnp.array([3, 7]), 1].set(2.0, mode="drop"),
        X,
        None,
        "ScatterElements",
    ),
    "rows of a batch": (
        lambda x: jax.vmap(lambda x: x[jnp.array([2, 5]), jnp.array([1, 0])])(x),
        X,
        "A, ...",
        "Gather",
    ),
    "embedding's gradient": (
        jax.grad(lambda x: jnp.sum(x[jnp.array([1, 1, 0])] ** 2)),
        X,
        None,
        "ScatterElements",
    ),
    "shifts": (
        lambda x: (x >> BOUND[None], x << BOUND[None], jax.lax.shift_right_logical(x, x * 0 + 1)),
        INTEGERS,
        None,
        "Mod",
    ),
    "bits": (lambda x: (x & 3) | ~(x ^ 1), INTEGERS, None, "BitwiseXor"),
    "tile": (lambda x: jnp.tile(x, (2, 1, 3)), X, "A, B, _", "Tile"),
    "choice of three": (
        lambda x: jax.lax.select_n(INTEGERS[:, :3] % 3, x[0], 2 * x[1], x[2]),
        SQUARES,
        None,
        "Where",
    ),
    "error functions": (
        lambda x: (jax.nn.gelu(x, approximate=False), jax.scipy.special.erfc(x)),
        X,
        "A, ...",
        "Erf",
    ),
    "float16": (
        lambda x: jnp.tanh(x @ jnp.ones((2, 3), x.dtype)) * 3,
        X.astype(jnp.float16),
        None,
        "MatMul",
    ),
    "bfloat16": (
        lambda x: jnp.tanh(x @ jnp.ones((2, 3), x.dtype)) * 3,
        X.astype(jnp.bfloat16),
        None,
        "MatMul",
    ),
    "bfloat16 scan": (
        lambda x: jrnn.scan(lambda c, x: (jnp.tanh(c + x), c), x[0] * 0, x),
        X.astype(jnp.bfloat16),
        None,
        "Scan",
    ),
    "a loop that ends here": (count_down, jnp.array([3.0]), None, "Loop"),
}


@pytest.mark.exhaustive(
    "conv of images",
    "gradient of conv",
    "depthwise",
    "sort",
    "associative scan",
    "add at",
    "embedding's gradient",
    "choice of three",
    "error functions",
    "float16",
)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_computes_the_same(name):
    fn, x, dims, expected = WRITTEN[name]
    model = jrnn.to_onnx(fn, x, dims=dims)
    assert types(model)[expected]
    with jax.enable_x64(True):  # shifts are made in 64 bits
        outputs = jrnn.from_onnx(model)({"x": x}).values()
    for value, other in zip(jax.tree.leaves(fn(x)), outputs, strict=True):
        assert value.dtype == other.dtype
        tolerance = 0.06 if value.dtype.itemsize == 2 else 1e-4
        np.testing.assert_allclose(
            np.asarray(other, float), np.asarray(value, float), atol=tolerance
        )


ENDS = np.float32([0, 1, -1, 1e-30, -2.5, 3e20, -1e38, np.inf, -np.inf, np.nan])
CENTER = np.linspace(-1, 1, 2001, dtype=np.float32)
NEAR_ONE = 1 - 10 ** -np.arange(1, 7.9, dtype=np.float32)


@pytest.mark.parametrize(
    "fn, inputs",
    [
        (jnp.arctan2, np.meshgrid([*ENDS, -0.0], [*ENDS, -0.0])),
        (jnp.cbrt, [ENDS]),
        (
            jax.scipy.special.erfinv,
            [np.concatenate([CENTER, NEAR_ONE, -NEAR_ONE, np.float32([2, np.nan])])],
        ),
    ],
    ids=["atan2", "cbrt", "erf_inv"],
)
def test_functions_that_onnx_lacks_are_equal_over_their_whole_range(fn, inputs):
    inputs = [x.astype(np.float32) for x in inputs]
    model = jrnn.to_onnx(
        fn,
        *(jnp.full((2,) * x.ndim, 0.5) for x in inputs),
        dims="AB" if inputs[0].ndim == 1 else "A, B",
    )
    expected = np.asarray(fn(*inputs))
    assert np.isnan(expected).any() and (np.isinf(expected).any() or fn is jnp.arctan2)
    np.testing.assert_allclose(run(model, *inputs)[0], expected, rtol=4e-6)
    jrnn.to_onnx(fn, *(jnp.full(3, 0.3, jnp.bfloat16) for _ in inputs))


IN_ORDER = np.float32([-np.inf, -2, -0.0, 0, 0, 1, 1, 3, np.inf, np.nan, np.nan])
SEARCHED = np.float32([np.nan, np.inf, -np.inf, -0.0, 0, 1, 2, -5, 7])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["scan", "compare_all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_search_in_a_sorted_array(side, method, dtype):
    def search(ordered, x):
        return jnp.searchsorted(ordered, x, side=side, method=method)

    ordered, x = (
        v if "float" in dtype else np.nan_to_num(v, posinf=9, neginf=-9)
        for v in (IN_ORDER, SEARCHED)
    )
    ordered, x = np.sort(ordered.astype(dtype)), x.astype(dtype)
    model = jrnn.to_onnx(search, ordered, x, dims=("...", "N"))
    if (
        dtype != "bfloat16"
    ):  # of which onnxruntime has no arrays; `to_onnx` has compared it in float32
        np.testing.assert_array_equal(run(model, ordered, x[::2])[0], search(ordered, x[::2]))


def test_a_search_among_complex_numbers():
    def search(re, im, x):
        return jnp.searchsorted(jax.lax.complex(re, im), jax.lax.complex(x, -x))

    re, im = np.float32([0, 1, 1, 2]), np.float32([0, -2, -1, 5])
    model = jrnn.to_onnx(search, re, im, np.float32([1, 2, -1]))
    x = np.float32([2, 1, 0])
    assert run(model, re, im, x)[0].tolist() == search(re, im, x).tolist() == [3, 2, 0]


def test_the_inverse_of_erf_in_float64_is_refused():
    with (
        jax.enable_x64(True),
        pytest.raises(ConversionError, match="supported in float32, float16 and bfloat16"),
    ):
        jrnn.to_onnx(jax.scipy.special.erfinv, jnp.ones(2) / 2)


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    with pytest.raises(
        ConversionError, match=r"test_to_onnx.py:\d+.*the primitive 'lgamma' has no rule for ONNX"
    ):
        jrnn.to_onnx(lambda x: jax.lax.lgamma(x), X)
    with pytest.raises(
        ConversionError, match="a while loop takes more than 10000 steps on random numbers"
    ):
        jrnn.to_onnx(count_down, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(ConversionError, match="it needs the operator set 18"):
        jrnn.to_onnx(lambda x: x.at[0].max(1.0), X, opset=17)
    with pytest.raises(ConversionError, match="draws random numbers"):
        jrnn.to_onnx(nn.LSTM(2, 3, num_layers=2, dropout=0.5, rngs=nnx.Rngs(0)), X)
    with pytest.raises(ConversionError, match="operator sets 17 to 27 can be written"):
        jrnn.to_onnx(jnp.sin, X, opset=16)
    with (
        monkeypatch.context() as patched,
        pytest.raises(ConversionError, match="operator sets to 20: install a newer one"),
    ):
        patched.setattr(onnx.defs, "onnx_opset_version", lambda: 20)
        jrnn.to_onnx(jnp.sin, X, opset=21)
    with pytest.raises(ConversionError, match="do not fit the examples"):
        jrnn.to_onnx(jnp.sin, X, dims="T, N")
    with pytest.raises(
        ConversionError,
        match=r"needs a size that `dims` leaves open: Symbolic dimension 'T'.*; write _ for",
    ):
        jrnn.to_onnx(lambda x: jnp.ones(int(x.shape[0])) + x[0, 0, 0], X, dims="T, ...")
    with pytest.raises(ConversionError, match="known only when it runs"):
        jrnn.to_onnx(lambda x: x if x[0, 0, 0] > 0 else -x, X)
    jrnn.to_onnx(jnp.sin, X, path=tmp_path / "sin.onnx")
    np.testing.assert_allclose(
        jrnn.from_onnx(tmp_path / "sin.onnx")({"x": X})["output"], np.sin(X), atol=1e-6
    )


def test_a_model_that_computes_something_else_is_not_handed_out(monkeypatch):
    monkeypatch.setitem(primitives._UNARY, "sin", "Cos")
    with pytest.raises(ConversionError, match="onnxruntime computes another 'output'"):
        jrnn.to_onnx(jnp.sin, X)
