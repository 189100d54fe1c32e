#!/usr/bin/env python3
"""Records RecurrentNetwork operators that no builder makes: windows, long initial states, blobs read undeclared, views.

Run it with the Python 3.8 that has the real Caffe2 (torch 1.8.1):

    python scripts/record/caffe2_recurrent.py tests/golden/recurrent.npz

For each case NAME the file holds `NAME|net` (a serialized NetDef), `NAME|in|BLOB` and `NAME|out|BLOB`.
"""

import sys

import numpy as np
from caffe2.python import core, workspace

RNG = np.random.RandomState(0)
T, N, D = 5, 2, 3


def array(*shape):
    return RNG.randn(*shape).astype(np.float32)


def recurrent(inputs, outputs, step, states, initial_ids, links, aliases):
    """`links`: (internal, external, offset, window); `aliases`: (state, output, offset)."""
    return core.CreateOperator(
        "RecurrentNetwork",
        inputs,
        outputs + ["step_workspaces"],
        alias_src=[a[0] for a in aliases],
        alias_dst=[a[1] for a in aliases],
        alias_offset=[a[2] for a in aliases],
        recurrent_states=states,
        initial_recurrent_state_ids=initial_ids,
        link_internal=[k[0] for k in links],
        link_external=[k[1] for k in links],
        link_offset=[k[2] for k in links],
        link_window=[k[3] for k in links],
        step_net=step.Proto(),
        timestep="timestep",
    )


def window_of_inputs():
    """The step sees three rows of a second, longer sequence."""
    step = core.Net("step")
    step.ReduceSum(["window"], "total", axes=[0], keepdims=1)
    step.Add(["total", "h_prev"], "z")
    step.Add(["z", "x_t"], "z")
    step.Tanh(["z"], "h")
    links = [
        ("h_prev", "states", 0, 1),
        ("h", "states", 1, 1),
        ("x_t", "x", 0, 1),
        ("window", "padded", 0, 3),
    ]
    op = recurrent(
        ["x", "h0", "padded"],
        ["all", "last"],
        step,
        ["states"],
        [1],
        links,
        [("states", "all", 1), ("states", "last", -1)],
    )
    return op, {"x": array(T, N, D), "h0": array(N, D), "padded": array(T + 2, N, D)}


def window_of_states():
    """The state depends on its last two values."""
    step = core.Net("step")
    step.ReduceSum(["before"], "total", axes=[0], keepdims=1)
    step.Add(["total", "x_t"], "z")
    step.Tanh(["z"], "h")
    links = [("before", "states", 0, 2), ("h", "states", 2, 1), ("x_t", "x", 0, 1)]
    op = recurrent(
        ["x", "h0"],
        ["all", "last"],
        step,
        ["states"],
        [1],
        links,
        [("states", "all", 2), ("states", "last", -1)],
    )
    return op, {"x": array(T, N, D), "h0": array(2, N, D)}


def view_of_what_was_just_written():
    """A window that holds the slot which the same step writes, as in a convolution over time with state."""
    step = core.Net("step")
    step.Relu(["x_t"], "now")
    step.ReduceSum(["window"], "total", axes=[0], keepdims=1)
    step.Tanh(["total"], "y")
    links = [
        ("x_t", "x", 0, 1),
        ("now", "inputs_states", 2, 1),
        ("window", "inputs_states", 0, 3),
        ("y", "output_states", 1, 1),
    ]
    aliases = [("output_states", "all", 1), ("inputs_states", "kept", 2)]
    op = recurrent(
        ["x", "i0", "o0"],
        ["all", "kept"],
        step,
        ["inputs_states", "output_states"],
        [1, 2],
        links,
        aliases,
    )
    return op, {"x": array(T, N, D), "i0": array(2, N, D), "o0": array(1, N, D)}


def initial_state_for_every_sequence():
    """A first value of one dimension serves every sequence."""
    step = core.Net("step")
    step.Add(["h_prev", "x_t"], "z")
    step.Tanh(["z"], "h")
    links = [("h_prev", "states", 0, 1), ("h", "states", 1, 1), ("x_t", "x", 0, 1)]
    op = recurrent(
        ["x", "h0"],
        ["all", "last"],
        step,
        ["states"],
        [1],
        links,
        [("states", "all", 1), ("states", "last", -1)],
    )
    return op, {"x": array(T, N, D), "h0": array(D)}


def undeclared_outer_blob():
    """The step net reads a blob of the workspace around it that the operator does not list."""
    step = core.Net("step")
    step.Mul(["h_prev", "scale"], "z")
    step.Add(["z", "x_t"], "z")
    step.Tanh(["z"], "h")
    links = [("h_prev", "states", 0, 1), ("h", "states", 1, 1), ("x_t", "x", 0, 1)]
    op = recurrent(
        ["x", "h0"],
        ["all", "last"],
        step,
        ["states"],
        [1],
        links,
        [("states", "all", 1), ("states", "last", -1)],
    )
    return op, {"x": array(T, N, D), "h0": array(N, D), "scale": array(1, N, D)}


def timestep():
    """The step net computes with the time index."""
    step = core.Net("step")
    step.Cast(["timestep"], "t", to="float")
    step.Mul(["h_prev", "t"], "z", broadcast=1)
    step.Add(["z", "x_t"], "z")
    step.Tanh(["z"], "h")
    links = [("h_prev", "states", 0, 1), ("h", "states", 1, 1), ("x_t", "x", 0, 1)]
    op = recurrent(
        ["x", "h0"],
        ["all", "last"],
        step,
        ["states"],
        [1],
        links,
        [("states", "all", 1), ("states", "last", -1)],
    )
    return op, {"x": array(T, N, D), "h0": array(N, D)}


def no_steps():
    op, blobs = initial_state_for_every_sequence()
    return op, dict(blobs, x=array(0, N, D))


CASES = (
    window_of_inputs,
    window_of_states,
    view_of_what_was_just_written,
    initial_state_for_every_sequence,
    undeclared_outer_blob,
    timestep,
    no_steps,
)


def main(path):
    out = {}
    for case in CASES:
        op, blobs = case()
        net = core.Net(case.__name__)
        net.Proto().op.extend([op])
        workspace.ResetWorkspace()
        for name, value in blobs.items():
            workspace.FeedBlob(name, value)
            out["%s|in|%s" % (case.__name__, name)] = value
        workspace.RunNetOnce(net)
        out[case.__name__ + "|net"] = np.frombuffer(net.Proto().SerializeToString(), np.uint8)
        for name in op.output[:-1]:
            out["%s|out|%s" % (case.__name__, name)] = workspace.FetchBlob(name).copy()
    np.savez_compressed(path, **out)
    print("%d cases -> %s" % (len(CASES), path))


if __name__ == "__main__":
    main(sys.argv[1])
