"""NetBuilder: names, scopes, parameters, and what it refuses."""

import pytest

import jrnn
from jrnn.errors import NetError, OpError, UnknownOperatorError


def test_scopes_and_fresh_names():
    b = jrnn.NetBuilder("n")
    x = b.input("x")
    with b.scope("layer"):
        first, second = b.Tanh(x), b.Tanh(x)
        with b.scope("inner"):
            third = b.Tanh(x, "y")
    assert (first, second, third) == ("layer/Tanh", "layer/Tanh_1", "layer/inner/y")
    assert b.Tanh(x) == "Tanh"


def test_two_builders_do_not_share_names():
    nets = []
    for _ in range(2):
        b = jrnn.NetBuilder("n")
        b.Relu(b.Tanh(b.input("x")))
        nets.append(b.build())
    assert nets[0] == nets[1]


def test_parameters_are_shared_by_name_and_checked_by_shape():
    b = jrnn.NetBuilder("n")
    assert b.param("w", [2, 3]) == b.param("w", (2, 3))
    with pytest.raises(
        NetError,
        match=r"parameter 'w' is declared with shape \(3, 2\), but exists with shape \(2, 3\)",
    ):
        b.param("w", [3, 2])
    assert [op.type for op in b.build_init().ops] == ["XavierFill"]


def test_undefined_reads_are_refused_at_once():
    b = jrnn.NetBuilder("n")
    b.input("input")
    with pytest.raises(
        NetError,
        match=r"op #0 Tanh.*reads blob 'inptu', which is not defined.*did you mean 'input'",
    ):
        b.Tanh("inptu")


def test_types_arity_and_arguments_are_checked():
    b = jrnn.NetBuilder("n")
    x = b.input("x")
    with pytest.raises(
        UnknownOperatorError, match="unknown operator 'Tahn'; did you mean .*'Tanh'"
    ):
        b.Tahn(x)
    with pytest.raises(OpError, match="op #0 FC.*was given 1"):
        b.FC(x)
    with pytest.raises(OpError, match="argument 'axis' must be int"):
        b.op("Softmax", x, axis="last")
    with pytest.raises(AttributeError, match="no attribute 'tanh'"):
        b.tanh(x)


def test_a_step_net_reads_its_parents_blobs_as_external_inputs():
    b = jrnn.NetBuilder("outer")
    w = b.input("w")
    step = jrnn.NetBuilder("step", parent=b)
    h = step.Mul([step.input("h_prev"), w], "h")
    assert step.build(outputs=[h]).external_inputs == ("h_prev", "w")


def test_unknown_output_is_refused():
    b = jrnn.NetBuilder("n")
    b.Tanh(b.input("x"), "hidden")
    with pytest.raises(
        NetError, match="no blob 'hiden' to use as an output; did you mean 'hidden'"
    ):
        b.build(outputs=["hiden"])
