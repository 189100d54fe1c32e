"""Reshapes before FC: which chains are found, and which Reshapes may go."""

import pytest

from jrnn.nets.graph import identify_reshape_sub_graph, remove_reshape_for_fc
from jrnn.nets.ir import Net, Op

SHAPE_CHAIN = (
    Op.of("Relu", ["x"], ["d"]),
    Op.of("Shape", ["d"], ["s"]),
    Op.of("Slice", ["s"], ["n"], starts=[0], ends=[1]),
    Op.of("Concat", ["n", "minus_one"], ["shape", "dims"], axis=0),
    Op.of("Reshape", ["d", "shape"], ["r", "old"]),
)
FC = Op.of("FC", ["r", "w", "b"], ["y"])
INPUTS = ("x", "minus_one", "w", "b")
PARAMS = {"minus_one": [-1], "w": 2, "b": 3}


def net_of(*ops, outputs=("y",)):
    return Net("n", ops, INPUTS, outputs)


def test_the_chain_is_found_wherever_it_stands():
    assert identify_reshape_sub_graph(net_of(*SHAPE_CHAIN, FC)) == [[1, 2, 3, 4]]
    before = tuple(Op.of("Relu", ["x"], [f"p{i}"]) for i in range(40))
    assert identify_reshape_sub_graph(net_of(*before, *SHAPE_CHAIN, FC)) == [[41, 42, 43, 44]]
    assert identify_reshape_sub_graph(net_of(*SHAPE_CHAIN, FC, *before)) == [[1, 2, 3, 4]]
    between = (*SHAPE_CHAIN[:2], *before, *SHAPE_CHAIN[2:])
    assert identify_reshape_sub_graph(net_of(*between)) == [[1, 42, 43, 44]]


def test_reshapes_whose_shape_is_given_stand_alone():
    given = Op.of("Reshape", ["x", "minus_one"], ["r", "old"])
    written = Op.of("Reshape", ["r"], ["q", "old"], shape=[2, -1])
    assert identify_reshape_sub_graph(net_of(given, written)) == [[0], [1]]


def test_reshape_and_its_chain_go_with_their_parameter():
    net, params = remove_reshape_for_fc(net_of(*SHAPE_CHAIN, FC), PARAMS)
    assert [(op.type, op.inputs) for op in net.ops] == [("Relu", ("x",)), ("FC", ("d", "w", "b"))]
    assert params == {"w": 2, "b": 3} and net.external_inputs == ("x", "w", "b")
    assert remove_reshape_for_fc(net, params) == (net, params)
    assert set(PARAMS) == {"minus_one", "w", "b"}


def test_a_parameter_with_another_reader_stays():
    net, params = remove_reshape_for_fc(
        net_of(*SHAPE_CHAIN, FC, Op.of("Copy", ["minus_one"], ["z"])), PARAMS
    )
    assert "Reshape" not in [op.type for op in net.ops]
    assert params == PARAMS and net.external_inputs == INPUTS


def test_a_reshape_in_place_goes():
    ops = (
        Op.of("Relu", ["x"], ["d"]),
        Op.of("Reshape", ["d", "minus_one"], ["d", "old"]),
        Op.of("FC", ["d", "w", "b"], ["y"]),
    )
    net, _ = remove_reshape_for_fc(net_of(*ops), PARAMS)
    assert [op.type for op in net.ops] == ["Relu", "FC"]


@pytest.mark.parametrize(
    "ops, outputs",
    [
        ((*SHAPE_CHAIN, FC, Op.of("Relu", ["r"], ["z"])), ("y",)),
        ((*SHAPE_CHAIN, FC, Op.of("Copy", ["dims"], ["z"])), ("y",)),
        ((*SHAPE_CHAIN, FC), ("y", "r")),
        (SHAPE_CHAIN, ("d",)),
        ((*SHAPE_CHAIN, Op.of("FC", ["d", "r", "b"], ["y"])), ("y",)),
        ((*SHAPE_CHAIN, Op.of("Relu", ["d"], ["d"]), FC), ("y",)),
        ((*SHAPE_CHAIN, Op.of("FC", ["r", "w", "b"], ["y"], axis=2)), ("y",)),
        ((Op.of("Reshape", ["x", "minus_one"], ["r", "old"]), FC), ("y",)),
    ],
    ids=[
        "other reader",
        "chain read",
        "given out",
        "unread",
        "as weight",
        "overwritten",
        "other axis",
        "input of the net",
    ],
)
def test_reshapes_that_must_stay(ops, outputs):
    net = net_of(*ops, outputs=outputs)
    assert remove_reshape_for_fc(net, PARAMS) == (net, PARAMS)


def test_known_shapes_decide():
    net = net_of(*SHAPE_CHAIN, FC)
    assert len(remove_reshape_for_fc(net, PARAMS, {"d": (2, 3, 4), "r": (2, 12)})[0].ops) == 2
    assert remove_reshape_for_fc(net, PARAMS, {"d": (2, 3, 4), "r": (6, 4)})[0] == net
    deep = net_of(*SHAPE_CHAIN, Op.of("FC", ["r", "w", "b"], ["y"], axis=-1))
    assert len(remove_reshape_for_fc(deep, PARAMS, {"d": (2, 3, 2, 2), "r": (2, 3, 4)})[0].ops) == 2
