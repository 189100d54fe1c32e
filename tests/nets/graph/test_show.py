"""Listings and drawings of nets: what stands in them, and that Graphviz can read them."""

import shutil
import subprocess

import numpy as np
import pytest
from test_ssa import INPLACE, recurrent, step_net

from jrnn.nets.graph import show, to_dot
from jrnn.nets.ir import DeviceOption, Message, Net, Op

STEP = step_net(
    Op.of("FC", ["h", "w", "bias"], ["t"], axis=2), Op.of("Add", ["t", "x_t"], ["h_new"])
)
RECURRENT = Net(
    "rnn", (recurrent(STEP, timestep="timestep"),), ("x", "h0", "w"), ("h_all",), type="simple"
)


def test_listing_of_a_recurrent_net():
    assert show(RECURRENT, {"h_all": np.zeros([3, 2, 4], np.float32)}).splitlines() == [
        "net rnn [simple] (x, h0, w) -> (h_all)",
        "  #0 h_all [3, 2, 4] float32 = RecurrentNetwork(x, h0, w) link_internal=['h', 'h_new', 'x_t'] "
        "link_external=['h_states', 'h_states', 'x'] timestep='timestep' outer=(bias)",
        "    step_net: step (x_t, h, w) -> (h_new)",
        "      #0 t = FC(h, w, bias) axis=2",
        "      #1 h_new = Add(t, x_t)",
    ]


def test_listing_of_everything_an_operator_may_have():
    op = Op(
        "Print",
        ("x",),
        (),
        name="say",
        engine="CUDNN",
        device_option=DeviceOption(1, 2),
        control_inputs=("a",),
    )
    assert (
        show(Net("n", (op,))).splitlines()[1]
        == "  #0 Print(x) engine=CUDNN name=say after=(a) on CUDA:2"
    )
    fill = Op.of(
        "GivenTensorFill",
        [],
        ["w"],
        values=np.arange(20.0),
        t=Message("TensorProto", b"1234"),
        s="x" * 99,
        e=[],
    )
    line = show(Net("n", (fill,))).splitlines()[1]
    assert (
        "values=[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]" in line
        and "t=<TensorProto, 4 bytes>" in line
    )
    assert "s='" + "x" * 60 + "...'" in line and line.endswith("e=[]")


def test_a_drawing_tells_versions_apart_and_boxes_step_nets():
    dot = to_dot(INPLACE)
    assert '"b/y/1" -> "o/1";' in dot and '"o/1" -> "b/y/2";' in dot and '"b/y/2" -> "o/2";' in dot
    nested = to_dot(RECURRENT)
    assert 'subgraph "cluster_o/0/0/" {' in nested and 'label="step_net step"' in nested
    assert '"b/bias/0" -> "o/0";' in nested
    assert to_dot(Net('say "hi"')).startswith('digraph "say \\"hi\\"" {')


@pytest.mark.parametrize("net", [INPLACE, RECURRENT, Net()])
def test_drawings_are_balanced(net):
    dot = to_dot(net)
    assert dot.count("{") == dot.count("}")
    if shutil.which("dot"):
        drawn = subprocess.run(
            ["dot", "-Tsvg"], input=dot, capture_output=True, text=True, check=True
        ).stdout
        assert "<svg" in drawn
