"""What the recorded cases cannot show: random numbers, gradients that Caffe2 gets wrong, and what may be traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import UnknownOperatorError
from jrnn.nets.autodiff import GradientSlice

pytestmark = pytest.mark.usefixtures("little_compilation")

KEY = jax.random.key(7)


def one(type, inputs, outputs, **args):
    return jrnn.Net(type, (jrnn.nets.Op.of(type, inputs, outputs, **args),))


def i32(*values):
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def dropped():
    x = np.full((400, 250), 3.0, np.float32)
    net = one("Dropout", ["x"], ["y", "mask"], is_test=0, ratio=0.3)
    return net, x, jrnn.run_net(net, {"x": x}, key=KEY)


def test_dropout_keeps_the_stated_share(dropped):
    _, _, got = dropped
    assert got["mask"].dtype == bool
    assert abs(got["mask"].mean() - 0.7) < 6 * (0.3 * 0.7 / 1e5) ** 0.5  # six standard deviations
    np.testing.assert_allclose(got["y"], np.where(got["mask"], 3 / 0.7, 0), rtol=1e-6)


def test_dropout_is_a_function_of_the_key(dropped):
    net, x, got = dropped
    again = jrnn.run_net(net, {"x": x}, key=KEY)
    other = jrnn.run_net(net, {"x": x}, key=jax.random.key(8))
    np.testing.assert_array_equal(again["mask"], got["mask"])
    assert (other["mask"] != got["mask"]).any()


def test_dropouts_of_one_net_draw_different_masks():
    ops = tuple(
        jrnn.nets.Op.of("Dropout", ["x"], [f"y{k}", f"mask{k}"], is_test=0) for k in range(2)
    )
    got = jrnn.run_net(jrnn.Net("two", ops), {"x": np.ones(64, np.float32)}, key=KEY)
    assert (got["mask0"] != got["mask1"]).any()


def test_matmul_gradient_with_axes(x64):
    """Caffe2 passes axis 1 for any axis but 0, and fails where that matters."""
    net = one("MatMul", ["a", "b"], ["y"], axis_a=2, axis_b=2)
    rng = np.random.default_rng(0)
    blobs = {
        "a": rng.standard_normal((2, 3, 4)),
        "b": rng.standard_normal((2, 2, 5)),
        "dy": rng.standard_normal((6, 5)),
    }
    full, gradients = jrnn.add_gradients(net, {"y": "dy"})
    got = jrnn.run_net(full, blobs)
    fn = jrnn.to_jax(net)
    want = jax.grad(lambda p: jnp.sum(fn(p)["y"] * blobs["dy"]))({k: blobs[k] for k in "ab"})
    for k in "ab":
        np.testing.assert_allclose(got[gradients[k]], want[k], rtol=1e-12)


def test_negate_gradient_negates_both_gradients():
    net = jrnn.Net(
        "n",
        (
            jrnn.nets.Op.of("NegateGradient", ["x"], ["h"]),
            jrnn.nets.Op.of("Mul", ["h", "x"], ["y"]),
        ),
    )
    x = np.array([2.0, 5.0], np.float32)
    fn = jrnn.to_jax(net, ["y"])
    np.testing.assert_array_equal(jax.grad(lambda x: fn({"x": x})["y"].sum())(x), [0, 0])  # x - x
    full, gradients = jrnn.add_gradients(net, ["y"])
    np.testing.assert_array_equal(jrnn.run_net(full, {"x": x})[gradients["x"]], [0, 0])


def test_ensure_dense_makes_a_sparse_gradient_dense():
    ops = (
        jrnn.nets.Op.of("EnsureDense", ["table"], ["dense"]),
        jrnn.nets.Op.of("Gather", ["dense", "rows"], ["y"]),
    )
    full, gradients = jrnn.add_gradients(jrnn.Net("n", ops), {"y": "dy"})
    assert isinstance(gradients["dense"], GradientSlice)
    dy = np.ones((3, 2), np.float32)
    got = jrnn.run_net(
        full, {"table": np.zeros((4, 2), np.float32), "rows": i32(1, 3, 1), "dy": dy}
    )
    np.testing.assert_array_equal(got[gradients["table"]][:, 0], [0, 2, 0, 1])


def test_a_missing_gradient_of_an_output_is_zero():
    full, gradients = jrnn.add_gradients(one("Split", ["x"], ["a", "b"], axis=0), ["b"])
    got = jrnn.run_net(full, {"x": np.ones(4, np.float32)})
    np.testing.assert_array_equal(got[gradients["x"]], [0, 0, 1, 1])


def test_shapes_stay_static_under_jit():
    """x [2, 3, 4] -> [2, 12], by operators on its shape."""
    ops = (
        jrnn.nets.Op.of("Shape", ["x"], ["shape"]),
        jrnn.nets.Op.of("Slice", ["shape"], ["batch"], starts=[0], ends=[1]),
        jrnn.nets.Op.of("Concat", ["batch", "rest"], ["wanted", "sizes"], axis=0),
        jrnn.nets.Op.of("Reshape", ["x", "wanted"], ["y", "old"]),
    )
    fn = jrnn.to_jax(jrnn.Net("flatten", ops), ["y", "old"])
    got = jax.jit(lambda x: fn({"x": x, "rest": np.array([-1], np.int64)}))(
        np.ones((2, 3, 4), np.float32)
    )
    assert got["y"].shape == (2, 12)
    assert got["old"].tolist() == [2, 3, 4]


ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)
STEPS = np.arange(12, dtype=np.float32).reshape(3, 2, 2)


@pytest.mark.sample(
    "LengthsMean-data1-lengths1-args1", "VariableLengthSequencePadding-data4-lengths4-args4"
)
@pytest.mark.parametrize(
    "type, data, lengths, args",
    [
        ("LengthsSum", ROWS, i32(2, 0, 3), {}),
        ("LengthsMean", ROWS, i32(2, 0, 3), {}),
        ("LengthsMax", ROWS, i32(2, 0, 3), {}),
        ("ReversePackedSegs", STEPS, i32(2, 3), {}),
        ("VariableLengthSequencePadding", STEPS, i32(2, 3), {}),
        ("SequenceMask", ROWS, i32(0, 1, 2, 1, 0), {"mode": "sequence", "fill_val": -9.0}),
    ],
)
def test_lengths_may_be_traced(type, data, lengths, args):
    """Where the output's shape does not depend on lengths, one compiled function serves all of them."""
    net = one(type, ["x", "n"], ["y"], **args)
    got = jax.jit(jrnn.to_jax(net))({"x": data, "n": lengths})["y"]
    np.testing.assert_array_equal(got, jrnn.run_net(net, {"x": data, "n": lengths})["y"])


def test_traced_lengths_are_refused_where_they_make_the_shape():
    fn = jrnn.to_jax(one("PackSegments", ["n", "x"], ["y"]))
    with pytest.raises(
        jrnn.errors.OpError, match="op #0 PackSegments .*give those blobs as numpy integer arrays"
    ):
        jax.jit(fn)({"n": i32(2, 3), "x": ROWS})
    got = jax.jit(lambda x: fn({"n": i32(2, 3), "x": x}))(ROWS)["y"]
    assert got.shape == (2, 3, 2)


def test_log1p_is_exact_near_zero():
    x = np.array([1e-10, 0.0, 2.0], np.float32)
    got = jrnn.run_net(one("Log1p", ["x"], ["y"]), {"x": x})["y"]
    np.testing.assert_allclose(got, np.log1p(x), rtol=1e-6)


def test_fills_of_half_precision():
    net = one("GivenTensorFp16Fill", [], ["y"], shape=[2, 2], values=[0.1, 1.0, 2049.0, -3.0])
    got = jrnn.run_net(net, {})["y"]
    assert got.dtype == np.float16 and got.tolist() == [[np.float16(0.1), 1], [2048, -3]]


@pytest.mark.parametrize(
    "type", ["ATen", "BoxWithNMSLimit", "Int8FC", "FloatToHalf", "ResizeNearest"]
)
def test_an_operator_that_jrnn_does_not_run_is_named(type):
    """Caffe2's operators of detection, of images, of 8-bit numbers and of PyTorch are not among jrnn's."""
    relu = jrnn.nets.Op.of("Relu", ["x"], ["h"])
    net = jrnn.Net("n", (relu, jrnn.nets.Op.of(type, ["h"], ["y"])))
    assert jrnn.nets.format_net(net)
    for run in (jrnn.to_jax, lambda net: jrnn.run_net(net, {"x": np.ones(3, np.float32)})):
        message = f"op #1 {type} -> 'y' in net 'n': unknown operator {type!r}; "
        with pytest.raises(UnknownOperatorError, match=message):
            run(net)
