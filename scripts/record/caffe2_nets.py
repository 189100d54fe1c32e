#!/usr/bin/env python3
"""Records two whole nets run by the real Caffe2, as golden data for tests/nets/ops: training, and prediction on images.

caffe2-env/bin/python scripts/record/caffe2_nets.py     (the environment of caffe2_operators.py)

tests/golden/nets/train_OPTIMIZER.npz.xz   init_net, train_net (forward, backward and updates), the batches, and the
                                           losses and final parameters of 100 steps
tests/golden/nets/image_net.npz.xz         a predictor of 30 operators and more: init_net, predict_net, data, outputs
"""

import io
import lzma
import os
import sys

import numpy as np
from caffe2.python import brew, core, model_helper, optimizer, workspace
from caffe2.python.modeling.initializers import Initializer

GOLDEN = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "golden", "nets"
)
STEPS, BATCHES, BATCH, FEATURES, CLASSES = 100, 4, 8, 6, 3


def save(name, **entries):
    buffer = io.BytesIO()
    np.savez(buffer, **entries)
    data = lzma.compress(buffer.getvalue(), preset=9)
    with open(os.path.join(GOLDEN, name + ".npz.xz"), "wb") as f:
        f.write(data)
    print(f"{name}: {len(data)} bytes")


def serialized(net):
    return np.frombuffer(net.SerializeToString(), np.uint8)


def given_fills(blobs):
    """An init_net that fills blobs with values, so that no random number is drawn again."""
    net = core.Net("init")
    for name, value in blobs.items():
        value = np.asarray(value)
        fill = {"f": "GivenTensorFill", "i": "GivenTensorInt64Fill"}[value.dtype.kind]
        net.Proto().op.add().CopyFrom(
            core.CreateOperator(
                fill, [], [name], shape=list(value.shape), values=value.ravel().tolist()
            )
        )
        net.Proto().external_output.append(name)
    return net.Proto()


def initialize(model):
    """Runs the init_net with fixed seeds, so that recording again gives the same bytes."""
    for k, op in enumerate(model.param_init_net.Proto().op):
        op.device_option.random_seed = k + 1
    workspace.RunNetOnce(model.param_init_net)


OPTIMIZERS = {
    "sgd": lambda m: optimizer.build_sgd(
        m, 0.1, policy="step", stepsize=30, gamma=0.5, momentum=0.9
    ),
    "adagrad": lambda m: optimizer.build_adagrad(m, 0.1),
    "adam": lambda m: optimizer.build_adam(m, 0.1, policy="inv", gamma=0.01, power=0.5),
}


def record_training(name):
    """A classifier with an embedding, so that dense and sparse updates both take part."""
    workspace.ResetWorkspace()
    np.random.seed(0)
    model = model_helper.ModelHelper("train")
    table = model.create_param("table", shape=[10, FEATURES], initializer=Initializer("XavierFill"))
    rows = model.net.Gather([table, "ids"], "rows")
    hidden = brew.relu(
        model, brew.fc(model, model.net.Add([rows, "x"], "sum"), "fc1", FEATURES, 5), "hidden"
    )
    _, loss = model.net.SoftmaxWithLoss(
        [brew.fc(model, hidden, "fc2", 5, CLASSES), "label"], ["softmax", "loss"]
    )
    model.AddGradientOperators([loss])
    OPTIMIZERS[name](model)
    initialize(model)
    blobs = {b: workspace.FetchBlob(b) for b in workspace.Blobs()}
    initial = {b: v for b, v in blobs.items() if isinstance(v, np.ndarray)}
    batches = {
        "x": np.random.randn(BATCHES, BATCH, FEATURES).astype(np.float32),
        "ids": np.random.randint(0, 10, (BATCHES, BATCH)).astype(np.int32),
        "label": np.random.randint(0, CLASSES, (BATCHES, BATCH)).astype(np.int32),
    }
    for blob, value in batches.items():
        workspace.FeedBlob(blob, value[0])
    workspace.CreateNet(model.net)
    losses = []
    for step in range(STEPS):
        for blob, value in batches.items():
            workspace.FeedBlob(blob, value[step % BATCHES])
        workspace.RunNet(model.net)
        losses.append(workspace.FetchBlob("loss"))
    mutexes = [b for b in blobs if b not in initial]
    init = given_fills(initial)
    for b in mutexes:
        init.op.add().CopyFrom(core.CreateOperator("CreateMutex", [], [b]))
        init.external_output.append(b)
    final = {f"final|{b}": workspace.FetchBlob(b) for b in initial}
    given = {f"batch|{b}": v for b, v in batches.items()}
    save(
        "train_" + name,
        init_net=serialized(init),
        train_net=serialized(model.net.Proto()),
        losses=np.array(losses),
        **given,
        **final,
    )


def record_image_net():
    """A small residual network with the operators that exported vision models are made of, in test mode."""
    workspace.ResetWorkspace()
    np.random.seed(1)
    model = model_helper.ModelHelper("image_net", arg_scope={"order": "NCHW"})

    def block(x, name, channels, out, stride=1, group=1):
        x = brew.conv(
            model,
            x,
            name + "_conv",
            channels,
            out,
            kernel=3,
            stride=stride,
            pad=1,
            group=group,
            no_bias=1,
        )
        x = brew.spatial_bn(model, x, name + "_bn", out, is_test=True)
        return brew.relu(model, x, x)

    x = block("data", "stem", 3, 8, stride=2)
    x = brew.max_pool(model, x, "pool1", kernel=3, stride=2, legacy_pad=3)
    shortcut = x
    x = block(x, "one", 8, 8)
    x = block(x, "two", 8, 8, group=8)
    x = model.net.ChannelShuffle(x, "shuffled", group=4)
    x = brew.relu(model, model.net.Add([x, shortcut], "added"), "merged")
    x = model.net.LRN(x, ["normal", "_scale"], size=3, alpha=0.1, beta=0.75, bias=1.0)[0]
    left = brew.conv(model, x, "left", 8, 4, kernel=1)
    right = brew.conv(model, x, "right", 8, 4, kernel=3, pad=2, dilation=2)
    x = model.net.Concat([left, right], ["branches", "_dims"], order="NCHW")[0]
    x = model.net.LeakyRelu(x, "leaky", alpha=0.2)
    x = brew.average_pool(model, x, "pool2", kernel=2, stride=2)
    x = brew.conv_transpose(model, x, "up", 8, 6, kernel=2, stride=2)
    x = model.net.InstanceNorm([x, *channel_params(model, "inst", 6)], "instance")
    x = model.net.AffineChannel([x, *channel_params(model, "affine", 6)], "affine")
    x = block(x, "last", 6, 12, stride=2)
    x = model.net.AveragePool(x, "pooled", global_pooling=1)
    x = model.net.Flatten(x, "flat")
    x = brew.relu(model, brew.fc(model, x, "fc1", 12, 10), "fc1_relu")
    brew.softmax(model, brew.fc(model, x, "fc2", 10, 5), "prob")
    initialize(model)
    weights = {}
    for p in model.params + model.GetComputedParams():
        value = workspace.FetchBlob(p)
        shift = 0.3 * np.random.randn(
            *value.shape
        )  # statistics and biases of 0 and 1 would prove little
        weights[str(p)] = (value + (abs(shift) if str(p).endswith("_riv") else shift)).astype(
            np.float32
        )
        workspace.FeedBlob(p, weights[str(p)])
    data = np.random.randn(2, 3, 25, 22).astype(np.float32)
    workspace.FeedBlob("data", data)
    workspace.RunNetOnce(model.net)
    assert len(model.net.Proto().op) >= 30, len(model.net.Proto().op)
    outputs = {f"out|{b}": workspace.FetchBlob(b) for b in ("merged", "instance", "prob")}
    model.net.Proto().external_output.extend(["prob"])
    save(
        "image_net",
        init_net=serialized(given_fills(weights)),
        predict_net=serialized(model.net.Proto()),
        data=data,
        **outputs,
    )


def channel_params(model, name, channels):
    """A scale and a bias for each channel."""
    scale = Initializer("ConstantFill", value=1.0)
    bias = Initializer("ConstantFill", value=0.0)
    return [
        model.create_param(name + "_scale", shape=[channels], initializer=scale),
        model.create_param(name + "_bias", shape=[channels], initializer=bias),
    ]


def main():
    os.makedirs(GOLDEN, exist_ok=True)
    core.GlobalInit(["caffe2_nets", "--caffe2_log_level=3"])
    for name in OPTIMIZERS:
        record_training(name)
    record_image_net()


if __name__ == "__main__":
    sys.exit(main())
