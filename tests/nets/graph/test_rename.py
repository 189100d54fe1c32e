"""Renaming: what each function changes, what it refuses, and how names inside arguments and sub-nets follow."""

import pytest
from test_ssa import INPLACE, do, recurrent, step_net

from jrnn.errors import NetError
from jrnn.nets.graph import (
    clone_and_bind,
    number_init_net,
    rename_blobs,
    rename_op_input,
    rename_op_output,
    ssa_rewrite,
)
from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.ir import Net, Op

INIT = Net(
    "init",
    (
        Op.of("GivenTensorFill", [], ["w"], shape=[1], values=[1.0]),
        Op.of("GivenTensorFill", [], ["b"], shape=[1]),
    ),
    (),
    ("w", "b"),
)


def ends(net):
    return [(op.inputs, op.outputs) for op in net.ops]


def test_renaming_an_output_follows_its_version_only():
    renamed = rename_op_output(INPLACE, 1, 0, "r")
    assert ends(renamed) == [
        (("x", "w", "b"), ("y",)),
        (("y",), ("r",)),
        (("r", "r"), ("z",)),
        (("x", "w", "b"), ("y",)),
    ]
    assert rename_op_output(INPLACE, 2, 0, "out").external_outputs == ("out",)
    assert rename_op_output(INPLACE, 1, 0, "y") is INPLACE


def test_renaming_an_input_with_one_reader():
    net = Net(
        "predict",
        (Op.of("FC", ["x", "w", "b"], ["y"]), Op.of("FC", ["y", "v", "b"], ["z"])),
        ("x", "w", "b", "v"),
    )
    renamed, init = rename_op_input(net, INIT, 0, 1, "weight")
    assert renamed.external_inputs == ("x", "weight", "b", "v")
    assert ends(renamed)[0] == (("x", "weight", "b"), ("y",))
    assert init.ops[0].outputs == ("weight",) and init.external_outputs == ("weight", "b")
    with pytest.raises(
        NetError, match=r"op #0 FC -> 'y'.*'b' is read by op #1 FC -> 'z'.*from_producer=True"
    ):
        rename_op_input(net, INIT, 0, 2, "bias")
    renamed, init = rename_op_input(net, INIT, 0, 2, "bias", from_producer=True)
    assert renamed.ops[1].inputs == ("y", "v", "bias") and init.external_outputs == ("w", "bias")
    assert INIT.external_outputs == ("w", "b")


def test_a_parameter_updated_by_the_net_keeps_its_first_version_apart():
    net = Net(
        "train", (Op.of("Sum", ["w", "g"], ["w"]), Op.of("Copy", ["w"], ["y"])), ("w", "g"), ("w",)
    )
    renamed, init = rename_op_input(net, INIT, 0, 0, "w_in")
    assert ends(renamed) == [(("w_in", "g"), ("w",)), (("w",), ("y",))]
    assert renamed.external_inputs == ("w_in", "g") and renamed.external_outputs == ("w",)
    assert init.external_outputs == ("w_in", "b")


def test_what_cannot_be_renamed():
    with pytest.raises(NetError, match="has 4 operators, #4 was asked"):
        rename_op_output(INPLACE, 4, 0, "r")
    with pytest.raises(NetError, match="has 1 outputs, number 1 was asked"):
        rename_op_output(INPLACE, 0, 1, "r")
    with pytest.raises(NetError, match="'z': net 'inplace' has a blob of that name"):
        rename_op_output(INPLACE, 0, 0, "z")
    with pytest.raises(NetError, match="'b': net 'init' has a blob"):
        rename_op_input(Net("n", (Op.of("Relu", ["w"], ["y"]),)), INIT, 0, 0, "b")


def test_recurrent_arguments_and_step_nets_follow():
    body = step_net(Op.of("FC", ["h", "w", "bias"], ["t"]), Op.of("Add", ["t", "x_t"], ["h_new"]))
    op = recurrent(body, alias_src=["h_states"], alias_dst=["h_all"], recurrent_states=["h_states"])
    names = {
        "x": "seq",
        "w": "weight",
        "bias": "offset",
        "h_all": "out",
        "h_states": "store",
        "t": "never",
        "h": "never",
    }
    net = rename_blobs(Net("n", (op,), ("x", "h0", "w"), ("h_all",)), names)
    (new,) = net.ops
    assert new.inputs == ("seq", "h0", "weight") and new.outputs == ("out",)
    assert new.arg("link_external") == (b"store", b"store", b"seq")
    assert new.arg("link_internal") == (b"h", b"h_new", b"x_t")
    assert (new.arg("alias_src"), new.arg("alias_dst")) == ((b"store",), (b"out",))
    assert new.arg("recurrent_states") == (b"store",)
    step = new.arg("step_net")
    assert step.ops[0].inputs == ("h", "weight", "offset") and step.ops[0].outputs == ("t",)
    assert step.external_inputs == ("x_t", "h", "weight")
    assert net.external_inputs == ("seq", "h0", "weight")


def test_a_backward_step_net_follows_the_references_but_not_the_scratch():
    forward = step_net(Op.of("Mul", ["x_t", "w"], ["t"]), Op.of("Add", ["t", "h"], ["h_new"]))
    backward = Net(
        "back",
        (Op.of("Mul", ["h_new_grad", "w"], ["x_t_grad"]), Op.of("Copy", ["t"], ["w_grad"])),
        ("t", "w"),
    )
    op = recurrent(
        forward,
        backward_step_net=backward,
        backward_link_internal=["h_new_grad", "x_t_grad"],
        backward_link_external=["h_states_grad", "x_grad"],
        param_grads=["w_grad"],
    )
    new = rename_in_op(
        op,
        {"w": "v", "x": "seq", "t": "never", "x_grad": "never"},
        {"x_grad": "dx", "w_grad": "dw"},
    )
    assert new.arg("backward_step_net").ops[0].inputs == ("h_new_grad", "v")
    assert new.arg("backward_step_net").external_inputs == ("t", "v")
    assert new.arg("backward_link_external") == (b"h_states_grad", b"seq_grad")
    assert new.arg("param_grads") == (b"w_grad",)


def test_an_overwritten_input_is_told_from_the_output_in_arguments():
    op = Op.of(
        "RecurrentNetwork",
        ["s", "h0"],
        ["s"],
        step_net=step_net(),
        link_internal=["x_t"],
        link_external=["s"],
        alias_src=["s_states"],
        alias_dst=["s"],
    )
    new = rename_in_op(op, {"s": "before"}, {"s": "after"})
    assert (new.inputs[0], new.outputs[0]) == ("before", "after")
    assert (new.arg("link_external"), new.arg("alias_dst")) == ((b"before",), (b"after",))


def test_gradients_that_keep_or_change_their_names_are_told():
    """A recurrent gradient operator looks for `<input>_grad`, or for what `<input>_grad.rename` says."""
    args = {"link_internal": ["x_t"], "backward_link_external": ["x_grad"], "step_net": step_net()}
    op = Op.of("RecurrentNetworkGradient", ["g", "x", "w"], ["x_grad", "w_grad"], **args)

    def told(read, written, start=op):
        new = rename_in_op(start, read, written)
        return {a.name: a.value for a in new.args if a.name.endswith(".rename")}

    assert told({"g": "h"}, {}) == {}
    assert told({"x": "y"}, {}) == {"y_grad.rename": b"x_grad"}
    assert told({}, {"w_grad": "dw"}) == {"w_grad.rename": b"dw"}
    assert told({"x": "y"}, {"x_grad": "y_grad"}) == {}
    inside = Net("back", (Op.of("Mul", ["x_t", "w"], ["w_grad"]),), ("x_t", "w"))
    new = rename_in_op(
        op.with_args({"step_net": inside, "param_grads": ["w_grad"]}), {}, {"w_grad": "dw"}
    )
    assert new.arg("step_net").ops[0].outputs == ("dw",) and new.arg("param_grads") == (b"dw",)
    once = rename_in_op(op, {"w": "v"}, {"x_grad": "dx"})
    assert told({"v": "u", "x": "y"}, {"dx": "d"}, once) == {
        "u_grad.rename": b"w_grad",
        "y_grad.rename": b"d",
    }


def test_old_nets_keep_the_gradients_of_renamed_parameters():
    """Without `param_grads` the step nets' blob is named after the input; renaming the input must not lose it."""
    backward = Net(
        "back", (Op.of("Mul", ["h_new_grad", "x_t"], ["w_grad"]),), ("h_new_grad", "x_t", "w")
    )
    nets = {
        "step_net": step_net(Op.of("Mul", ["h", "w"], ["h_new"])),
        "backward_step_net": backward,
        "param": [2],
    }
    links = {
        "link_internal": ["x_t", "h", "h_new"],
        "alias_dst": ["h_all"],
        "outputs_with_grads": [0],
    }
    forward = Op.of("RecurrentNetwork", ["x", "h0", "w"], ["h_all"], **nets, **links)
    assert rename_in_op(forward, {"w": "v"}, {}).arg("param_grads") == (b"w_grad",)
    assert rename_in_op(forward, {"x": "y"}, {}).arg("param_grads") is None
    gradient = Op.of(
        "RecurrentNetworkGradient",
        ["g", *forward.inputs, "h_all"],
        ["x_grad", "w_grad"],
        **nets,
        **links,
    )
    assert rename_in_op(gradient, {"w": "v"}, {}).arg("param_grads") == (b"w_grad",)


def test_a_name_that_a_sub_net_has_already_is_refused():
    op = recurrent(
        step_net(Op.of("FC", ["h", "w", "bias"], ["t"]), Op.of("Add", ["t", "x_t"], ["h_new"]))
    )
    with pytest.raises(
        NetError, match="cannot rename 'w' to 't': a sub-net of RecurrentNetwork has its own"
    ):
        rename_blobs(Net("n", (op,)), {"w": "t"})
    with pytest.raises(NetError, match="'t': net 'n' has a blob"):
        rename_op_output(Net("n", (Op.of("Relu", ["x"], ["w"]), op)), 0, 0, "t")


def test_bodies_of_do_keep_their_names():
    body = Net("body", (Op.of("Relu", ["a"], ["c"]),))
    op = do(body, ["a"], ["c"], ["a", "c"], [0, 2])
    (new,) = rename_blobs(Net("n", (op,)), {"a": "p", "c": "q", "ws": "v"}).ops
    assert new.inputs == ("p", "v") and new.outputs == ("q", "v")
    assert new.args == op.args


def test_branches_follow():
    inner = do(Net("body", (Op.of("Relu", ["a"], ["c"]),)), ["a"], ["c"], ["a", "c"], [0, 2])
    branch = Net("then", (inner,), ("a", "ws"), ("c", "ws"))
    op = Op.of("If", ["cond", "a", "ws"], ["c", "ws"], then_net=branch)
    (new,) = rename_blobs(Net("n", (op,)), {"a": "p", "c": "q"}).ops
    assert new.arg("then_net").ops[0].inputs == ("p", "ws")
    assert new.arg("then_net").external_outputs == ("q", "ws")
    assert new.arg("then_net").ops[0].arg("net") == inner.arg("net")


def test_versions_around_a_branch_are_renamed_together():
    branch = Net("then", (Op.of("Relu", ["a"], ["y"]),))
    net = Net(
        "n",
        (
            Op.of("Tanh", ["a"], ["y"]),
            Op.of("Tanh", ["y"], ["y"]),
            Op.of("If", ["c", "a"], ["y"], then_net=branch),
        ),
        ("a", "c"),
        ("y",),
    )
    renamed = rename_op_output(net, 2, 0, "out")
    assert ends(renamed) == [(("a",), ("y",)), (("y",), ("out",)), (("c", "a"), ("out",))]
    assert renamed.ops[2].arg("then_net").ops[0].outputs == ("out",)
    assert renamed.external_outputs == ("out",)
    rewritten = ssa_rewrite(net)
    assert [op.outputs[0] for op in rewritten.ops] == ["y_1", "y_2", "y_2"]
    assert ssa_rewrite(rewritten) == rewritten


def test_rewriting_avoids_names_that_are_taken():
    net = Net(
        "n",
        (
            Op.of("Relu", ["x"], ["x_1"]),
            Op.of("Relu", ["x"], ["x"]),
            Op.of("Add", ["x", "x_1"], ["y"]),
        ),
        ("x",),
    )
    assert ends(ssa_rewrite(net)) == [
        (("x",), ("x_1",)),
        (("x",), ("x_1_",)),
        (("x_1_", "x_1"), ("y",)),
    ]


def test_numbering_everything_and_its_init_net():
    numbered = ssa_rewrite(INPLACE, number_all=True)
    assert numbered.external_inputs == ("x_0", "w_0", "b_0") and numbered.external_outputs == (
        "z_1",
    )
    assert [op.outputs for op in numbered.ops] == [("y_1",), ("y_2",), ("z_1",), ("y_3",)]
    assert number_init_net(INIT).external_outputs == ("w_0", "b_0")


def test_clones_have_states_of_their_own():
    op = recurrent(
        step_net(Op.of("Add", ["h", "x_t"], ["h_new"])), alias_src=["h_states"], alias_dst=["h_all"]
    )
    cloned, remap = clone_and_bind(
        Net("n", (op,), ("x", "h0", "w"), ("h_all",)), "m", "m/", {"h0": "zero"}
    )
    assert cloned.ops[0].arg("link_external") == (b"m/h_states", b"m/h_states", b"x")
    assert cloned.ops[0].inputs == ("x", "zero", "w") and cloned.external_outputs == ("m/h_all",)
    assert remap == {"x": "x", "h0": "zero", "w": "w", "h_all": "m/h_all", "h_states": "m/h_states"}
