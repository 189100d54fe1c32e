"""What the recorded cases of the training operators cannot show: sums of gradients, sparse gradients, tracing, 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import GradientError, OpError
from jrnn.nets.autodiff import GradientSlice
from jrnn.nets.ir import Net, Op

F = np.float32


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def net_and_jax(net, blobs, names, loss="loss"):
    """Gradients by the generated net and by JAX."""
    full, gradients = jrnn.add_gradients(net, [loss])
    got = jrnn.run_net(full, blobs)
    fn = jrnn.to_jax(net, [loss])
    fixed = {k: v for k, v in blobs.items() if k not in names}
    want = jax.grad(lambda p: jnp.sum(fn({**fixed, **p})[loss]))({k: blobs[k] for k in names})
    return {k: got[gradients[k]] for k in names}, want


@pytest.mark.parametrize("type, args", [("Sqr", {}), ("Sqrt", {}), ("Pow", {"exponent": 3.0})])
def test_gradients_in_several_operators_add_up(type, args, x64):
    """Where the input is read again, and the gradient that arrives is shared; Caffe2 is wrong there."""
    net = Net(
        "shared",
        (
            Op.of(type, ["x"], ["y"], **args),
            Op.of("Sum", ["y", "w"], ["s"]),
            Op.of("Mul", ["x", "s"], ["z"]),
            Op.of("SumElements", ["z"], ["loss"]),
        ),
    )
    blobs = {"x": np.abs(normal(5)) + 0.5, "w": normal(5, seed=1)}
    got, want = net_and_jax(net, blobs, "xw")
    for k in "xw":
        np.testing.assert_allclose(got[k], want[k], rtol=1e-12)


def test_pow_of_a_blob_to_itself(x64):
    net = Net("self", (Op.of("Pow", ["x", "x"], ["y"]), Op.of("SumElements", ["y"], ["loss"])))
    x = np.abs(normal(4)) + 0.5
    got, _ = net_and_jax(net, {"x": x}, "x")
    np.testing.assert_allclose(got["x"], x**x * (np.log(x) + 1), rtol=1e-12)


def test_gathers_of_one_table_join_their_slices():
    """Two gathers give one slice: all indices, all rows; repeated indices add up."""
    net = Net(
        "two_bags",
        (
            Op.of("Gather", ["table", "i"], ["rows"]),
            Op.of("SparseLengthsSum", ["table", "j", "n"], ["bags"]),
            Op.of("SumElements", ["rows"], ["a"]),
            Op.of("SumElements", ["bags"], ["b"]),
            Op.of("Sum", ["a", "b"], ["loss"]),
        ),
    )
    blobs = {
        "table": normal(4, 2).astype(F),
        "i": np.array([3, 1]),
        "j": np.array([1, 1, 0]),
        "n": np.array([2, 1]),
    }
    full, gradients = jrnn.add_gradients(net, ["loss"])
    gradient = gradients["table"]
    assert isinstance(gradient, GradientSlice)
    got = jrnn.run_net(full, blobs)
    dense = np.zeros((4, 2), F)
    np.add.at(dense, got[gradient.indices], got[gradient.values])
    np.testing.assert_array_equal(dense, [[1, 1], [3, 3], [0, 0], [1, 1]])


def test_dense_gradient_of_gather():
    net = Net(
        "g",
        (
            Op.of("Gather", ["x", "i"], ["y"], dense_gradient=1),
            Op.of("SumElements", ["y"], ["loss"]),
        ),
    )
    got, want = net_and_jax(net, {"x": normal(3, 2).astype(F), "i": np.array([2, 0, 2])}, "x")
    np.testing.assert_array_equal(got["x"], [[1, 1], [0, 0], [2, 2]])
    np.testing.assert_array_equal(want["x"], got["x"])


def test_boolean_mask_of_rows_puts_gradients_back_in_rows(x64):
    """Caffe2 gives a vector here, whatever the rows are."""
    net = Net("m", (Op.of("BooleanMask", ["x", "m"], ["y"]), Op.of("ReduceL1", ["y"], ["loss"])))
    blobs = {"x": normal(3, 2), "m": np.array([True, False, True])}
    got, want = net_and_jax(net, blobs, "x")
    np.testing.assert_allclose(got["x"], np.sign(blobs["x"]) * [[1], [0], [1]])
    np.testing.assert_allclose(want["x"], got["x"])


def test_gradient_of_the_softmax_output_is_refused():
    net = Net(
        "both",
        (
            Op.of("SoftmaxWithLoss", ["x", "k"], ["p", "l"]),
            Op.of("SumElements", ["p"], ["s"]),
            Op.of("Sum", ["l", "s"], ["loss"]),
        ),
    )
    with pytest.raises(GradientError, match="'p', the softmax"):
        jrnn.add_gradients(net, ["loss"])


SMALL = {
    "x": normal(3, 4).astype(F),
    "k": np.array([1, 0, 3], np.int32),
    "i": np.array([2, 0], np.int32),
    "m": np.array([True, False, True]),
}


@pytest.mark.exhaustive(
    "ArgMax-x-y-args0",
    "TopK-x-yab-args1",
    "Accuracy-xk-y-args2",
    "SoftmaxWithLoss-xk-py-args3",
    "SparseToDenseMask-kkd-y-args13",
)
@pytest.mark.parametrize(
    "type, inputs, outputs, args",
    [
        ("ArgMax", "x", "y", {}),
        ("TopK", "x", "yab", {"k": 2}),
        ("Accuracy", "xk", "y", {}),
        ("SoftmaxWithLoss", "xk", "py", {}),
        ("LabelCrossEntropy", "xk", "y", {}),
        ("Gather", "xi", "y", {}),
        ("BatchGather", "xi", "y", {}),
        ("SparseToDense", "iix", "y", {}),
        ("ConstantFill", "x", "y", {"value": 2, "dtype": 10}),
        ("GivenTensorDoubleFill", "", "y", {"values": [1.0], "shape": [1]}),
        ("Size", "x", "y", {}),
        ("BooleanMaskGradient", "mi", "y", {}),
        ("UnsortedSegmentSum", "xk", "y", {"num_segments": 4}),
        ("SparseToDenseMask", "kkd", "y", {"mask": [3, 1]}),
    ],
)
def test_traced_in_32_bits(type, inputs, outputs, args):
    """Under jit, with every input traced and 64-bit types off: no warning, and what run_net gives."""
    blobs = {**SMALL, "d": np.array(7, np.int32)}
    blobs = {k: blobs[k] for k in inputs}
    net = Net("small", (Op.of(type, list(inputs), list(outputs), **args),))
    got = jax.jit(jrnn.to_jax(net, list(outputs)))({k: jnp.asarray(v) for k, v in blobs.items()})
    want = jrnn.run_net(net, blobs)
    for name in outputs:
        assert got[name].dtype.itemsize <= 4 or not isinstance(got[name], jax.Array)
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


@pytest.mark.parametrize(
    "type, inputs, args",
    [
        ("Unique", {"k": np.array([3, 1])}, {}),
        ("BooleanMask", {"x": SMALL["x"], "m": SMALL["m"]}, {}),
        ("SortedSegmentSum", {"x": SMALL["x"], "s": np.array([0, 0, 1])}, {}),
        ("ConstantFill", {"n": np.array([2, 3])}, {"input_as_shape": 1}),
        ("Range", {"n": np.array(4)}, {}),
        ("Tile", {"x": SMALL["x"], "n": np.array([2])}, {"axis": 0}),
    ],
)
def test_traced_shapes_are_refused_and_static_ones_taken(type, inputs, args):
    net = Net("shape", (Op.of(type, list(inputs), ["y"], **args),))
    fn = jrnn.to_jax(net, ["y"])
    with pytest.raises(OpError, match=f"{type} -> 'y'.*traced"):
        jax.jit(fn)({k: jnp.asarray(v) for k, v in inputs.items()})
    static = {k: v for k, v in inputs.items() if v.dtype != F}
    floats = {k: v for k, v in inputs.items() if v.dtype == F}
    got = jax.jit(lambda given: fn({**static, **given}))(floats)["y"]
    np.testing.assert_array_equal(got, jrnn.run_net(net, inputs)["y"])


def test_integers_that_are_filled_can_be_shapes_under_jit():
    ops = (
        Op.of("ConstantFill", [], ["n"], shape=[2], value=3, dtype=10),
        Op.of("ConstantFill", ["n"], ["y"], input_as_shape=1, value=0.5),
    )
    assert jax.jit(jrnn.to_jax(Net("n", ops), ["y"]))({})["y"].shape == (3, 3)


def test_an_index_out_of_range_reads_nan_where_it_cannot_be_checked():
    net = Net("g", (Op.of("Gather", ["x", "i"], ["y"]),))
    got = jax.jit(jrnn.to_jax(net))({"x": jnp.ones((3, 2)), "i": jnp.array([1, 7])})["y"]
    assert np.isnan(got[1]).all() and (got[0] == 1).all()


@pytest.mark.exhaustive
def test_language_model_step():
    """An embedding, a layer, and a softmax loss: all gradients of the generated net are JAX's."""
    net = Net(
        "lm",
        (
            Op.of("Gather", ["table", "tokens"], ["e"]),
            Op.of("FC", ["e", "w", "b"], ["logits"]),
            Op.of("SoftmaxWithLoss", ["logits", "next"], ["p", "loss"]),
        ),
    )
    blobs = {
        "table": normal(5, 3).astype(F),
        "w": normal(5, 3, seed=1).astype(F),
        "b": normal(5, seed=2).astype(F),
        "tokens": np.array([0, 4, 4, 2], np.int32),
        "next": np.array([4, 4, 2, 1], np.int32),
    }
    full, gradients = jrnn.add_gradients(net, ["loss"])
    got = jrnn.run_net(full, blobs)
    fixed = {k: blobs[k] for k in ("tokens", "next")}
    want = jax.grad(lambda p: jrnn.to_jax(net, ["loss"])({**fixed, **p})["loss"])(
        {k: blobs[k] for k in ("table", "w", "b")}
    )
    for k in "wb":
        np.testing.assert_allclose(got[gradients[k]], want[k], rtol=1e-5, atol=1e-7)
    table = np.zeros((5, 3), F)
    assert gradients["table"].indices == "tokens"
    np.add.at(table, blobs["tokens"], got[gradients["table"].values])
    np.testing.assert_allclose(table, want["table"], rtol=1e-5, atol=1e-7)
