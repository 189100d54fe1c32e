"""Every function of `jrnn.graph` on nets of 5,000 to 20,000 operators.

The ratios are the time for the largest net over the time for a smaller one. With a quarter of the operators, a ratio of 4
is linear time and 16 is quadratic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from jrnn.bench.peers import Program, clocked
from jrnn.bench.suites import Job, Options
from jrnn.nets import graph
from jrnn.nets.ir import DeviceOption, Net, Op

SIZES = (5_000, 10_000, 20_000)
OURS = (f"{SIZES[-1]} operators",)
TAKES = ("cells",)


def jobs(options: Options) -> Iterator[Job]:
    prepared = {f"{size} operators": passes(blobs_net(size)) for size in SIZES}
    for name in options.chosen("cells", next(iter(prepared.values()))):
        yield Job(name, "graph", "", {size: Program(clocked(found[name])) for size, found in prepared.items()})


def blobs_net(size: int, copies: bool = True) -> Net:
    """Returns layers with in-place activations, copies between devices, shape chains and a few recurrent networks."""
    draw = random.Random(size)
    ops: list[Op] = []
    inputs = ["x"]
    last = "x"

    def add(kind: str, read: list[str], written: list[str], **args) -> str:
        ops.append(Op.of(kind, read, written, **args))
        return written[0]

    while len(ops) < size:
        i = len(ops)
        match draw.randrange(5):
            case 0:
                inputs += [f"w{i}", f"b{i}"]
                last = add("FC", [last, f"w{i}", f"b{i}"], [f"y{i}"])
                last = add("Relu", [last], [last])
            case 1 if copies:
                last = add("CopyGPUToCPU", [add("CopyCPUToGPU", [last], [f"g{i}"])], [f"c{i}"])
            case 2:
                inputs += [f"m{i}", f"w{i}", f"b{i}"]
                shape = add("Concat", [add("Shape", [last], [f"s{i}"]), f"m{i}"], [f"t{i}", f"d{i}"])
                last = add("FC", [add("Reshape", [last, shape], [f"r{i}", f"o{i}"]), f"w{i}", f"b{i}"], [f"y{i}"])
            case 3 if draw.random() < 0.1:
                step = (
                    Op.of("Mul", ["x_t", "h"], ["t"]),
                    Op.of("Tanh", ["t"], ["t"]),
                    Op.of("Add", ["t", last], ["h_new"]),
                )
                last = add(
                    "RecurrentNetwork",
                    [last, "h0"],
                    [f"all{i}", f"ws{i}"],
                    step_net=Net("step", step, ("x_t", "h"), ("h_new",)),
                    link_internal=["h", "h_new", "x_t"],
                    link_external=[f"st{i}", f"st{i}", last],
                    alias_src=[f"st{i}"],
                    alias_dst=[f"all{i}"],
                )
            case _:
                last = add(draw.choice(["Tanh", "Sigmoid"]), [last], [f"a{draw.randrange(size)}"])
    return Net("big", tuple(ops), (*inputs, "h0"), (last,))


def passes(net: Net) -> dict[str, Callable[[], object]]:
    """Returns every function of `jrnn.graph`, applied to `net`."""
    ssa, versions = graph.get_ssa(net)
    names = dict.fromkeys(name for op in net.ops for name in (*op.inputs, *op.outputs))
    shapes = dict.fromkeys(names, np.zeros([4, 4], np.float32))
    half = len(net.ops) // 2
    middle = net.ops[half].outputs[0]
    apart = graph.ssa_rewrite(net)
    plain = blobs_net(len(net.ops), copies=False)
    init = Net("init", (), (), ())

    def one_status(op, read, written):
        return ["float"] * len(read), ["float"] * len(written)

    return {
        "get_ssa": lambda: graph.get_ssa(net),
        "get_undefined_blobs": lambda: graph.get_undefined_blobs(ssa),
        "get_output_producers": lambda: graph.get_output_producers(ssa),
        "get_producer_map": lambda: graph.get_producer_map(ssa),
        "get_consumer_map": lambda: graph.get_consumer_map(ssa),
        "get_op_ids_in_path": lambda: graph.get_op_ids_in_path(ssa, versions, [], net.external_outputs),
        "undeclared_reads": lambda: graph.undeclared_reads(net),
        "live_ops": lambda: graph.live_ops(net, net.external_outputs),
        "rename_op_input": lambda: graph.rename_op_input(net, init, half, 0, "fresh", from_producer=True),
        "rename_op_output": lambda: graph.rename_op_output(net, half, 0, "fresh"),
        "ssa_rewrite": lambda: graph.ssa_rewrite(net),
        "ssa_rewrite, number_all": lambda: graph.ssa_rewrite(net, number_all=True),
        "clone_and_bind": lambda: graph.clone_and_bind(net, "clone", "c/"),
        "remove_dead_end_ops": lambda: graph.remove_dead_end_ops(net),
        "append_net": lambda: graph.append_net(net, net, DeviceOption(1, 0)),
        "verify_graph_equality": lambda: graph.verify_graph_equality(net, net),
        "get_sub_graph_external_input_output": lambda: graph.get_sub_graph_external_input_output(net, range(half)),
        "get_external_blob_names": lambda: graph.get_external_blob_names(net, names),
        "extract_sub_net": lambda: graph.extract_sub_net(apart, ["x"], apart.external_outputs),
        "identify_reshape_sub_graph": lambda: graph.identify_reshape_sub_graph(net),
        "remove_reshape_for_fc": lambda: graph.remove_reshape_for_fc(net, dict.fromkeys(net.external_inputs, 0)),
        "infer_status": lambda: graph.infer_status(net, one_status, {}),
        "infer_device_type": lambda: graph.infer_device_type(plain, {("x", 0): "gpu"}),
        "infer_output_devices": lambda: graph.infer_output_devices(plain, ["gpu"]),
        "assign_device_option": lambda: graph.assign_device_option(plain, init, ["gpu"]),
        "fuse_copy_between_cpu_and_gpu": lambda: graph.fuse_copy_between_cpu_and_gpu(net),
        "optimize_memory": lambda: graph.optimize_memory(net, shapes, [middle]),
        "show": lambda: graph.show(net),
        "to_dot": lambda: graph.to_dot(net),
    }
