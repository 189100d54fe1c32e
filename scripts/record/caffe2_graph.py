#!/usr/bin/env python3
"""Records what the real Caffe2's own graph functions answer, as golden data for tests/nets/graph.

    python3.8 -m venv caffe2-env
    caffe2-env/bin/pip install torch==1.8.1 "numpy<1.24" future protobuf==3.20.3 six networkx
    PYTHONHASHSEED=0 caffe2-env/bin/python scripts/record/caffe2_graph.py

Writes tests/golden/graph/caffe2.json: {name of a net: {"net": the serialized NetDef in base64, and one entry for each
function that was asked}}. Versioned blobs are [name, version] pairs; what Caffe2 gives as a set is sorted. The rewrite of
onnx/frontend.py needs no ONNX itself, only its imports, for which empty modules stand in.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path
from unittest import mock

for module in (
    "onnx",
    "onnx.backend",
    "onnx.backend.base",
    "onnx.checker",
    "onnx.helper",
    "onnx.mapping",
    "onnx.numpy_helper",
    "onnx.optimizer",
    "onnx.shape_inference",
):
    sys.modules[module] = mock.MagicMock()

from caffe2.proto import caffe2_pb2  # noqa: E402
from caffe2.python import control_ops_util, core, memonger, model_helper, rnn_cell, workspace  # noqa: E402
from caffe2.python.onnx.frontend import Caffe2Frontend  # noqa: E402

TARGET = Path(__file__).resolve().parents[2] / "tests" / "golden" / "graph" / "caffe2.json"


def op(kind, inputs, outputs, **args):
    return core.CreateOperator(kind, inputs, outputs, **args)


def net_def(name, ops, inputs=(), outputs=()):
    net = caffe2_pb2.NetDef(name=name)
    net.op.extend(ops)
    net.external_input.extend(inputs)
    net.external_output.extend(outputs)
    return net


def random_net(seed, size=25):
    """A net of elementwise operators on few names, so that many blobs are overwritten."""
    draw = random.Random(seed)
    known = ["x0", "x1"]
    ops = []
    for i in range(size):
        if draw.random() < 0.4:
            source = draw.choice(known)
            target = source if draw.random() < 0.5 else f"b{draw.randrange(8)}"
            ops.append(op(draw.choice(["Relu", "Tanh", "Negative"]), [source], [target]))
        elif draw.random() < 0.2:
            target = f"b{draw.randrange(8)}"
            ops.append(op("Split", [draw.choice(known)], [target, f"s{i}"], axis=0))
            known.append(f"s{i}")
        else:
            target = f"b{draw.randrange(8)}"
            ops.append(
                op(draw.choice(["Add", "Mul"]), [draw.choice(known), draw.choice(known)], [target])
            )
        if target not in known:
            known.append(target)
    written = [n for n in known if n[0] != "x"]
    return net_def(f"random_{seed}", ops, ["x0", "x1"] if seed % 2 else [], draw.sample(written, 3))


def lstm_net(forward_only):
    workspace.ResetWorkspace()
    model = model_helper.ModelHelper("lstm_forward" if forward_only else "lstm_train")
    names = ["input", "lengths", "h0", "c0"]
    sequence, lengths, h0, c0 = model.net.AddExternalInputs(*names)
    output, _, last, _ = rnn_cell.LSTM(
        model, sequence, lengths, (h0, c0), 3, 4, "lstm", forward_only=forward_only
    )
    if not forward_only:
        loss = model.net.AveragedLoss(model.net.SumElements(output, "total"), "loss")
        model.AddGradientOperators([loss])
    model.net.AddExternalOutput(last)
    return model.net


def branch_net():
    net = core.Net("branch")
    a, b, c = net.AddExternalInputs("a", "b", "c")
    then_net, else_net = core.Net("then"), core.Net("else")
    then_net.Mul([a, b], "out")
    else_net.Relu(a, "tmp")
    else_net.Add(["tmp", a], "out")
    net.ConstantFill([], "out", shape=[1], value=1.0)
    control_ops_util.add_if_op(net, c, {"a", "b", "c", "out"}, then_net, else_net)
    net.Copy("out", "result")
    return net


def versioned(blobs):
    return [[str(name), version] for name, version in blobs]


def as_text(proto):
    return base64.b64encode(proto.SerializeToString()).decode()


def ask(proto):
    """The answers about one NetDef."""
    ssa, versions = core.get_ssa(proto)
    answers = {
        "net": as_text(proto),
        "ssa": [[versioned(read), versioned(written)] for read, written in ssa],
        "versions": versions,
        "undefined": sorted(core.get_undefined_blobs(ssa)),
        "producers": sorted(
            [name, version, i] for (name, version), i in core.get_output_producers(ssa).items()
        ),
    }
    written = [name for name, version in sorted(versions.items()) if version]
    answers["paths"] = [
        {
            "inputs": inputs,
            "outputs": outputs,
            "ops": core.get_op_ids_in_path(ssa, versions, inputs, outputs),
        }
        for inputs, outputs in (
            ([], written[:1]),
            (written[1:2], written[2:3]),
            (written[:1], written[-2:]),
        )
    ]
    scope = sorted({name for read, _ in ssa for name, _ in read} | set(written[::2]))
    try:
        inputs, outputs = control_ops_util.get_external_blob_names(core.Net(proto), scope)
        answers["external"] = {
            "scope": scope,
            "inputs": sorted(map(str, inputs)),
            "outputs": sorted(map(str, outputs)),
        }
    except AssertionError:
        answers["external"] = {"scope": scope, "error": True}
    rewritten = caffe2_pb2.NetDef()
    rewritten.CopyFrom(proto)
    if all(name in versions for name in rewritten.external_output):
        Caffe2Frontend._ssa_rewrite(rewritten, None, None)
        answers["ssa_rewrite"] = as_text(rewritten)
    return answers


def clones(net):
    cloned, remap = core.clone_and_bind_net(net, "clone", "c/", {"input": "other", "a": "z"})
    cloned.Proto().name = "clone"
    return {"net": as_text(cloned.Proto()), "remap": {str(k): str(v) for k, v in remap.items()}}


def partial(proto, inputs, outputs):
    """The part that ClonePartial takes, or None where it refuses."""
    net = core.Net(proto)
    try:
        part, _ = net.ClonePartial("", inputs, outputs)
    except AssertionError:
        return None
    part = part.Proto()
    return {
        "inputs": inputs,
        "outputs": outputs,
        "ops": [[o.type, list(o.input), list(o.output)] for o in part.op],
        "external_inputs": sorted(part.external_input),
    }


def partials(proto, most=4):
    """The largest parts between two blobs, the given one of a single version (else ClonePartial mixes them up) and read."""
    ssa, _ = core.get_ssa(proto)
    versions = sorted({blob for read, written in ssa for blob in read + written})
    written = sorted({o for operator in proto.op for o in operator.output})
    single = [
        name for name, _ in versions if len([1 for other, _ in versions if other == name]) == 1
    ]
    parts = [partial(proto, [i], [o]) for i in single for o in written if i != o]
    parts = [
        part
        for part in parts
        if part and any(part["inputs"][0] in read for _, read, _ in part["ops"])
    ]
    return sorted(parts, key=lambda part: (-len(part["ops"]), part["inputs"], part["outputs"]))[
        :most
    ]


def comparisons(proto):
    """verify_graph_equality of a net with what memonger makes of it, and with nets that differ."""
    optimized = memonger.optimize_interference(proto, ["x0", "x1", *proto.external_output]).net
    changed = caffe2_pb2.NetDef()
    changed.CopyFrom(proto)
    changed.op[-1].type = "Exp"
    rewired = caffe2_pb2.NetDef()
    rewired.CopyFrom(proto)
    rewired.op[-1].input[0] = "x0" if rewired.op[-1].input[0] != "x0" else rewired.op[-2].output[0]
    pairs = [
        (memonger.verify_graph_equality(proto, other), as_text(other))
        for other in (optimized, changed, rewired)
    ]
    reordered = [o.SerializeToString() for o in optimized.op] != [
        o.SerializeToString() for o in proto.op
    ]
    return {"pairs": pairs, "memonger_changed": reordered}


def appended(first, second):
    net = core.Net(first)
    net.AppendNet(core.Net(second), device_option=core.DeviceOption(caffe2_pb2.CUDA, 1))
    net.Proto().name = first.name
    return {"first": as_text(first), "second": as_text(second), "net": as_text(net.Proto())}


def chain_net():
    """A straight net on which memonger can share blobs."""
    ops, name = [], "x0"
    for i in range(12):
        ops.append(op(["Relu", "Tanh", "Negative"][i % 3], [name], [f"t{i}"]))
        name = f"t{i}"
    return net_def("chain", ops, ["x0"], [name])


def main():
    nets = {proto.name: proto for proto in (random_net(seed) for seed in range(6))}
    nets["chain"] = chain_net()
    by_name = {
        "lstm_forward": lstm_net(True),
        "lstm_train": lstm_net(False),
        "branch": branch_net(),
    }
    nets.update((name, net.Proto()) for name, net in by_name.items())
    answers = {name: ask(proto) for name, proto in nets.items()}
    for name, net in by_name.items():
        answers[name]["clone"] = clones(net)
    answers["chain"]["equality"] = comparisons(nets["chain"])
    for name, proto in nets.items():
        if name not in by_name and (parts := partials(proto)):
            answers[name]["partial"] = parts
    answers["chain"]["append"] = appended(nets["random_1"], nets["lstm_forward"])
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{json.dumps(name)}: {json.dumps(answers[name], sort_keys=True)}"
        for name in sorted(answers)
    ]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(answers)} nets, {TARGET.stat().st_size} bytes in {TARGET.name}")


if __name__ == "__main__":
    main()
