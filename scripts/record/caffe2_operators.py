#!/usr/bin/env python3
"""Records what the real Caffe2 answers to the cases in caffe2_cases/, as golden data for tests/nets/ops.

    python3.8 -m venv caffe2-env
    caffe2-env/bin/pip install torch==1.8.1 "numpy<1.24" future protobuf==3.20.3 six networkx
    caffe2-env/bin/python scripts/record/caffe2_operators.py              every family
    caffe2-env/bin/python scripts/record/caffe2_operators.py elementwise  only these

Each family becomes tests/golden/ops/FAMILY.npz.xz, an .npz of cases 0, 1, ... (stored, then compressed as a whole, because
thousands of tiny arrays are mostly headers). Case K is

    K|net        a serialized NetDef: the operator, then its gradient operators
    K|in|NAME    what the net reads
    K|out|NAME   what Caffe2 wrote
    K|gradient   where the case has gradients, a JSON text: {"seeds": {output: its gradient}, "gradients": {input: its
                 gradient, or [indices, values] where it is sparse}}

Strings are recorded as fixed-width bytes; outputs that are no tensors are left out.
"""

import importlib
import io
import json
import lzma
import os
import pkgutil
import sys
import zlib

import caffe2_cases
import numpy as np
from caffe2.python import core, workspace

GOLDEN = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "golden", "ops"
)


def record(case):
    """The entries of one case: the end of the key -> array."""
    workspace.ResetWorkspace()
    net = core.Net("case")
    net.Proto().name = case.type  # the name that core.Net gives depends on the nets made before
    for op in (*case.before, (case.type, case.reads, case.outputs, case.args), *case.after):
        net.Proto().op.add().CopyFrom(core.CreateOperator(*op[:3], **op[3]))
    net.Proto().external_input.extend(case.inputs)
    for name, value in case.inputs.items():
        feed(name, value)
    run(net, 0)
    entries = {"in|" + name: recordable(value) for name, value in case.inputs.items()}
    if case.gradient:
        seeds = {name: name + "_grad" for name in case.gradient}
        for name, grad in seeds.items():
            output = workspace.FetchBlob(name)
            rng = np.random.RandomState(zlib.crc32(repr((name, np.shape(output))).encode()))
            value = rng.standard_normal(np.shape(output)).astype(
                "f2" if output.dtype == np.float16 else "f4"
            )
            feed(grad, value)
            entries["in|" + grad] = value
        gradient_blobs = net.AddGradientOperators(seeds)
        gradients = {k: [str(v.indices), str(v.values)] if isinstance(v, core.GradientSlice) else str(v)
                     for k, v in sorted((str(k), v) for k, v in gradient_blobs.items()) if v is not None}  # fmt: skip
        entries["gradient"] = np.array(json.dumps({"seeds": seeds, "gradients": gradients}))
        net.Proto().external_input.extend(seeds.values())
        run(net, len(case.before) + 1 + len(case.after))
    written = [name for op in net.Proto().op for name in op.output]
    for name in dict.fromkeys(written):
        try:
            value = workspace.FetchBlob(name)
        except Exception as e:
            if "FetchInt8Blob" not in str(e):
                raise
            continue  # a quantized tensor; an operator after it makes floats of it
        if isinstance(value, np.ndarray):
            entries["out|" + name] = recordable(value)
            net.Proto().external_output.append(name)
    entries["net"] = np.frombuffer(net.Proto().SerializeToString(), np.uint8)
    return entries


def feed(name, value):
    workspace.FeedBlob(name, value.astype(object) if value.dtype.kind == "S" else value)


def run(net, start):
    for op in net.Proto().op[start:]:
        if not workspace.RunOperatorOnce(op):
            raise RuntimeError(f"Caffe2 refuses {op}")


def recordable(value):
    return np.array(value.tolist(), "S").reshape(value.shape) if value.dtype == object else value


def write(family):
    """Records one family and returns its number of cases and bytes."""
    entries = {}
    cases = importlib.import_module("caffe2_cases." + family).CASES
    for k, case in enumerate(cases):
        try:
            recorded = record(case)
        except Exception as e:
            raise SystemExit(f"{family} case {k}, {case.type}: {e}") from e
        entries.update({f"{k}|{key}": value for key, value in recorded.items()})
    buffer = io.BytesIO()
    np.savez(buffer, **entries)
    data = lzma.compress(buffer.getvalue(), preset=9)
    with open(os.path.join(GOLDEN, family + ".npz.xz"), "wb") as f:
        f.write(data)
    return len(cases), len(data)


def main():
    families = sys.argv[1:] or [m.name for m in pkgutil.iter_modules(caffe2_cases.__path__)]
    os.makedirs(GOLDEN, exist_ok=True)
    core.GlobalInit(["caffe2_operators", "--caffe2_log_level=3"])
    for family in families:
        count, size = write(family)
        print(f"{family}: {count} cases, {size} bytes")


if __name__ == "__main__":
    main()
