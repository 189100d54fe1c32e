"""Statuses that spread through nets, devices, and copies between them."""

import pytest
from test_ssa import recurrent, step_net

from jrnn.errors import NetError
from jrnn.nets.graph import (
    assign_device_option,
    fuse_copy_between_cpu_and_gpu,
    infer_device_type,
    infer_output_devices,
    infer_status,
)
from jrnn.nets.ir import DeviceOption, Net, Op

CUDA = DeviceOption(device_type=1, device_id=0)


def relu(a, b):
    return Op.of("Relu", [a], [b])


def up(a, b):
    return Op.of("CopyCPUToGPU", [a], [b])


def down(a, b):
    return Op.of("CopyGPUToCPU", [a], [b])


MIXED = Net(
    "mixed",
    (relu("x", "h"), up("h", "g"), Op.of("FC", ["g", "w", "b"], ["g"]), down("g", "y")),
    ("x", "w", "b"),
    ("y",),
)


def layout(op, read, written):
    """A rule with a meaning of its own: a transposing operator turns the layout, others keep it."""
    turn = {"NHWC": "NCHW", "NCHW": "NHWC", None: None}
    if op.type == "Transpose":
        return [read[0] or turn[written[0]]], [turn[read[0]] or written[0]]
    status = next((s for s in (*read, *written) if s), None)
    return [status] * len(read), [status] * len(written)


def test_any_status_spreads_forwards_and_backwards():
    net = Net(
        "n",
        (relu("x", "a"), Op.of("Transpose", ["a"], ["b"]), Op.of("Add", ["b", "c"], ["b"])),
        ("x", "c"),
        ("b",),
    )
    statuses = infer_status(net, layout, {("a", 1): "NHWC"})
    assert statuses == {
        ("a", 1): "NHWC",
        ("x", 0): "NHWC",
        ("b", 1): "NCHW",
        ("c", 0): "NCHW",
        ("b", 2): "NCHW",
    }
    assert infer_status(net, layout, {("b", 2): "NCHW"}) == statuses


def test_statuses_that_conflict_or_do_not_follow():
    net = Net("n", (relu("x", "a"), relu("z", "b")), ("x", "z"), ("a", "b"))
    with pytest.raises(
        NetError,
        match=r"op #0 Relu -> 'a' in net 'n': conflicting statuses of blob 'a': 'q' and 'p'",
    ):
        infer_status(net, layout, {("x", 0): "p", ("a", 1): "q"})
    with pytest.raises(NetError, match="status of version 0 of 'z' does not follow"):
        infer_status(net, layout, {("x", 0): "p"})
    with pytest.raises(NetError, match="no version 1 of a blob 'x'"):
        infer_status(net, layout, {("x", 1): "p"})
    with pytest.raises(NetError, match="version 0 of 'x' is None"):
        infer_status(net, layout, {("x", 0): None})


def test_the_blobs_that_sub_nets_read_have_a_status():
    op = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"])))
    net = Net("n", (relu("s", "scale"), op), ("s", "x", "h0", "w"), ("h_all",))
    assert infer_device_type(net, {("x", 0): "gpu"})["scale", 1] == "gpu"
    with pytest.raises(
        NetError,
        match=r"op #1 RecurrentNetwork.*must be on one device, they are on \['cpu', 'gpu'\]",
    ):
        infer_device_type(net, {("x", 0): "cpu", ("s", 0): "gpu"})


def test_devices_change_at_copies():
    devices = infer_device_type(MIXED, {("x", 0): "cpu"})
    assert {n: d for (n, _), d in devices.items()} == {
        "x": "cpu",
        "h": "cpu",
        "g": "gpu",
        "w": "gpu",
        "b": "gpu",
        "y": "cpu",
    }
    assert infer_device_type(MIXED, {("x", 0): "cpu"}, "pytorch")["w", 0] == "cuda"
    assert infer_output_devices(MIXED, ["cpu"]) == ["cpu"]
    assert infer_output_devices(MIXED, {"x": "cpu", "w": "cuda"}) == ["cpu"]
    with pytest.raises(NetError, match=r"op #1 CopyCPUToGPU.*copies from cpu to gpu, but"):
        infer_device_type(MIXED, {("x", 0): "gpu"})
    with pytest.raises(NetError, match="device of 'x' must be one of"):
        infer_device_type(MIXED, {("x", 0): "tpu"})
    with pytest.raises(NetError, match="device_name_style must be one of"):
        infer_device_type(MIXED, {}, "jax")


def test_device_options_follow_in_both_nets():
    step = recurrent(step_net(relu("h", "h_new")))
    net = Net("predict", (relu("a", "p"), up("p", "x"), step), ("a", "h0", "w"), ("h_all",))
    init = Net(
        "init",
        (Op.of("ConstantFill", [], ["w"]), Op.of("ConstantFill", [], ["h0"])),
        (),
        ("w", "h0"),
    )
    predict, assigned = assign_device_option(net, init, {"a": "cpu"})
    assert [op.device_option for op in predict.ops] == [None, CUDA, CUDA]
    assert predict.ops[2].arg("step_net").ops[0].device_option == CUDA
    assert [op.device_option for op in assigned.ops] == [CUDA, CUDA]
    assert net.ops[1].device_option is None
    with pytest.raises(NetError, match="net 'init' gives 'v', which net 'predict' does not read"):
        assign_device_option(
            net, Net("init", (Op.of("ConstantFill", [], ["v"]),), (), ("v",)), {"a": "cpu"}
        )


def ends(net):
    return [(op.type, op.inputs, op.outputs) for op in net.ops]


def test_every_reader_of_a_fused_copy_is_rewired():
    net = Net(
        "n",
        (
            up("x", "g"),
            down("g", "c"),
            down("g", "d"),
            relu("c", "p"),
            Op.of("Add", ["c", "d"], ["y"]),
        ),
        ("x",),
        ("y",),
    )
    assert ends(fuse_copy_between_cpu_and_gpu(net)) == [
        ("Relu", ("x",), ("p",)),
        ("Add", ("x", "x"), ("y",)),
    ]


def test_chains_of_copies_fuse():
    net = Net(
        "n",
        (up("x", "a"), down("a", "b"), up("b", "c"), down("c", "d"), relu("d", "y")),
        ("x",),
        ("y",),
    )
    assert ends(fuse_copy_between_cpu_and_gpu(net)) == [("Relu", ("x",), ("y",))]
    inplace = Net("n", (up("x", "x"), down("x", "x"), relu("x", "y")), ("x",), ("y",))
    assert ends(fuse_copy_between_cpu_and_gpu(inplace)) == [("Relu", ("x",), ("y",))]


@pytest.mark.parametrize(
    "ops, outputs",
    [
        ((up("x", "g"), down("g", "y")), ("y",)),
        ((up("x", "g"), down("g", "c"), relu("c", "y")), ("y", "g")),
        ((up("x", "g"), down("g", "c"), relu("g", "z"), relu("c", "y")), ("y",)),
        ((up("x", "g"), up("g", "c"), relu("c", "y")), ("y",)),
        ((up("x", "g"), down("g", "c"), relu("x", "x"), relu("c", "y")), ("y",)),
    ],
    ids=[
        "result given out",
        "copy given out",
        "copy used",
        "same way twice",
        "original overwritten",
    ],
)
def test_copies_that_must_stay(ops, outputs):
    net = Net("n", ops, ("x",), outputs)
    assert fuse_copy_between_cpu_and_gpu(net) == net


def test_step_nets_read_the_original_of_a_fused_copy():
    op = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["h_new"])))
    net = Net("n", (up("s", "g"), down("g", "scale"), op), ("s", "x", "h0", "w"), ("h_all",))
    (fused,) = fuse_copy_between_cpu_and_gpu(net).ops
    assert fused.arg("step_net").ops[0].inputs == ("h", "s")
    taken = recurrent(step_net(Op.of("Mul", ["h", "scale"], ["s"]), relu("s", "h_new")))
    net = Net("n", (up("s", "g"), down("g", "scale"), taken), ("s", "x", "h0", "w"), ("h_all",))
    assert fuse_copy_between_cpu_and_gpu(net) == net
