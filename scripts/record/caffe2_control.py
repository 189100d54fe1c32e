#!/usr/bin/env python3
"""Records nets with Do, If and While, built and run by the real Caffe2, for tests/nets/ops/test_control.py.

Run it with the Python 3.8 that has the real Caffe2 (torch 1.8.1):

    python scripts/record/caffe2_control.py tests/golden/control.npz

For each case NAME the file holds `NAME|net` (a serialized NetDef), `NAME|in|BLOB` and `NAME|out|BLOB`.
"""

import sys

import numpy as np
from caffe2.python import workspace
from caffe2.python.net_builder import NetBuilder, ops

RNG = np.random.RandomState(0)
INT32 = 2
OUTER = [
    "condition",
    "first",
    "second",
    "n",
    "x",
    "w",
]  # what the builder is to know as fed from outside


def if_else(condition):
    with NetBuilder(initial_scope=OUTER, _use_control_ops=True) as nb:
        ops.ConstantFill([], "y", shape=[1], value=0.0)
        with ops.IfNet("condition"):
            ops.Mul(["x", "w"], "y")
        with ops.Else():
            ops.Add(["x", "w"], "y")
    return (
        nb,
        {
            "condition": np.array(condition),
            "x": RNG.randn(1).astype("f"),
            "w": RNG.randn(1).astype("f"),
        },
        ["y"],
    )


def nested(first, second):
    with NetBuilder(initial_scope=OUTER, _use_control_ops=True) as nb:
        ops.Copy("x", "y")
        with ops.IfNet("first"):
            ops.Mul(["y", "w"], "y")
            with ops.IfNet("second"):
                ops.Sigmoid(["y"], "y")
            with ops.Else():
                ops.Tanh(["y"], "y")
    blobs = {"first": np.array(first), "second": np.array(second)}
    return nb, dict(blobs, x=RNG.randn(3).astype("f"), w=RNG.randn(3).astype("f")), ["y"]


def loop(trips):
    with NetBuilder(initial_scope=OUTER, _use_control_ops=True) as nb:
        ops.ConstantFill([], "i", shape=[1], value=0, dtype=INT32)
        ops.ConstantFill([], "one", shape=[1], value=1, dtype=INT32)
        ops.Copy("x", "y")
        with ops.WhileNet():
            with ops.Condition():
                ops.Add(["i", "one"], "i")
                ops.LE(["i", "n"])
            ops.Mul(["y", "w"], "y")
            ops.Add(["y", "x"], "t")
            ops.Tanh(["t"], "y")
    blobs = {
        "n": np.array([trips], np.int32),
        "x": RNG.randn(3).astype("f"),
        "w": RNG.randn(3).astype("f"),
    }
    return nb, blobs, ["y", "i"]


CASES = {
    "if_then": lambda: if_else(True),
    "if_else": lambda: if_else(False),
    "nested_neither": lambda: nested(False, True),
    "nested_then": lambda: nested(True, True),
    "nested_else": lambda: nested(True, False),
    "loop_0": lambda: loop(0),
    "loop_1": lambda: loop(1),
    "loop_5": lambda: loop(5),
}


def main(path):
    out = {}
    for name, case in CASES.items():
        workspace.ResetWorkspace()
        builder, blobs, results = case()
        (net,) = builder.get()
        for blob, value in blobs.items():
            workspace.FeedBlob(blob, value)
            out[f"{name}|in|{blob}"] = value
        workspace.RunNetOnce(net)
        out[name + "|net"] = np.frombuffer(net.Proto().SerializeToString(), np.uint8)
        for blob in results:
            out[f"{name}|out|{blob}"] = np.array(workspace.FetchBlob(blob))
    np.savez_compressed(path, **out)
    print(f"{len(CASES)} cases -> {path}")


if __name__ == "__main__":
    main(sys.argv[1])
