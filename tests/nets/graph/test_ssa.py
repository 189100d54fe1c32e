"""Versions, undeclared reads and liveness, on nets with in-place blobs and sub-nets."""

import pytest

from jrnn.errors import NetError
from jrnn.nets.graph.scope import Workspace, all_names, free_names, workspace_of
from jrnn.nets.graph.ssa import (
    get_consumer_map,
    get_op_ids_in_path,
    get_output_producers,
    get_producer_map,
    get_ssa,
    get_undefined_blobs,
    live_ops,
    undeclared_reads,
)
from jrnn.nets.ir import Net, Op

INPLACE = Net(
    "inplace",
    (
        Op.of("FC", ["x", "w", "b"], ["y"]),
        Op.of("Relu", ["y"], ["y"]),
        Op.of("Add", ["y", "y"], ["z"]),
        Op.of("FC", ["x", "w", "b"], ["y"]),
    ),
    ("x", "w", "b"),
    ("z",),
)


def step_net(*ops):
    return Net("step", ops, ("x_t", "h", "w"), ("h_new",))


def recurrent(net, **more):
    return Op.of(
        "RecurrentNetwork",
        ["x", "h0", "w"],
        ["h_all"],
        step_net=net,
        link_internal=["h", "h_new", "x_t"],
        link_external=["h_states", "h_states", "x"],
        **more,
    )


def do(net, inputs, outputs, inner, idx):
    return Op.of(
        "Do", [*inputs, "ws"], [*outputs, "ws"], net=net, inner_blobs=inner, outer_blobs_idx=idx
    )


def test_versions_count_writes():
    ssa, versions = get_ssa(INPLACE)
    assert ssa[1] == ([("y", 1)], [("y", 2)])
    assert ssa[2] == ([("y", 2), ("y", 2)], [("z", 1)])
    assert versions == {"x": 0, "w": 0, "b": 0, "y": 3, "z": 1}


def test_versions_continue_from_those_given_without_changing_them():
    given = {"w": 1}
    ssa, versions = get_ssa(INPLACE, given)
    assert ssa[0][0] == [("x", 0), ("w", 1), ("b", 0)]
    assert given == {"w": 1} and versions["w"] == 1


def test_an_undeclared_input_gets_a_version_only_where_none_is_declared():
    op = Op.of("Add", ["p", "q"], ["r"])
    assert get_ssa(Net("n", (op,), ("p",)))[1] == {"p": 0, "r": 1}
    assert get_ssa(Net("n", (op,)))[1] == {"p": 0, "q": 0, "r": 1}


def test_producers_and_consumers():
    ssa, _ = get_ssa(INPLACE)
    assert get_output_producers(ssa) == {("y", 1): 0, ("y", 2): 1, ("z", 1): 2, ("y", 3): 3}
    assert get_producer_map(ssa)[("z", 1)] == (2, 0)
    assert get_consumer_map(ssa)[("y", 2)] == [(2, 0), (2, 1)]
    assert ("y", 3) not in get_consumer_map(ssa)
    assert get_undefined_blobs(ssa) == ["x", "w", "b"]


def test_path_runs_back_from_the_last_versions():
    ssa, versions = get_ssa(INPLACE)
    assert get_op_ids_in_path(ssa, versions, ["x"], ["z"]) == [0, 1, 2]
    assert get_op_ids_in_path(ssa, versions, [], ["y"]) == [3]
    with pytest.raises(NetError, match="'zz' has no version"):
        get_op_ids_in_path(ssa, versions, [], ["zz"])


def test_live_operators_follow_versions_not_names():
    assert live_ops(INPLACE, ["z"]) == [0, 1, 2]
    assert live_ops(INPLACE, ["y"]) == [3]
    assert live_ops(INPLACE, ["x"]) == []


def test_a_step_net_reads_the_outer_workspace():
    net = step_net(Op.of("FC", ["h", "w", "bias"], ["t"]), Op.of("Add", ["t", "x_t"], ["h_new"]))
    assert free_names(recurrent(net)) == ["bias"]
    whole = Net("n", (Op.of("Relu", ["b0"], ["bias"]), recurrent(net)), ("b0",))
    assert live_ops(whole, ["h_all"]) == [0, 1]
    assert undeclared_reads(whole) == ["x", "h0", "w"]


def test_a_backward_step_net_reads_what_the_forward_one_wrote():
    forward = step_net(Op.of("Tanh", ["x_t"], ["t"]), Op.of("Mul", ["t", "g"], ["h_new"]))
    backward = Net(
        "back",
        (Op.of("TanhGradient", ["t", "h_new_grad"], ["x_t_grad"]), Op.of("Mul", ["s", "t"], ["u"])),
    )
    op = recurrent(
        forward, backward_step_net=backward, backward_link_internal=["h_new_grad", "x_t_grad"]
    )
    assert free_names(op) == ["g", "s"]


def test_step_nets_inside_step_nets():
    inner = recurrent(step_net(Op.of("Mul", ["h", "deep"], ["h_new"])))
    outer = step_net(Op.of("Tanh", ["x_t"], ["x"]), Op.of("Copy", ["x"], ["h0"]), inner)
    assert free_names(recurrent(outer)) == ["deep"]


def test_the_timestep_is_not_free():
    net = step_net(Op.of("Mul", ["h", "timestep"], ["h_new"]))
    assert free_names(recurrent(net)) == []
    assert free_names(recurrent(net, timestep="clock")) == ["timestep"]


def test_branches_share_the_workspace_and_bodies_of_do_do_not():
    branch = Net("then", (Op.of("Add", ["a", "b"], ["c"]), Op.of("Relu", ["c"], ["d"])))
    assert free_names(Op.of("If", ["cond", "a"], ["d"], then_net=branch)) == ["b"]
    body = Net("body", (Op.of("Add", ["a", "b"], ["c"]),))
    bound = do(body, ["p"], ["q"], ["a", "c"], [0, 2])
    assert free_names(bound) == []
    assert workspace_of(bound) is Workspace.CLOSED
    assert list(all_names(Net("n", (bound,)))) == ["p", "ws", "q", "ws", "a", "c", "a", "b", "c"]


def test_a_branch_that_may_not_be_taken_keeps_the_value_before_it():
    branch = Net("then", (Op.of("Relu", ["a"], ["y"]),))
    net = Net(
        "n", (Op.of("Tanh", ["a"], ["y"]), Op.of("If", ["cond", "a"], ["y"], then_net=branch))
    )
    assert live_ops(net, ["y"]) == [0, 1]
