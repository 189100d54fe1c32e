#!/usr/bin/env python3
"""Records databases that the real Caffe2 wrote, and what it reads from them: tests/golden/database.npz.

Run it with the Python of caffe2_operators.py. `records` is a minidb of TensorProtos, `in|K|NAME` what a net of CreateDB and
TensorProtosDBInput reads in its K-th run, `saved` what Save wrote of `save|NAME`, and `loaded|NAME` what Load read.
"""

import os
import tempfile

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

OUT = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "golden", "database.npz"
)
SAVED = {"p/w": np.arange(12, dtype=np.float32).reshape(3, 4) / 8, "count": np.array([7], np.int64)}


def record(k):
    protos = caffe2_pb2.TensorProtos()
    protos.protos.add(dims=[2, 3], data_type=1, float_data=[k + j / 4 for j in range(6)])
    protos.protos.add(data_type=2, int32_data=[k])
    protos.protos.add(data_type=4, string_data=[b"w%d" % k])
    protos.protos.add(dims=[4], data_type=3, byte_data=bytes([k, 1, 2, 255]))
    return protos.SerializeToString()


def main():
    core.GlobalInit(["caffe2_database", "--caffe2_log_level=3"])
    entries = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "records")
        db = workspace.C.create_db("minidb", path, workspace.C.Mode.write)
        transaction = db.new_transaction()
        for k in range(5):
            transaction.put("%04d" % k, record(k))
        del transaction, db
        workspace.RunOperatorOnce(
            core.CreateOperator("CreateDB", [], ["reader"], db=path, db_type="minidb")
        )
        net = core.Net("input")
        net.TensorProtosDBInput(["reader"], ["data", "label", "word", "bytes"], batch_size=2)
        workspace.CreateNet(net)
        for k in range(4):
            workspace.RunNet(net)
            for name in ("data", "label", "word", "bytes"):
                value = workspace.FetchBlob(name)
                entries["in|%d|%s" % (k, name)] = (
                    value.astype("S") if value.dtype == object else value
                )
        saved = os.path.join(folder, "saved")
        for name, value in SAVED.items():
            workspace.FeedBlob(name, value)
            entries["save|" + name] = value
        arguments = dict(db=saved, db_type="minidb", absolute_path=1)
        workspace.RunOperatorOnce(
            core.CreateOperator("Save", list(SAVED), [], strip_prefix="p/", **arguments)
        )
        workspace.RunOperatorOnce(core.CreateOperator("Load", [], ["w", "count"], **arguments))
        for name in ("w", "count"):
            entries["loaded|" + name] = workspace.FetchBlob(name)
        for key, file in (("records", path), ("saved", saved)):
            with open(file, "rb") as f:
                entries[key] = np.frombuffer(f.read(), np.uint8)
    np.savez_compressed(OUT, **entries)


if __name__ == "__main__":
    main()
