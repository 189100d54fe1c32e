"""Dead ends, joining, comparing, sub-graphs, memory and parameters: the cases that random nets do not make."""

import numpy as np
import pytest
from test_ssa import INPLACE, do, recurrent, step_net

from jrnn.errors import NetError
from jrnn.nets.graph import (
    append_net,
    extract_sub_net,
    get_external_blob_names,
    get_params_from_init_net,
    get_sub_graph_external_input_output,
    optimize_memory,
    remove_dead_end_ops,
    verify_graph_equality,
)
from jrnn.nets.ir import DeviceOption, Net, Op

CUDA = DeviceOption(device_type=1, device_id=0)


def relu(a, b):
    return Op.of("Relu", [a], [b])


def types(net):
    return [op.type for op in net.ops]


def test_a_blob_with_one_removed_reader_stays_for_the_other():
    net = Net(
        "n",
        (Op.of("Tanh", ["x"], ["h"]), relu("h", "y"), Op.of("Exp", ["h"], ["unused"])),
        ("x",),
        ("y",),
    )
    assert types(remove_dead_end_ops(net)) == ["Tanh", "Relu"]


def test_dead_versions_go():
    assert [op.outputs for op in remove_dead_end_ops(INPLACE).ops] == [("y",), ("y",), ("z",)]
    assert remove_dead_end_ops(Net("n", (relu("x", "y"),), ("x",))).ops == ()


def test_what_sub_nets_read_is_needed():
    op = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"])))
    net = Net("n", (relu("x", "scale"), relu("x", "other"), op), ("x", "h0", "w"), ("h_all",))
    assert types(remove_dead_end_ops(net)) == ["Relu", "RecurrentNetwork"]


def test_step_nets_are_cleaned_unless_somebody_looks_inside():
    body = (Op.of("Mul", ["h", "w"], ["h_new"]), relu("h", "unused"))
    op = recurrent(step_net(*body), alias_dst=["h_all"])
    net = Net("n", (op,), (), ("h_all",))
    assert types(remove_dead_end_ops(net).ops[0].arg("step_net")) == ["Mul"]
    trained = recurrent(
        step_net(*body), alias_dst=["h_all"], backward_step_net=Net("back", (relu("unused", "g"),))
    )
    assert remove_dead_end_ops(Net("n", (trained,), (), ("h_all",))).ops == (trained,)
    fetched = Op.of(
        "RecurrentNetwork", op.inputs, ["h_all", "workspaces"], **{a.name: a.value for a in op.args}
    )
    fetcher = Op.of("RecurrentNetworkBlobFetcher", ["workspaces"], ["names"])
    looked_into = Net("n", (fetched, fetcher), (), ("h_all", "names"))
    assert remove_dead_end_ops(looked_into) == looked_into


def test_step_nets_in_branches_are_cleaned():
    inner = recurrent(
        step_net(Op.of("Mul", ["h", "w"], ["h_new"]), relu("h", "unused")), alias_dst=["h_all"]
    )
    branch = Net("then", (inner, relu("a", "local")))
    op = Op.of("If", ["cond", "x", "h0", "w"], ["h_all"], then_net=branch)
    (cleaned,) = remove_dead_end_ops(Net("n", (op,), (), ("h_all",))).ops
    assert types(cleaned.arg("then_net")) == ["RecurrentNetwork", "Relu"]
    assert types(cleaned.arg("then_net").ops[0].arg("step_net")) == ["Mul"]
    body = do(Net("body", (relu("a", "c"), relu("a", "saved"))), ["p"], ["q"], ["a", "c"], [0, 2])
    net = Net("n", (body,), ("p", "ws"), ("q",))
    assert remove_dead_end_ops(net) == net


def test_appending_on_a_device_reaches_every_sub_net():
    branch = Net("then", (relu("a", "b"),))
    other = Net(
        "o",
        (
            Op.of("If", ["cond", "a"], ["b"], then_net=branch),
            recurrent(step_net(relu("h", "h_new"))),
        ),
    )
    joined = append_net(Net("n"), other, CUDA)
    assert [op.device_option for op in joined.ops] == [CUDA, CUDA]
    assert joined.ops[0].arg("then_net").ops[0].device_option == CUDA
    assert joined.ops[1].arg("step_net").ops[0].device_option == CUDA
    assert other.ops[0].device_option is None


def test_equality_looks_at_outputs_and_at_what_comes_from_outside():
    split = Op.of("Split", ["x"], ["a", "b"])
    net = Net("n", (split, Op.of("Sub", ["a", "b"], ["y"])))
    assert not verify_graph_equality(net, Net("n", (split, Op.of("Sub", ["b", "a"], ["y"]))))
    one, two = (
        Net("n", (Op.of("Sub", ["p", "q"], ["y"]),)),
        Net("n", (Op.of("Sub", ["p", "p"], ["y"]),)),
    )
    assert not verify_graph_equality(one, two)
    assert verify_graph_equality(one, Net("m", (Op.of("Sub", ["q", "p"], ["q"]),)))
    assert not verify_graph_equality(one, Net("n", one.ops + one.ops))


def test_equality_compares_sub_nets():
    one = recurrent(step_net(relu("h", "h_new")))
    assert verify_graph_equality(
        Net("n", (one,)), Net("n", (recurrent(step_net(relu("x_t", "z"))),))
    )
    assert not verify_graph_equality(
        Net("n", (one,)), Net("n", (recurrent(step_net(Op.of("Exp", ["h"], ["h_new"]))),))
    )
    other = Op.of("RecurrentNetwork", one.inputs, one.outputs, link_internal=["h"])
    assert not verify_graph_equality(Net("n", (one,)), Net("n", (other,)))


def test_the_ends_of_part_of_a_net():
    assert get_sub_graph_external_input_output(INPLACE, [2]) == ([("y", 2)], [("z", 1)])
    assert get_sub_graph_external_input_output(INPLACE, [0, 1]) == (
        [("x", 0), ("w", 0), ("b", 0)],
        [("y", 2)],
    )
    assert get_sub_graph_external_input_output(INPLACE, [3])[1] == []
    with pytest.raises(NetError, match="has 4 operators, #7 was asked"):
        get_sub_graph_external_input_output(INPLACE, [7])
    op = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"])))
    net = Net("n", (relu("x", "scale"), op))
    assert get_sub_graph_external_input_output(net, [0])[1] == [("scale", 1)]
    assert get_sub_graph_external_input_output(net, [1])[0] == [
        ("x", 0),
        ("h0", 0),
        ("w", 0),
        ("scale", 1),
    ]


def test_undefined_blobs_of_a_body_are_named():
    net = Net("body", (Op.of("Add", ["alpha", "b"], ["c"]),))
    with pytest.raises(
        NetError, match=r"net 'body': its input blob 'alpha' is undefined.*did you mean 'alphas'"
    ):
        get_external_blob_names(net, ["alphas", "b"])
    nested = Net("body", (recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"]))),))
    assert get_external_blob_names(nested, ["x", "h0", "w", "scale"]) == (
        ["x", "h0", "w", "scale"],
        [],
    )


def test_a_part_that_mixes_versions_is_refused():
    net = Net(
        "n",
        (
            relu("x", "y"),
            Op.of("Tanh", ["y"], ["t"]),
            relu("y", "y"),
            Op.of("Add", ["y", "t"], ["z"]),
        ),
        ("x",),
    )
    with pytest.raises(
        NetError, match=r"op #0 Relu -> 'y' .*handles version 1 of 'y', which is given as version 2"
    ):
        extract_sub_net(net, ["y"], ["z"])
    with pytest.raises(NetError, match="net 'n' has no blob 'yy'; did you mean 'y'"):
        extract_sub_net(net, ["yy"], ["z"])
    part = extract_sub_net(net, ["t"], ["z"], "part")
    assert (part.name, types(part), part.external_inputs) == (
        "part",
        ["Relu", "Relu", "Add"],
        ("t", "x"),
    )


def test_a_part_takes_what_its_sub_nets_read():
    op = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"])))
    net = Net("n", (relu("s", "scale"), relu("s", "x"), op), ("s",), ("h_all",))
    part = extract_sub_net(net, ["x"], ["h_all"])
    assert types(part) == ["Relu", "RecurrentNetwork"] and part.external_inputs == (
        "x",
        "s",
        "h0",
        "w",
    )


def test_memory_is_shared_by_size():
    shapes = {
        name: np.zeros([n], np.float64)
        for name, n in {"a": 4, "b": 1, "c": 4, "d": 1, "e": 8, "y": 9}.items()
    }
    chain = [relu(*pair) for pair in zip("xabcde", "abcdey")]
    net = Net("n", tuple(chain), ("x",), ("y",))
    optimized, report = optimize_memory(net, shapes)
    assert report.assignments == {"c": "a", "d": "b", "e": "a"}
    assert (report.baseline_bytes, report.optimized_bytes, report.saved_bytes) == (
        8 * 18,
        8 * 9,
        8 * 9,
    )
    assert [op.outputs[0] for op in optimized.ops] == ["a", "b", "a", "b", "a", "y"]
    kept, report = optimize_memory(net, shapes, static_blobs=["a", "c"])
    assert report.assignments == {"d": "b"}
    assert [op.outputs[0] for op in kept.ops] == ["a", "b", "c", "b", "e", "y"]


def test_memory_of_recurrent_networks_keeps_its_names():
    body = step_net(Op.of("Mul", ["h", "scale"], ["h_new"]))
    net = Net(
        "n",
        (relu("s", "p"), relu("p", "scale"), relu("p", "x"), recurrent(body), relu("h_all", "y")),
        ("s",),
        ("y",),
    )
    shapes = dict.fromkeys(["p", "scale", "x", "h_all"], np.zeros([4], np.float32))
    optimized, report = optimize_memory(net, shapes)
    assert optimized == net and report.saved_bytes == 0


def test_memory_of_blobs_that_only_arguments_name_keeps_its_names():
    named = Op.of("RecurrentNetworkGradient", ["d"], ["y"], link_external=["a"])
    net = Net(
        "n", (relu("x", "a"), relu("x", "b"), relu("b", "c"), relu("c", "d"), named), ("x",), ("y",)
    )
    shapes = dict.fromkeys("abcd", np.zeros([4], np.float32))
    assert optimize_memory(net, shapes)[1].assignments == {"d": "b"}


def test_parameters_of_an_init_net():
    ops = (
        Op.of("GivenTensorFill", [], ["w"], values=[1.0]),
        Op("GivenTensorFill", (), ("g",), device_option=CUDA),
        Op("CopyGPUToCPU", ("g",), ("b",), device_option=CUDA),
    )
    seen = []

    def run(net, blobs):
        seen.append((net, blobs))
        return {"w": 1, "g": 2, "b": 3}

    init = Net("init", ops, (), ("b", "w", "g"))
    values, devices = get_params_from_init_net(init, run)
    assert values == {"b": 3, "w": 1, "g": 2} and seen == [(init, {})]
    assert devices == {"b": DeviceOption(), "w": DeviceOption(), "g": CUDA}
    with pytest.raises(NetError, match="declares the output 'z', which none"):
        get_params_from_init_net(Net("init", ops, (), ("z",)), run)
