"""Passes over nets of real operators: what `run_net` and `to_jax` compute stays, gradients of a recorded LSTM included."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from symbolic import random_net

import jrnn
from jrnn.nets import graph
from jrnn.nets.ir import Net, Op

ANSWERS = json.loads((Path(__file__).parents[2] / "golden" / "graph" / "caffe2.json").read_text())
T, N, D, H = 3, 2, 3, 4


def recorded(name):
    return jrnn.read_net(base64.b64decode(ANSWERS[name]["net"]))


def simple(seed):
    """A random net of 200 operators, all of which the library has, with shapes that fit."""
    net = random_net(seed, nested=False)
    kinds = {"Split": "Sigmoid", "Mul": "Sub", "CopyCPUToGPU": "Tanh", "CopyGPUToCPU": "Relu"}
    ops = tuple(
        Op.of(kinds.get(op.type, op.type), op.inputs, [out]) for op in net.ops for out in op.outputs
    )
    return replace(net, ops=ops, external_outputs=(*ops[-1].outputs, *net.external_outputs))


def drawn(shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def lstm():
    shapes = {
        "input": (T, N, D),
        "h0": (1, N, H),
        "c0": (1, N, H),
        "lstm/i2h_w": (4 * H, D),
        "lstm/i2h_b": (4 * H,),
        "lstm/gates_t_w": (4 * H, H),
        "lstm/gates_t_b": (4 * H,),
    }
    blobs = {name: drawn(shape) for name, shape in shapes.items()} | {
        "lengths": np.array([3, 2], np.int32)
    }
    net = recorded("lstm_train")
    results = (
        "loss",
        "lstm/gates_t_w_grad",
        "lstm/i2h_w_grad",
        "h0_grad",
        "input_grad",
        "lstm/cell_state_all",
    )
    net = replace(net, external_outputs=results)
    return net, blobs, jrnn.run_net(net, blobs)


def check_same(net, blobs, names, expected):
    actual = jrnn.run_net(net, blobs)
    assert len(net.external_outputs) == len(names)
    for new, old in zip(net.external_outputs, names):
        np.testing.assert_array_equal(actual[new], expected[old])


@pytest.mark.exhaustive
def test_clones_and_numbered_versions_of_a_recurrent_net_keep_its_gradients(lstm):
    net, blobs, expected = lstm
    cloned, remap = graph.clone_and_bind(net, "clone", "c/", {"input": "other"})
    check_same(cloned, {remap[n]: v for n, v in blobs.items()}, net.external_outputs, expected)
    numbered = graph.ssa_rewrite(net, number_all=True)
    check_same(numbered, {f"{n}_0": v for n, v in blobs.items()}, net.external_outputs, expected)


def test_a_recurrent_net_renamed_and_cleaned_keeps_its_gradients(lstm):
    net, blobs, expected = lstm
    renamed = graph.rename_op_output(net, 0, 0, "projected")
    assert renamed.ops[1].arg("link_external")[-1] == b"projected"
    renamed, _ = graph.rename_op_input(renamed, Net(), 1, 3, "recurrent_weight", from_producer=True)
    assert "recurrent_weight" in renamed.ops[1].arg("backward_step_net").external_inputs
    renamed = graph.rename_op_output(renamed, 7, 1, "weight_gradient")
    assert "weight_gradient" in renamed.external_outputs
    blobs = {"recurrent_weight" if n == "lstm/gates_t_w" else n: v for n, v in blobs.items()}
    check_same(
        graph.remove_dead_end_ops(graph.ssa_rewrite(renamed)), blobs, net.external_outputs, expected
    )


def test_memory_with_derived_shapes(lstm):
    net, blobs, expected = lstm
    small = replace(net, external_outputs=("lstm/gates_t_w_grad",))
    optimized, report = graph.optimize_memory(small, jrnn.nets.infer_shapes(small, blobs))
    check_same(optimized, blobs, small.external_outputs, expected)
    assert report.saved_bytes >= 0
    chain = recorded("chain")
    given = {"x0": drawn((5, 5))}
    optimized, report = graph.optimize_memory(chain, jrnn.nets.infer_shapes(chain, given))
    check_same(optimized, given, chain.external_outputs, jrnn.run_net(chain, given))
    assert report.saved_bytes == 9 * 100


def test_a_part_of_a_recurrent_net_runs(lstm):
    net, blobs, expected = lstm
    part = graph.extract_sub_net(net, ["lstm/i2h"], ["lstm/cell_state_all"])
    assert [op.type for op in part.ops] == ["RecurrentNetwork"]
    given = {n: (blobs | expected)[n] for n in part.external_inputs}
    check_same(part, given, part.external_outputs, expected)


def test_a_net_pruned_by_to_jax_gives_the_same(lstm):
    net, blobs, expected = lstm
    actual = jax.jit(jrnn.to_jax(net, ["loss"]))(blobs)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-6)


@pytest.mark.parametrize("seed", [11, 12])
def test_random_nets_of_real_operators(seed):
    net = simple(seed)
    blobs = {name: drawn((2, 3)) + k for k, name in enumerate(net.external_inputs)}
    names, expected = net.external_outputs, jrnn.run_net(net, blobs)
    shapes = jrnn.nets.infer_shapes(net, blobs)
    check_same(graph.ssa_rewrite(net), blobs, names, expected)
    check_same(graph.remove_dead_end_ops(net), blobs, names, expected)
    check_same(graph.fuse_copy_between_cpu_and_gpu(net), blobs, names, expected)
    check_same(graph.optimize_memory(net, shapes)[0], blobs, names, expected)


def test_parameters_come_from_running_the_init_net():
    init = Net("init", (Op.of("ConstantFill", [], ["w"], shape=[2], value=3.0),), (), ("w",))
    values, _ = graph.get_params_from_init_net(init, jrnn.run_net)
    np.testing.assert_array_equal(values["w"], np.full([2], 3.0, np.float32))


def test_a_reshape_that_goes_changes_nothing():
    ops = (
        Op.of("Relu", ["x"], ["d"]),
        Op.of("Reshape", ["d", "shape"], ["r", "old"]),
        Op.of("FC", ["r", "w", "b"], ["y"]),
    )
    net = Net("n", ops, ("x", "shape", "w", "b"), ("y",))
    params = {"shape": np.array([0, -1]), "w": drawn((4, 6)), "b": drawn((4,))}
    x = drawn((5, 2, 3))
    smaller, kept = graph.remove_reshape_for_fc(net, params)
    assert len(smaller.ops) == 2 and sorted(kept) == ["b", "w"]
    check_same(smaller, {"x": x, **kept}, ("y",), jrnn.run_net(net, {"x": x, **params}))
