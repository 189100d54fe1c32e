"""Running nets and turning them into functions: checks, errors, static shapes, random keys, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.errors import NetError, OpError, UnknownOperatorError
from jrnn.nets import Op
from jrnn.nets.ir import DeviceOption

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _run(*ops, **blobs):
    return jrnn.run_net(Net("n", ops), blobs)


def test_run_net_returns_every_blob_written():
    got = _run(
        Op.of("Tanh", ["x"], ["y"]), Op.of("Relu", ["y"], ["y"]), Op.of("Copy", ["y"], ["z"]), x=X
    )
    assert list(got) == ["y", "z"]
    np.testing.assert_allclose(got["z"], np.maximum(np.tanh(X), 0), atol=1e-6)


def test_undefined_blob_is_named_with_its_neighbors():
    with pytest.raises(
        NetError, match=r"op #0 Tanh -> 'y' in net 'n': reads blob 'inptu'.*did you mean 'input'"
    ):
        _run(Op.of("Tanh", ["inptu"], ["y"]), input=X)


@pytest.mark.parametrize(
    "blobs, rule",
    [
        ([X], "the blobs are a list"),
        ({"x": None}, "blob 'x' is None"),
        ({"x": X, 1: X}, "a blob is named 1"),
    ],
    ids=["list", "none", "number"],
)
def test_blobs_are_a_dict_of_arrays_by_name(blobs, rule):
    with pytest.raises(NetError, match=rule):
        jrnn.run_net(Net("n", (Op.of("Tanh", ["x"], ["y"]),)), blobs)


def test_operators_out_of_order_are_told_apart_from_missing_blobs():
    ops = (Op.of("Tanh", ["b"], ["a"]), Op.of("Tanh", ["a"], ["b"]))
    with pytest.raises(
        NetError, match=r"op #0 Tanh.*reads blob 'b', which is first written by op #1 Tanh.*cycle"
    ):
        _run(*ops)


def test_repeated_output_is_refused():
    with pytest.raises(NetError, match=r"op #0 Split.*writes blob 'p' twice"):
        _run(Op.of("Split", ["x"], ["p", "p"], axis=1), x=X)


def test_unknown_operator_has_near_names():
    with pytest.raises(UnknownOperatorError, match=r"op #0 Sigmiod.*did you mean 'Sigmoid'"):
        _run(Op.of("Sigmiod", ["x"], ["y"]), x=X)


def test_wrong_arity_says_what_is_taken():
    with pytest.raises(OpError, match=r"op #0 FC.*takes .*3 input.*was given 1"):
        _run(Op.of("FC", ["x"], ["y"]), x=X)


def test_wrong_shapes_name_both():
    w, b = np.ones((4, 5), np.float32), np.ones(4, np.float32)
    with pytest.raises(OpError, match=r"op #0 FC -> 'y' in net 'n': .*3.*5|.*5.*3"):
        _run(Op.of("FC", ["x", "w", "b"], ["y"]), x=X, w=w, b=b)


def test_wrong_argument_type_is_named():
    with pytest.raises(OpError, match=r"argument 'axis' must be int, is b'one'"):
        _run(Op.of("Softmax", ["x"], ["y"], axis="one"), x=X)


def test_errors_inside_a_step_net_name_both_nets():
    step = Net(
        "step",
        (Op.of("Tanh", ["h_prev"], ["t"]), Op.of("Sum", ["t", "nowhere"], ["h"])),
        ("x_t", "h_prev"),
    )
    b = jrnn.NetBuilder("outer")
    jrnn.recurrent_net(
        b, step, [("x_t", b.input("x"))], [("h_prev", b.input("h0"))], {"h_prev": "h"}
    )
    blobs = {"x": np.zeros((2, 1, 3), np.float32), "h0": np.zeros(3, np.float32)}
    with pytest.raises(
        NetError,
        match=r"op #0 Recurrent.* in net 'outer': op #1 Sum -> 'h' in net 'step': .*'nowhere'",
    ):
        jrnn.run_net(b.build(), blobs)


def test_unknown_output_is_refused_before_anything_runs():
    with pytest.raises(NetError, match=r"has no blob 'yy' to fetch; did you mean 'y'"):
        jrnn.to_jax(Net("n", (Op.of("Tanh", ["x"], ["y"]),)), ["yy"])


def test_to_jax_leaves_out_what_no_output_needs():
    net = Net("n", (Op.of("Tanh", ["x"], ["y"]), Op.of("FC", ["x", "absent", "absent"], ["z"])))
    assert list(jrnn.to_jax(net, ["y"])({"x": X})) == ["y"]


@pytest.mark.exhaustive
def test_to_jax_under_every_transformation():
    fn = jrnn.to_jax(
        Net("n", (Op.of("Tanh", ["x"], ["y"]), Op.of("SumElements", ["y"], ["loss"]))), ["loss"]
    )

    def loss(x):
        return fn({"x": x})["loss"]

    want = 1 - np.tanh(X) ** 2
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), want, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(np.stack([X, X]))[1], want, atol=1e-6)
    hessian = jax.hessian(loss)(X).reshape(6, 6)
    np.testing.assert_allclose(np.diag(hessian), (-2 * np.tanh(X) * want).ravel(), atol=1e-6)


def test_shapes_computed_by_operators_are_static_inside_jit():
    ops = (
        Op.of("Shape", ["x"], ["s"]),
        Op.of("Slice", ["s"], ["head"], starts=[0], ends=[1]),
        Op.of("GivenTensorInt64Fill", [], ["tail"], shape=[1], values=[-1]),
        Op.of("Concat", ["head", "tail"], ["to", "info"], axis=0),
        Op.of("Reshape", ["x", "to"], ["y", "old"]),
    )
    fn = jax.jit(lambda x: jrnn.to_jax(Net("n", ops), ["y"])({"x": x})["y"])
    assert fn(np.zeros((2, 3, 4), np.float32)).shape == (2, 12)


@pytest.mark.filterwarnings(
    "default"
)  # as a user has them: an error would end the check that this test is about
def test_known_integers_keep_64_bits(recwarn):
    net = Net(
        "n", (Op.of("Mod", ["x"], ["y"], divisor=7),)
    )  # jnp.fmod is a jit, whose trace JAX keeps
    x = np.array([-3, 2**40 + 5, 9])
    y = jrnn.to_jax(net)({"x": x})["y"]
    assert y.dtype == np.int64 and y.tolist() == np.fmod(x, 7).tolist()
    assert not recwarn.list


def test_traced_values_that_decide_a_shape_are_refused():
    net = Net("n", (Op.of("Reshape", ["x", "to"], ["y", "old"]),))
    with pytest.raises(OpError, match=r"op #0 Reshape.*needs the values of its inputs.*run_net"):
        jax.jit(jrnn.to_jax(net, ["y"]))({"x": X, "to": np.array([3, 2])})


def test_run_net_keeps_64_bits():
    got = _run(Op.of("Tanh", ["x"], ["y"]), Op.of("Shape", ["x"], ["s"]), x=X.astype(np.float64))
    assert got["y"].dtype == np.float64 and got["s"].dtype == np.int64


def test_to_jax_refuses_to_round_float64_silently():
    fn = jrnn.to_jax(Net("n", (Op.of("Tanh", ["x"], ["y"]),)))
    with pytest.raises(NetError, match="blob 'x' is float64.*jax_enable_x64"):
        fn({"x": X.astype(np.float64)})


def test_random_operators_are_functions_of_the_key():
    net = Net(
        "n",
        (Op.of("GaussianFill", [], ["a"], shape=[4]), Op.of("GaussianFill", [], ["b"], shape=[4])),
    )
    one, two = (jrnn.run_net(net, {}, key=jax.random.key(k)) for k in (0, 1))
    again = jrnn.run_net(net, {}, key=jax.random.key(0))
    np.testing.assert_array_equal(one["a"], again["a"])
    assert (one["a"] != two["a"]).all() and (one["a"] != one["b"]).all()


def test_random_operator_without_key_says_how_to_give_one():
    with pytest.raises(OpError, match="op #0 GaussianFill.*key"):
        _run(Op.of("GaussianFill", [], ["a"], shape=[4]))
    seeded = Op(
        **{
            **vars(Op.of("GaussianFill", [], ["a"], shape=[4])),
            "device_option": DeviceOption(random_seed=7),
        }
    )
    np.testing.assert_array_equal(_run(seeded)["a"], _run(seeded)["a"])


def test_infer_shapes_computes_nothing():
    net = Net("n", (Op.of("FC", ["x", "w", "b"], ["y"]), Op.of("Softmax", ["y"], ["p"])))
    shapes = {"x": (8, 3), "w": (5, 3), "b": (5,)}
    got = jrnn.nets.infer_shapes(
        net, {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    )
    assert got["p"].shape == (8, 5) and got["p"].dtype == jnp.float32
