"""Records what the real Caffe2 writes, for the tests of jrnn/nets/proto: nets as bytes and text, and serialized blobs.

Run it where Caffe2 is (Python 3.8: `pip install torch==1.8.1 "numpy<1.24" future protobuf==3.20.3 six networkx`):

    python scripts/record/caffe2_protos.py

It fills tests/golden/proto/: NAME.pb and NAME.pbtxt for every net, and blobs.npz with `NAME|blob` (or `NAME|blob|CHUNK`),
the bytes, and `NAME|value`, the array that was fed (strings as fixed-width bytes).
"""

import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, model_helper, rnn_cell, workspace

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "proto"


def lstm_training_net():
    """Two layers, sequence lengths, a loss, and the gradient operators of all of it."""
    model = model_helper.ModelHelper(name="lstm_train")
    states = [model.net.AddExternalInputs(f"h{i}_init", f"c{i}_init") for i in range(2)]
    x, lengths, target = model.net.AddExternalInputs("x", "seq_lengths", "target")
    output, _, _, _ = rnn_cell.LSTM(
        model,
        x,
        lengths,
        [s for pair in states for s in pair],
        3,
        [4, 4],
        scope="lstm",
        forget_bias=1.0,
    )
    logits = brew.fc(model, output, "logits", dim_in=4, dim_out=5, axis=2)
    flat, _ = model.net.Reshape(logits, ["flat", "flat_old_shape"], shape=[-1, 5])
    _, loss = model.net.SoftmaxWithLoss([flat, target], ["softmax", "loss"])
    model.AddGradientOperators([loss])
    return model.net.Proto()


def with_text_step_nets(net):
    """The same net as Caffe2 wrote it before October 2017: step nets as text in `s`."""
    old = caffe2_pb2.NetDef()
    old.CopyFrom(net)
    for op in old.op:
        for arg in op.arg:
            if arg.name in ("step_net", "backward_step_net"):
                arg.s = str(arg.n).encode()
                arg.ClearField("n")
    return old


def devices_net():
    """Device options of every kind, an engine, control inputs, empty lists, and every kind of argument."""
    net = core.Net("devices")
    net.Proto().type = "dag"
    net.Proto().num_workers = 3
    net.Proto().device_option.CopyFrom(core.DeviceOption(caffe2_pb2.CUDA, 1))
    inner = core.Net("inner")
    inner.Relu("a", "b")
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CPU, node_name="worker:0", numa_node_id=1)):
        net.Proto().op.extend(
            [core.CreateOperator("FC", ["x", "w", "b"], "y", engine="CUDNN", axis=2)]
        )
    op = core.CreateOperator(
        "Everything",
        ["y"],
        ["z"],
        name="all",
        control_input=["x"],
        random_seed=7,
        f=0.0,
        i=0,
        s="text",
        raw=b"\x00\xff",
        n=inner.Proto(),
        floats=[0.5, float("inf")],
        ints=[-1, 2**62],
        strings=["a", b"\xfe"],
        nets=[inner.Proto(), caffe2_pb2.NetDef()],
        nothing=[],
        debug_info="made by hand",
    )
    op.domain = "here"
    op.op_version = 2
    t = op.arg.add(name="t").t
    t.dims.extend([2])
    t.float_data.extend([1.0, 2.0])
    part = net.Proto().partition_info.add(name="p", device_id=[0, 1], extra_info="more")
    part.backend_options.add(backend_name="any").option.add(key="k", val="v")
    net.Proto().op.extend([op])
    net.AddExternalInput("x")
    return net.Proto()


def blob_values():
    values = {
        "float32": np.array([[0.5, -1.0, np.inf], [3.4e38, 1e-45, 0.0]], np.float32),
        "float64": np.array([1e300, -0.1], np.float64),
        "float16": np.array([1.5, -2.0, 65504.0, 6e-8], np.float16),
        "bool": np.array([[True, False]]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "string": np.array([[b"a", b"\xff\x01bc"]], object),
    }
    for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16"):
        info = np.iinfo(dtype)
        values[dtype] = np.array([info.min, 0, 1, info.max], dtype)
    return values


def chunks_of(name, array):
    """The blob as the operator Save writes it to a database, cut into chunks of three elements."""
    workspace.FeedBlob(name, array)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "db")
        save = core.CreateOperator(
            "Save", [name], [], absolute_path=1, db=path, db_type="minidb", chunk_size=3
        )
        workspace.RunOperatorOnce(save)
        data = Path(path).read_bytes()
    chunks, at = [], 0
    while at < len(data):
        key, value = struct.unpack_from("<ii", data, at)
        chunks.append(data[at + 8 + key : at + 8 + key + value])
        at += 8 + key + value
    return chunks


def main():
    GOLDEN.mkdir(parents=True, exist_ok=True)
    lstm = lstm_training_net()
    for name, net in (
        ("lstm", lstm),
        ("lstm_text_steps", with_text_step_nets(lstm)),
        ("devices", devices_net()),
    ):
        (GOLDEN / f"{name}.pb").write_bytes(net.SerializeToString())
        (GOLDEN / f"{name}.pbtxt").write_text(str(net))
    stored = {}
    for name, value in blob_values().items():
        workspace.FeedBlob(name, value)
        stored[f"{name}|blob"] = np.frombuffer(workspace.SerializeBlob(name), np.uint8)
        stored[f"{name}|value"] = value.astype("S") if value.dtype == object else value
    chunked = np.arange(8, dtype=np.float32).reshape(2, 4)
    for i, chunk in enumerate(chunks_of("chunked", chunked)):
        stored[f"chunked|blob|{i}"] = np.frombuffer(chunk, np.uint8)
    stored["chunked|value"] = chunked
    np.savez_compressed(GOLDEN / "blobs.npz", **stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
