"""Free: a blob has no value after it. What reads the blob then is an error that names the Free, wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from build_plans import execution_step, make_plan

import jrnn
from jrnn import Net
from jrnn.cli import main
from jrnn.errors import GradientError, NetError, OpError
from jrnn.nets import Op
from jrnn.nets.plans import run_plan

X = np.float32([1, 2, -3])
HIDDEN = (Op.of("Relu", ["x"], ["h"]), Op.of("Sqr", ["h"], ["y"]))
FREE = Op.of("Free", ["h"], ["h"])
READ = Op.of("Negative", ["h"], ["z"])
FREED = r"op #\d Negative -> 'z' in net 'n': reads blob 'h', which Free -> 'h' has freed; free it after its last reader"


def traced(net, blobs, *outputs):
    return jax.jit(jrnn.to_jax(net, outputs or None))(jax.tree.map(jnp.asarray, blobs))


def test_a_net_that_frees_runs_as_one_that_does_not():
    net, plain = (Net("n", (*HIDDEN, *more), ("x",)) for more in ((FREE,), ()))
    for results in (jrnn.run_net(net, {"x": X}), traced(net, {"x": X})):
        assert results.keys() == {"y"}
        np.testing.assert_array_equal(results["y"], jrnn.run_net(plain, {"x": X})["y"])
    assert jrnn.nets.infer_shapes(net, {"x": X}) == jrnn.nets.infer_shapes(
        plain, {"x": X}
    )  # of freed blobs, too
    again = Net("n", (*HIDDEN, FREE, FREE, HIDDEN[0], READ))
    assert jrnn.run_net(again, {"x": X})["z"].tolist() == [-1, -2, 0]


def test_what_reads_a_freed_blob_names_who_freed_it():
    net = Net("n", (*HIDDEN, FREE, READ))
    with pytest.raises(NetError, match=FREED):
        jrnn.run_net(net, {"x": X})
    with pytest.raises(NetError, match=FREED):
        traced(net, {"x": X}, "z")
    with pytest.raises(NetError, match="net 'n' has the output 'h', which Free has freed"):
        traced(Net("n", (*HIDDEN, FREE)), {"x": X}, "h")
    with pytest.raises(OpError, match=r"its outputs are \['h'\]; they must be its inputs"):
        jrnn.run_net(Net("n", (Op.of("Free", ["x"], ["h"]),)), {"x": X})


def test_memory_of_freed_blobs_is_counted_no_more():
    """Four blobs of 4 kB each, of which two are there at a time."""
    ops = [Op.of("Negative", [f"b{k}"], [f"b{k + 1}"]) for k in range(4)]
    freed = [Op.of("Free", [f"b{k}"], [f"b{k}"]) for k in range(1, 4)]
    freeing = [ops[0], *(op for pair in zip(ops[1:], freed) for op in pair)]
    blobs = {"b0": np.zeros(1000, np.float32)}
    assert jrnn.run_net(Net("n", tuple(freeing)), blobs, max_bytes=9_000).keys() == {"b4"}
    with pytest.raises(OpError, match="blob 'b3' would be"):
        jrnn.run_net(Net("n", tuple(ops)), blobs, max_bytes=9_000)


def test_gradients_of_a_net_that_frees():
    net = Net("n", (*HIDDEN, FREE), ("x",), ("y",))
    full, gradients = jrnn.add_gradients(net, {"y": None})
    np.testing.assert_array_equal(jrnn.run_net(full, {"x": X})[gradients["x"]], [2, 4, 0])
    assert jrnn.check_gradients(net, {"x": X}).agrees
    with pytest.raises(GradientError, match="Free has no gradient"):
        jrnn.add_gradients(net, {"h": None})


@pytest.mark.parametrize("run", [jrnn.run_net, traced])
def test_freeing_in_a_branch(run):
    branches = {
        "then_net": Net("then", (*HIDDEN, FREE)),
        "else_net": Net("else", (Op.of("Negative", ["x"], ["y"]),)),
    }
    choose = Op.of("If", ["c"], ["y", "h"], **branches)
    for c, expected in ((True, [1, 4, 0]), (False, [-1, -2, 3])):
        blobs = {"x": X, "h": X, "c": np.array([c])}
        assert run(Net("n", (choose,)), blobs)["y"].tolist() == expected
    with pytest.raises(NetError, match=FREED):
        run(Net("n", (choose, READ)), {"x": X, "h": X, "c": np.array([True])})


@pytest.mark.parametrize("run", [jrnn.run_net, traced])
def test_freeing_in_a_loop(run):
    blobs = {
        "x": np.float32([2]),
        "h": np.float32([1]),
        "top": np.float32([1000]),
        "go": np.array([True]),
    }

    def net(*ops):
        body = Net("body", (*ops, FREE, Op.of("LT", ["x", "top"], ["go"])))
        return Net("n", (Op.of("While", ["go"], ["x", "go", "h"], loop_net=body),))

    squares = net(Op.of("Sqr", ["x"], ["h"]), Op.of("Copy", ["h"], ["x"]))
    assert run(squares, blobs)["x"].tolist() == [65536]
    with pytest.raises(NetError, match=FREED):
        run(Net("n", (*squares.ops, READ)), blobs)
    with pytest.raises(NetError, match="reads blob 'h', which Free -> 'h' has freed"):
        run(net(Op.of("Add", ["x", "h"], ["x"])), blobs)


def test_freeing_in_a_plan():
    first, second = Net("first", (*HIDDEN, FREE), ("x",)), Net("second", (READ,), ("h",))
    assert run_plan(
        make_plan("p", execution_step("s", first, num_iter=2)), {"x": X, "h": X}
    ).keys() == {"x", "y"}
    with pytest.raises(
        NetError,
        match="step 'second': op #0 Negative.* reads blob 'h', which net 'first' has freed",
    ):
        run_plan(make_plan("p", first, second), {"x": X})


def test_run_prints_what_has_a_value(tmp_path, capsys):
    jrnn.write_net(Net("n", (*HIDDEN, FREE), ("x",)), tmp_path / "n.pb")
    assert main(["run", str(tmp_path / "n.pb"), "--feed", "x=[3.0]"]) == 0
    assert capsys.readouterr().out == "y float32[1]\n[9.]\n"
    assert main(["run", str(tmp_path / "n.pb"), "--feed", "x=[3.0]", "--fetch", "h"]) == 2
    assert "net 'n' has the output 'h', which Free has freed" in capsys.readouterr().err
