"""Random fills: their distributions, and that they are functions of the key."""

import dataclasses

import jax
import numpy as np
import pytest

import jrnn
from jrnn.errors import OpError
from jrnn.nets.ir import DeviceOption

KEY = jax.random.key(3)
N = 200


def net_of(type, **args):
    return jrnn.Net("fills", (jrnn.nets.Op.of(type, [], ["y"], **args),))


def draw(type, key=KEY, **args):
    return jrnn.run_net(net_of(type, **args), {}, key=key)["y"]


def assert_moments(y, mean, variance, kurtosis):
    """Mean and variance of many draws, to six standard deviations of their estimates."""
    assert abs(y.mean() - mean) < 6 * (variance / y.size) ** 0.5
    assert abs(y.var() - variance) < 6 * variance * ((kurtosis - 1) / y.size) ** 0.5


UNIFORM, NORMAL = 9 / 5, 3.0


@pytest.mark.parametrize(
    "type, args, mean, variance, kurtosis",
    [
        ("UniformFill", {"shape": [N, N]}, 0.5, 1 / 12, UNIFORM),
        ("UniformFill", {"shape": [N, N], "min": -3.0, "max": 1.0}, -1, 16 / 12, UNIFORM),
        ("GaussianFill", {"shape": [N, N]}, 0, 1, NORMAL),
        ("GaussianFill", {"shape": [N, N], "mean": 5.0, "std": 0.1}, 5, 0.01, NORMAL),
        (
            "XavierFill",
            {"shape": [20, 40, 50]},
            0,
            1 / 2000,
            UNIFORM,
        ),  # fan in: all dimensions but the first
        (
            "MSRAFill",
            {"shape": [40, 20, 50]},
            0,
            2 / 2000,
            NORMAL,
        ),  # fan out: all dimensions but the second
    ],
)
def test_distribution(type, args, mean, variance, kurtosis):
    y = draw(type, **args)
    assert y.shape == tuple(args["shape"]) and y.dtype == np.float32
    assert_moments(y.astype(float), mean, variance, kurtosis)
    if type in ("UniformFill", "XavierFill"):
        half = (3 * variance) ** 0.5
        assert mean - half <= y.min() and y.max() <= mean + half and np.ptp(y) > 1.99 * half


def test_uniform_integers_include_both_ends():
    y = draw("UniformIntFill", shape=[3000], min=-1, max=2)
    values, counts = np.unique(y, return_counts=True)
    assert values.tolist() == [-1, 0, 1, 2] and y.dtype == np.int32
    assert np.all(np.abs(counts - 750) < 6 * (3000 * 0.25 * 0.75) ** 0.5)


def test_unique_integers():
    y = draw("UniqueUniformFill", shape=[2, 4], min=10, max=17)
    assert sorted(y.ravel().tolist()) == list(range(10, 18)) and y.shape == (2, 4)
    net = jrnn.Net(
        "fills",
        (
            jrnn.nets.Op.of(
                "UniqueUniformFill", ["n", "used"], ["y"], input_as_shape=1, min=0, max=5
            ),
        ),
    )
    got = jrnn.run_net(net, {"n": np.array([4]), "used": np.array([1, 3, 99], np.int32)}, key=KEY)[
        "y"
    ]
    assert sorted(got.tolist()) == [0, 2, 4, 5]


@pytest.mark.sample("XavierFill")
@pytest.mark.parametrize(
    "type", ["XavierFill", "MSRAFill", "GaussianFill", "UniformFill", "UniformIntFill"]
)
def test_function_of_the_key(type):
    args = {"shape": [8, 8]} | ({"max": 1000} if type == "UniformIntFill" else {})
    first = draw(type, **args)
    np.testing.assert_array_equal(first, draw(type, **args))
    assert (first != draw(type, key=jax.random.key(4), **args)).any()
    fn = jax.jit(lambda key: jrnn.to_jax(net_of(type, **args), ["y"])({}, key=key)["y"])
    np.testing.assert_allclose(fn(KEY), first, rtol=1e-6)


def test_two_fills_of_a_net_differ():
    ops = tuple(jrnn.nets.Op.of("GaussianFill", [], [name], shape=[16]) for name in "ab")
    got = jrnn.run_net(jrnn.Net("two", ops), {}, key=KEY)
    assert (got["a"] != got["b"]).any()


def test_seed_of_the_operator_serves_where_the_run_has_no_key():
    op = dataclasses.replace(
        jrnn.nets.Op.of("UniformFill", [], ["y"], shape=[3]),
        device_option=DeviceOption(random_seed=5),
    )
    net = jrnn.Net("seeded", (op,))
    np.testing.assert_array_equal(jrnn.run_net(net, {})["y"], jrnn.run_net(net, {})["y"])


@pytest.mark.parametrize(
    "type, args, says",
    [
        ("XavierFill", {}, "at least 1 dimension"),
        ("MSRAFill", {"shape": [3]}, "at least 2 dimension"),
        ("GaussianFill", {"shape": [3], "std": -1.0}, "std is -1"),
        ("UniformFill", {"shape": [3], "min": 2.0, "max": 1.0}, "min 2.0 must be below max 1.0"),
        ("UniqueUniformFill", {"shape": [4], "min": 0, "max": 2}, "4 different numbers"),
        ("UniqueUniformFill", {"shape": [4], "min": 0}, "'max' .* is required"),
        ("UniqueUniformFill", {"shape": [4], "min": 0, "max": 2**40, "dtype": 10}, "bytes"),
        ("UniformFill", {"shape": [2**20, 2**20]}, "an operator fills at most"),
    ],
)
def test_refused(type, args, says):
    with pytest.raises(OpError, match=says):
        draw(type, **args)


def test_key_is_asked_for():
    with pytest.raises(
        OpError, match=r"op #0 GaussianFill -> 'y' in net 'fills': .*key=jax.random.key"
    ):
        jrnn.run_net(net_of("GaussianFill", shape=[2]), {})
