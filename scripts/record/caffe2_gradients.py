#!/usr/bin/env python3
"""Records what Caffe2's own AddGradientOperators makes of a few nets, for tests/nets/test_autodiff.py.

Run it with the Python 3.8 that has the real Caffe2 (torch 1.8.1):

    python scripts/record/caffe2_gradients.py tests/golden/gradients.npz

For each net NAME the file holds `NAME|forward` and `NAME|full` (serialized NetDefs before and after), and
`NAME|gradients`, lines of `blob gradient` or `blob indices values` for what the net reads.
"""

import sys

import numpy as np
from caffe2.python import core, model_helper, rnn_cell, workspace


def chain(net):
    h = net.Relu(net.FC(["x", "w1", "b1"], "z1"), "h")
    net.Tanh(net.FC([h, "w2", "b2"], "z2"), "y")
    return ["y"]


def in_place(net):
    net.FC(["x", "w", "b"], "y")
    net.Relu(["y"], "y")
    return ["y"]


def fan_out(net):
    for k, kind in enumerate(("Tanh", "Sigmoid", "Relu")):
        getattr(net, kind)(["x"], "p%d" % k)
    net.Mul(["p0", "p1"], "m")
    net.Mul(["m", "p2"], "n")
    return ["n"]


def shared_weight(net):
    net.FC(["x", "w", "b"], "h")
    net.FC(["h", "w", "b"], "g")
    net.FC(["g", "w", "b"], "y")
    return ["y"]


def mul_itself(net):
    net.Mul(["x", "x"], "y")
    net.Sum(["y", "x"], "z")
    return ["z"]


def sum_passes_through(net):
    net.Sum(["a", "b"], "s")
    net.Tanh(["s"], "t")
    net.Sum(["t", "a", "s"], "y")
    return ["y"]


def sum_in_place(net):
    net.FC(["x", "w", "b"], "g")
    net.Sum(["g", "c"], "g")
    net.Tanh(["g"], "y")
    return ["y"]


def gather_twice(net):
    net.Gather(["table", "i"], "u")
    net.Gather(["table", "j"], "v")
    net.Mul(["u", "v"], "y")
    return ["y"]


def gather_once(net):
    net.Gather(["table", "i"], "u")
    net.Tanh(["u"], "y")
    return ["y"]


def stopped(net):
    net.Tanh(["x"], "h")
    net.StopGradient(["h"], "s")
    net.Mul(["h", "s"], "y")
    return ["y"]


def two_losses(net):
    net.Tanh(["x"], "h")
    net.Sigmoid(["h"], "y")
    net.Relu(["h"], "z")
    return ["y", "z"]


def loss_used_upstream(net):
    net.Tanh(["x"], "h")
    net.Sigmoid(["h"], "y")
    return ["h", "y"]


def given(net):
    net.FC(["x", "w", "b"], "h")
    net.Tanh(["h"], "y")
    return {"y": "y_given"}


def split_and_concat(net):
    net.Split(["x"], ["p", "q"], axis=1)
    net.Mul(["p", "q"], "m")
    net.Concat(["m", "p", "q"], ["y", "y_info"], axis=1)
    return ["y"]


def reshaped(net):
    net.Reshape(["x"], ["r", "old"], shape=[0, -1])
    net.Transpose(["r"], "t")
    net.Tanh(["t"], "y")
    return ["y"]


def classifier(net):
    net.FC(["x", "w", "b"], "logits")
    net.SoftmaxWithLoss(["logits", "labels"], ["softmax", "loss"])
    return ["loss"]


def averaged(net):
    net.FC(["x", "w", "b"], "p")
    net.SquaredL2Distance(["p", "target"], "d")
    net.AveragedLoss(["d"], "loss")
    return ["loss"]


def unused_branch(net):
    net.Tanh(["x"], "h")
    net.Sigmoid(["h"], "unused")
    net.Relu(["h"], "y")
    return ["y"]


NETS = [
    v
    for v in list(globals().values())
    if callable(v) and getattr(v, "__module__", "") == "__main__"
]


def lstm(sizes, **options):
    """A whole LSTM, through rnn_cell."""
    workspace.ResetWorkspace()
    model = model_helper.ModelHelper(name="lstm", arg_scope={})
    states = ["h0", "c0", "h1", "c1"][: 2 * len(sizes)]
    model.net.AddExternalInputs("input", "lengths", *states)
    rnn_cell.LSTM(
        model,
        "input",
        "lengths",
        states,
        3,
        sizes if len(sizes) > 1 else sizes[0],
        "lstm",
        **options,
    )
    return model.net


def record(out, name, net, ys):
    out[name + "|forward"] = np.frombuffer(net.Proto().SerializeToString(), np.uint8)
    gradients = net.AddGradientOperators(ys)
    out[name + "|full"] = np.frombuffer(net.Proto().SerializeToString(), np.uint8)
    lines = []
    for blob in net.Proto().external_input:
        g = gradients.get(blob)
        if g is not None:
            slice_ = isinstance(g, core.GradientSlice)
            lines.append(
                " ".join([str(blob)] + ([str(g.indices), str(g.values)] if slice_ else [str(g)]))
            )
    out[name + "|gradients"] = np.array("\n".join(lines))


def main(path):
    out = {}
    for build in NETS:
        net = core.Net(build.__name__)
        ys = build(net)
        record(out, build.__name__, net, ys)
    for name, sizes, options in (
        ("lstm", [4], {}),
        ("lstm_two_layers", [4, 3], {}),
        ("lstm_three_outputs", [4], {"outputs_with_grads": (0, 1, 3)}),
        ("lstm_memory", [4], {"memory_optimization": True}),
    ):
        net = lstm(sizes, **options)
        top = "lstm/" if len(sizes) == 1 else "lstm/layer_1/"
        names = [
            top + n
            for n in ("hidden_state_all", "hidden_state_last", "cell_state_all", "cell_state_last")
        ]
        record(out, name, net, [names[k] for k in options.get("outputs_with_grads", (0,))])
    np.savez_compressed(path, **out)
    print("%d nets -> %s" % (len(out) // 3, path))


if __name__ == "__main__":
    main(sys.argv[1])
