"""Runs under Caffe2's own Python: builds one LSTM, then times one run for each line that it is sent.

    python caffe2_worker.py STEPS BATCH FEATURES HIDDEN forward|train

It imports nothing of jrnn and keeps to Python 3.6, for Caffe2 is old.
"""

import json
import sys
import time

import numpy as np


def build(steps, batch, features, hidden, train):
    """Makes the net in Caffe2's workspace, and returns a function that runs it."""
    from caffe2.python import core, model_helper, rnn_cell, workspace

    core.GlobalInit(["caffe2", "--caffe2_log_level=2"])
    model = model_helper.ModelHelper(name="lstm")
    lengths, h0, c0, x = model.net.AddExternalInputs("seq_lengths", "h0", "c0", "x")
    hidden_all, _, _, _ = rnn_cell.LSTM(
        model, x, lengths, (h0, c0), features, hidden, scope="lstm", forward_only=not train
    )
    if train:
        squared = model.net.Sqr(hidden_all)
        loss = model.net.SumElements(squared, "loss")
        model.AddGradientOperators([loss])
    rng = np.random.RandomState(0)
    workspace.FeedBlob("x", rng.randn(steps, batch, features).astype(np.float32))
    workspace.FeedBlob("seq_lengths", np.full(batch, steps, np.int32))
    for name in ("h0", "c0"):
        workspace.FeedBlob(name, np.zeros((1, batch, hidden), np.float32))
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net)
    name = model.net.Proto().name
    return lambda: workspace.RunNet(name)


def main():
    steps, batch, features, hidden = map(int, sys.argv[1:5])
    run = build(steps, batch, features, hidden, sys.argv[5] == "train")
    for _ in sys.stdin:
        start = time.time()
        run()
        print(json.dumps(time.time() - start))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
