"""An operator that would need more memory than there is ends with an error that names it, before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.errors import OpError
from jrnn.files.reading import available
from jrnn.nets import Op
from jrnn.nets.memory import check_size, size_of

IMAGE = np.ones((1, 1, 2, 2), np.float32)
ROW = np.ones((1, 4), np.float32)
HUGE = 2**40
F32, I64 = np.float32, np.int64
CASES = {  # operator -> its inputs and arguments
    "LengthsTile": ([np.ones((1, 1), F32), np.array([HUGE])], {}),
    "LengthsToSegmentIds": ([np.array([HUGE, HUGE])], {}),
    "LengthsRangeFill": ([np.array([2**62, 2**62])], {}),
    "LengthsPad": ([ROW, np.array([1])], {"target_length": 2**62}),
    "PackSegments": ([np.array([1], np.int32), ROW], {"max_length": HUGE}),
    "Tile": ([ROW], {"tiles": HUGE, "axis": 0}),
    "NumpyTile": ([ROW, np.array([2**20, 2**20], np.int32)], {}),
    "Expand": ([ROW, np.array([HUGE, 4])], {}),
    "Range": ([np.array(0, I64), np.array(HUGE, I64)], {}),
    "ConstantFill": ([], {"shape": (0, 2**62)}),
    "UniformFill": ([], {"shape": (2**31, 2**31)}),
    "GaussianFill": ([np.array([2**40, 2])], {"input_as_shape": 1}),
    "OneHot": ([np.array([0, 1], I64), np.array([HUGE], I64)], {}),
    "AveragePool": ([IMAGE], {"kernel": 2, "pad": 2**30}),
}


@pytest.mark.parametrize("type", CASES)
def test_no_operator_begins_what_does_not_fit(type):
    inputs, args = CASES[type]
    names = [f"in{k}" for k in range(len(inputs))]
    net = Net("n", (Op.of(type, names, ["y"], **args),))
    with pytest.raises(
        OpError, match=f"op #0 {type} -> 'y' in net 'n': .*(bytes|larger|infinity|must)"
    ):
        jrnn.run_net(net, dict(zip(names, inputs)), key=jax.random.key(0))


def test_a_window_longer_than_its_axis_takes_no_longer():
    net = Net("n", (Op.of("LRN", ["x"], ["y"], size=2**40, alpha=2.0**40, beta=1.0),))
    np.testing.assert_array_equal(jrnn.run_net(net, {"x": ROW[..., None]})["y"][:, :, 0], ROW / 5)


def sums(*shapes):
    ops = [Op.of("ConstantFill", [], [f"x{k}"], shape=shape) for k, shape in enumerate(shapes)]
    return Net("n", tuple(ops))


def test_the_bound_is_of_all_blobs_of_a_run():
    assert sorted(jrnn.run_net(sums([100], [100]), {}, max_bytes=800)) == ["x0", "x1"]
    rule = r"op #1 ConstantFill -> 'x1'.* needs 400 bytes, next to 400 of other blobs; 799 are available"
    with pytest.raises(OpError, match=rule):
        jrnn.run_net(sums([100], [100]), {}, max_bytes=799)
    grows = Net("n", (Op.of("Concat", ["x", "x"], ["x", "sizes"], axis=0),), ("x",))
    loop = Net("n", (Op.of("While", ["go"], ["x"], loop_net=grows),), ("go", "x"))
    with pytest.raises(OpError, match=r"While .*: op #0 Concat .* 'x' would be float32\[65536\]"):
        jrnn.run_net(loop, {"x": np.ones(64, np.float32), "go": np.array(True)}, max_bytes=300_000)


def test_intermediate_results_count():
    net = Net("n", (Op.of("MatMul", ["x", "w"], ["y"]), Op.of("SumElements", ["y"], ["z"])))
    blobs = {"x": np.ones((64, 1), F32), "w": np.ones((1, 64), F32)}
    with pytest.raises(OpError, match="'y' would be float32"):
        jrnn.run_net(net, blobs, max_bytes=64 * 64 * 4 - 1)
    run = jrnn.to_jax(net, max_bytes=64 * 64 * 4 - 1)
    with pytest.raises(OpError, match="'y' would be float32"):
        jax.jit(run)({k: jnp.asarray(v) for k, v in blobs.items()})


def test_shapes_are_inferred_without_a_bound():
    net = Net("n", (Op.of("MatMul", ["x", "w"], ["y"]),))
    blobs = {"x": jnp.ones((2**20, 1)), "w": jnp.ones((1, 2**20))}
    assert jrnn.nets.infer_shapes(net, blobs)["y"].shape == (2**20, 2**20)


def test_sizes():
    assert 2**20 < available() < 2**50
    assert size_of(np.zeros((3, 0), np.int64)) == 24 and size_of("text") == 0
    for shape in [(-1,), (2**31,), (0, 2**62), (2**20, 2**20, 2**30)]:
        with pytest.raises(OpError):
            check_size(shape, np.float64)
