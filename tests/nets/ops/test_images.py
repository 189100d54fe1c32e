"""Images and optimizers: what they refuse, and gradients where Caffe2's own are wrong or need values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import GradientError, OpError

pytestmark = pytest.mark.usefixtures("little_compilation")


def f(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def i64(*values):
    return np.array(values, np.int64)


ONE = f(1)
IMAGE, FILTER = f(1, 2, 4, 4), f(3, 2, 2, 2)

# type, inputs, number of outputs, arguments, and what the message must say
REFUSED = [
    ("Conv", (IMAGE, FILTER), 1, {}, "kernel is required"),
    ("Conv", (IMAGE, FILTER), 1, {"kernel": 3}, r"filter must be \['M', 2, 3, 3\]"),
    (
        "Conv",
        (IMAGE, FILTER),
        1,
        {"kernel": 2, "group": 3},
        "group 3 must be at least 1 and divide the 2 channels",
    ),
    (
        "Conv",
        (IMAGE, FILTER, f(2)),
        1,
        {"kernel": 2},
        r"bias is float32\[2\]; its shape must be \[3\]",
    ),
    (
        "Conv",
        (IMAGE, FILTER),
        1,
        {"kernel": 2, "dilation": 4},
        "kernel of 5 elements .* is larger than the image of 4",
    ),
    ("Conv", (IMAGE, FILTER), 1, {"kernel": 2, "order": "CHWN"}, "order 'CHWN' is unknown"),
    (
        "Conv",
        (IMAGE, FILTER),
        1,
        {"kernel": 2, "pad": 1, "legacy_pad": 2},
        "set the padding themselves",
    ),
    (
        "Conv",
        (IMAGE, FILTER),
        1,
        {"kernel": 2, "legacy_pad": 2, "dilation": 2},
        "SAME takes no dilation",
    ),
    ("Conv", (IMAGE, FILTER), 1, {"kernel": 2, "legacy_pad": 7}, "legacy_pad 7 is unknown"),
    ("Conv", (IMAGE, FILTER), 1, {"kernel": 2, "global_pooling": 1}, "an argument of pooling"),
    ("Conv", (IMAGE[0], FILTER[0]), 1, {"kernel": 2}, "give kernels with 1 sizes"),
    ("Conv", (IMAGE[0, 0], FILTER), 1, {"kernel": 2}, "must be an image"),
    (
        "Conv",
        (IMAGE, FILTER),
        1,
        {"kernels": (2, 2), "strides": (1,)},
        r"strides \[1\] has 1 entries",
    ),
    ("Conv", (IMAGE, FILTER), 1, {"kernel": 2, "stride": 0}, "must be positive"),
    (
        "Conv",
        (IMAGE.astype(np.int32), FILTER),
        1,
        {"kernel": 2},
        "must hold floating-point numbers",
    ),
    ("ConvTranspose", (IMAGE, FILTER), 1, {"kernel": 2}, r"filter must be \[2, 'M/G', 2, 2\]"),
    (
        "ConvTranspose",
        (IMAGE, f(2, 3, 2, 2)),
        1,
        {"kernel": 2, "dilation": 2},
        "takes no global_pooling, dilation",
    ),
    (
        "ConvTranspose",
        (IMAGE, f(2, 3, 2, 2)),
        1,
        {"kernel": 2, "adjs": (1,)},
        r"adjs \[1\] must be 2 numbers",
    ),
    ("MaxPool", (IMAGE,), 1, {"kernel": 2, "pad": 2}, "must be smaller than kernels"),
    ("MaxPool", (IMAGE,), 1, {"kernel": 2, "dilation": 2}, "takes no dilation"),
    ("MaxPool", (IMAGE,), 1, {"kernels": (2,)}, "give kernels with 2 sizes"),
    (
        "AveragePool",
        (IMAGE,),
        1,
        {"global_pooling": 1, "pad": 1},
        "leave pad, stride and dilation out",
    ),
    (
        "AveragePool",
        (f(1, 1, 3, 3),),
        1,
        {"kernel": 1, "stride": 4, "legacy_pad": 3},
        "begins at 4, past the image of 3",
    ),
    ("LpPool", (IMAGE,), 1, {"kernel": 2, "p": 0.0}, "p must be positive"),
    (
        "SpatialBN",
        (IMAGE, f(2), f(2), f(2), f(3)),
        1,
        {"is_test": 1},
        r"var is float32\[3\]; its shape must be \[2\]",
    ),
    (
        "SpatialBN",
        (IMAGE, f(2), f(2), f(2), f(2)),
        1,
        {},
        "it must have 1 with is_test=1, and 5 without",
    ),
    (
        "SpatialBN",
        (IMAGE, f(2), f(2), f(2), f(2)),
        1,
        {"is_test": 1, "epsilon": 0.0},
        "epsilon must be positive",
    ),
    ("SpatialBN", (IMAGE, f(2), f(2), f(2), f(2)), 5, {"num_batches": 2}, "needs inputs 5 and 6"),
    ("AffineChannel", (IMAGE, f(3), f(2)), 1, {}, r"scale is float32\[3\]"),
    ("LRN", (IMAGE,), 1, {}, "argument 'size' .int. is required"),
    ("LRN", (IMAGE,), 1, {"size": 0}, "size must be at least 1"),
    (
        "GroupNorm",
        (IMAGE, f(2), f(2)),
        1,
        {},
        "group 32 must be at least 1 and divide the 2 channels",
    ),
    ("InstanceNorm", (IMAGE, f(2), f(1)), 1, {}, r"bias is float32\[1\]"),
    ("RMSNorm", (IMAGE, f(32), f(4)), 2, {}, "beta must have 32 elements"),
    ("NCHW2NHWC", (f(2, 2),), 1, {}, "must be an image"),
    ("ChannelShuffle", (IMAGE,), 1, {"group": 3}, "divide the channels"),
    ("Im2Col", (IMAGE,), 1, {"kernel": 2, "legacy_pad": 1}, "takes no legacy_pad"),
    ("Col2Im", (IMAGE, IMAGE), 1, {"kernel": 2}, "it must have 72 elements"),
    ("SpaceToBatch", (IMAGE,), 1, {"block_size": 3}, "multiples of block_size 3"),
    ("SpaceToBatch", (IMAGE,), 1, {"pad_l": 1}, "only pad_t may differ"),
    ("BatchToSpace", (IMAGE,), 1, {}, "batch must be a multiple"),
    ("FCTransposed", (f(2, 3), f(4, 3), f(3)), 1, {}, r"w must be \[3, out\]"),
    ("ReluN", (IMAGE,), 1, {"n": -1.0}, "n must be positive"),
    ("LearningRate", (i64(1),), 1, {"base_lr": 1.0, "policy": "cosin"}, "did you mean 'cosine'"),
    (
        "LearningRate",
        (i64(1),),
        1,
        {"base_lr": 1.0, "policy": "step"},
        "'stepsize' must be positive",
    ),
    ("LearningRate", (i64(1),), 1, {"policy": "fixed"}, "argument 'base_lr' .float. is required"),
    ("LearningRate", (i64(1, 2),), 1, {"base_lr": 1.0, "policy": "fixed"}, "must have 1 element"),
    (
        "LearningRate",
        (i64(1),),
        1,
        {"base_lr": 1.0, "policy": "composite"},
        "'sub_policy_num_iters'",
    ),
    ("Iter", (i64(1, 2),), 1, {}, "must have 1 element"),
    (
        "Adam",
        (f(2), f(2), f(3), f(2), ONE, i64(0)),
        3,
        {},
        "m2 is float32.3. and param is float32.2.",
    ),
    ("MomentumSGD", (f(2), f(2), f(2)), 2, {}, "lr is float32.2.; it must have 1 element"),
    ("Ftrl", (f(2), f(2, 2), f(2), ONE), 2, {"alpha": 0.1}, "both as input and as argument"),
    ("ClipTensorByScaling", (f(2), ONE), 1, {"threshold": -1.0}, "threshold must be positive"),
    (
        "SparseAdagrad",
        (f(3, 2), f(3, 2), i64(3), f(1, 2), ONE),
        2,
        {},
        r"indices holds 3, which is out of range; it must be in \[0, 3\)",
    ),
    (
        "SparseAdam",
        (f(3, 2),) * 3 + (i64(1, 2), f(1, 2), ONE, i64(0)),
        3,
        {},
        "it must have 2 of its rows",
    ),
    (
        "RowWiseSparseAdagrad",
        (f(3, 2), f(3, 2), i64(1), f(1, 2), ONE),
        2,
        {},
        "it must have 1 a row of it",
    ),
    (
        "YellowFin",
        (f(2), f(2), ONE, ONE, f(3), f(2), f(2), f(5), f(2), i64(1)),
        8,
        {},
        r"they must be \[20\] and \[5\]",
    ),
]


def net_of(type, inputs, outputs, args):
    names = [f"in{k}" for k in range(len(inputs))]
    op = jrnn.nets.Op.of(type, names, [f"out{k}" for k in range(outputs)], **args)
    return jrnn.Net("net", (op,)), dict(zip(names, inputs))


@pytest.mark.parametrize("type, inputs, outputs, args, message", REFUSED)
def test_refusals_name_the_operator_and_what_is_wrong(type, inputs, outputs, args, message):
    net, blobs = net_of(type, inputs, outputs, args)
    with pytest.raises(OpError, match=f"(?s)op #0 {type} -> .*{message}"):
        jrnn.run_net(net, blobs)


def assert_gradient_is_the_derivative(net, blobs, wanted, **fixed):
    """The generated net's gradients of in0 and so on equal JAX's, in float64."""
    blobs = {n: v.astype(float) for n, v in blobs.items()}
    full, gradients = jrnn.add_gradients(net, {"out0": "seed"})
    forward = jrnn.to_jax(net, ["out0"])
    seed = np.random.default_rng(1).standard_normal(forward({**blobs, **fixed})["out0"].shape)
    by_net = jrnn.run_net(full, {**blobs, **fixed, "seed": seed})
    by_jax = jax.grad(lambda p: jnp.sum(forward({**blobs, **fixed, **p})["out0"] * seed))(
        {n: blobs[n] for n in wanted}
    )
    for n in wanted:
        np.testing.assert_allclose(by_net[gradients[n]], by_jax[n], rtol=1e-10, atol=1e-10)


def test_spatial_bn_in_test_mode_has_the_right_gradient(x64):
    net, blobs = net_of("SpatialBN", (IMAGE, f(2), f(2), f(2), np.abs(f(2))), 1, {"is_test": 1})
    assert_gradient_is_the_derivative(net, blobs, ["in0", "in1", "in2"])


def test_lrn_over_an_even_number_of_channels_has_the_right_gradient(x64):
    net, blobs = net_of("LRN", (f(1, 5, 2, 2),), 1, {"size": 4, "alpha": 1.0, "beta": 0.75})
    assert_gradient_is_the_derivative(net, blobs, ["in0"])


def test_thresholded_relu_below_zero_has_the_right_gradient(x64):
    net, blobs = net_of("ThresholdedRelu", (np.array([-1, -0.4, 0.3]),), 1, {"alpha": -0.5})
    assert_gradient_is_the_derivative(net, blobs, ["in0"])


def test_group_norm_without_statistics_says_what_its_gradient_needs():
    net, _ = net_of("GroupNorm", (IMAGE, f(2), f(2)), 1, {"group": 1})
    with pytest.raises(GradientError, match="give the operator three outputs"):
        jrnn.add_gradients(net, {"out0": "seed"})


@pytest.mark.exhaustive
def test_lp_pool_of_zeros_has_a_gradient_of_zeros():
    net, blobs = net_of("LpPool", (np.zeros((1, 1, 4, 4), np.float32),), 1, {"kernel": 2, "p": 3.0})
    fn = jrnn.to_jax(net, ["out0"])
    assert not np.any(jax.grad(lambda x: fn({"in0": x})["out0"].sum())(blobs["in0"]))
    full, gradients = jrnn.add_gradients(net, {"out0": "seed"})
    blobs_after = jrnn.run_net(full, {**blobs, "seed": np.ones((1, 1, 3, 3), np.float32)})
    assert not np.any(blobs_after[gradients["in0"]])


@pytest.mark.parametrize("group, convolutions", [(6, 0), (3, 3)], ids=["depthwise", "groups"])
def test_grouped_convolutions_on_a_cpu_are_made_of_what_is_fast_there(group, convolutions):
    """XLA's own grouped convolution is many times slower there; elsewhere it stays one operation."""
    x, w = (
        jax.ShapeDtypeStruct((1, 6, 5, 5), np.float32),
        jax.ShapeDtypeStruct((6, 6 // group, 3, 3), np.float32),
    )
    net, _ = net_of("Conv", (IMAGE, FILTER), 1, {"kernel": 3, "group": group})
    traced = jax.jit(jrnn.to_jax(net)).trace({"in0": x, "in1": w})
    lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert lowered["cpu"].count("stablehlo.convolution") == convolutions
    assert f"feature_group_count = {group} " in lowered["cuda"]


def test_depthwise_convolutions_of_half_precision_add_up_in_single():
    x, w = np.full((1, 2, 9, 9), 0.1, np.float16), np.ones((2, 1, 9, 9), np.float16)
    net, blobs = net_of("Conv", (x, w), 1, {"kernel": 9, "group": 2})
    got = jrnn.run_net(net, blobs)["out0"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.float16(81 * np.float32(np.float16(0.1))))
