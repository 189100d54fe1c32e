"""Feeds mutated files to jrnn's readers: each must end in a value or a jrnn error, within limits of time and memory.

python scripts/fuzz.py [--cases N | --minutes M] [--seed S] [--reader NAME]

A case is a function of the seed and its number. Cases run in a separate process with limits of memory and time. A case that
fails is written to tests/nets/proto/corpus/READER/, and a test feeds it to the reader from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from onnx.parser import parse_model
from safetensors.numpy import save as safetensors_bytes

from jrnn.errors import JrnnError
from jrnn.nets.proto import (
    message_class,
)
from jrnn.nets.proto.database import parse_minidb
from jrnn.nets.proto.messages import format_message

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_mutate import (
    mutate_bytes,
    mutate_message,
    mutate_minidb,
    mutate_safetensors,
    mutate_text,
    mutate_zip,
)
from fuzz_readers import READERS

TESTS = Path(__file__).resolve().parents[1] / "tests"
CORPUS = TESTS / "nets" / "proto" / "corpus"
METRICS = b'{"step": 1, "loss": 3.0, "items_per_second": 9}\n{"step": 2, "validation_loss": NaN}\n{"step": 3, "lo'
CORPUS_INDEX = b"""{"format": "jrnn corpus 1", "vocabulary": 270, "end": 0,
 "shards": [{"name": "00000", "tokens": 7, "documents": 1, "sha256": "00"}]}"""
BENCHMARK = b"""{"conditions": {}, "records": [{"cell": "lstm", "size": "1x1x1x1", "mode": "forward", "peer": "jrnn",
 "median": 1.5, "low": 1, "high": 2.0, "turns": 3, "compile_seconds": null, "peak_bytes": 17, "flops_per_second": 1e9}]}"""
SCRIPT = __file__
MEMORY = 512 << 20  # bytes besides those of the process at its start
SECONDS = 5  # of processor time for one case


# ---- Cases ----


def _written(write: Callable, *values) -> list[bytes]:
    texts = []
    for value in values:
        buffer = io.BytesIO()
        write(buffer, value)
        texts.append(buffer.getvalue())
    return texts


def _examples() -> list[bytes]:
    x, y = np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])
    return _written(
        lambda f, arrays: np.savez(f, **arrays), {"inputs": x, "targets": y}
    ) + _written(
        lambda f, arrays: np.savez_compressed(f, **arrays),
        {"inputs": x, "targets": y, "lengths": y + 1},
    )


ONNX = (
    "n (float[N] x) => (float[M] y) { c = Constant <value = int64[2] {2, 3}> () e = Expand(x, c) y = Tanh(e) }",
    "n (float[2,3] x) => (float[2,2] y) <float[3,2] w = {1,2,3,4,5,6}> { h = MatMul(x, w) y = Softmax <axis = -1> (h) }",
    "n (float[5,1,2] x, float[1,8,2] w, float[1,8,2] r) => (float y, float h, float c) "
    "{ y, h, c = LSTM <hidden_size = 2> (x, w, r) }",
    "n (bool p, float[2] x) => (float[2] y) "
    "{ y = If (p) <then_branch = t () => (float[2] a) { a = Neg(x) }, else_branch = e () => (float[2] b) { b = Exp(x) }> }",
    "n (int64 m, bool p, float[2] x) => (float[2] y, float z) "
    "{ y, z = Loop (m, p, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) "
    "{ d = Identity(c) t = Tanh(s) u = Neg(s) }> }",
)


def _onnx_models() -> list[bytes]:
    return [
        parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}').SerializeToString()
        for graph in ONNX
    ]


def _piece(data: bytes, rng: random.Random, size: int = 3000) -> bytes:
    """Some of the outermost blocks of a text, as many as fit."""
    ends = [m.end() for m in re.finditer(rb"(?:^|\n)\}\n", data)] or [len(data)]
    first = rng.randrange(len(ends))
    begin = ends[first - 1] if first else 0
    return data[begin : max([e for e in ends[first:] if e - begin <= size], default=ends[first])]


def _parts(nets: Sequence[bytes]) -> list[bytes]:
    """Nets with two operators each: whole ones take protobuf 100 ms, as text."""
    messages = []
    for data in nets:
        for k in range(0, len(message_class("NetDef").FromString(data).op), 2):
            part = message_class("NetDef").FromString(data)
            del part.op[k + 2 :], part.op[:k]
            messages.append(part.SerializeToString())
    return messages


class Cases:
    """The cases of a seed: a function from a number to the name of a reader, and bytes."""

    def __init__(self, seed: int, readers: Sequence[str]):
        self.seed, self.readers = seed, tuple(readers)
        golden = TESTS / "golden"
        nets = [p.read_bytes() for p in sorted((golden / "proto").glob("*.pb"))]
        nets += _parts(nets)
        texts = [p.read_bytes() for p in sorted((golden / "proto").glob("*.pbtxt"))]
        with np.load(golden / "plans.npz") as file:
            plans = [file[k].tobytes() for k in file.files if k.endswith("|plan")]
            models = [file["export|minidb"].tobytes()]
        with np.load(golden / "proto" / "blobs.npz") as file:
            blobs = [file[k].tobytes() for k in file.files if "|blob" in k]
        with np.load(golden / "database.npz") as file:
            records = [value for _, value in parse_minidb(file["records"].tobytes())]
        tensors = [b[b.index(b"Tensor\x1a") + 8 :] for b in blobs]
        configs = [p.read_bytes() for p in sorted((TESTS.parent / "configs").glob("*.toml"))]
        plan_texts = [
            format_message(message_class("PlanDef").FromString(p)).encode() for p in plans[:6]
        ]
        self.kinds = {
            "net": (("NetDef", nets), ("text", texts)),
            "net_of_text": (("text", texts),),
            "net_or_plan": (
                ("NetDef", nets),
                ("PlanDef", plans),
                ("text", texts),
                ("text", plan_texts),
            ),
            "plan": (("PlanDef", plans), ("text", plan_texts)),
            "tensor": (("TensorProto", tensors),),
            "blob": (("BlobProto", blobs),),
            "config": (("text", configs),),
            "run_directory": (
                ("text", [METRICS, *configs, b'{"characters": "ab", "sha256": "00"}']),
            ),
            "seal": (("text", [b'{"manifest": "00", "d/0": "11"}', b"[1]"]),),
            "minidb": (("minidb", models),),
            "record": (("TensorProtos", records),),
            "predictor_file": (("minidb", models),),
            "npy": (
                (
                    "bytes",
                    _written(np.save, np.ones((2, 3)), np.arange(9), np.array([b"a", b"bc"])),
                ),
            ),
            "npz": (("zip", _examples()),),
            "csv": (
                ("text", [b"hour,load\n" + b"".join(b"%d,%d.5\n" % (k, k) for k in range(40))]),
            ),
            "onnx": (("ModelProto", _onnx_models()),),
            "corpus": (
                ("text", [CORPUS_INDEX]),
                ("bytes", [np.arange(200, dtype="<i8").tobytes()]),
            ),
            "jsonl": (
                (
                    "text",
                    [b'{"text": "a cat"}\n{"text": "\\ud83d\\ude00", "more": [1, {"a": null}]}\n'],
                ),
            ),
            "model_config": (
                (
                    "text",
                    [p.read_bytes() for p in sorted((golden / "models").glob("*/config.json"))],
                ),
            ),
            "model_folder": (
                (
                    "safetensors",
                    [(golden / "models" / "mamba_0" / "model.safetensors").read_bytes()],
                ),
                (
                    "text",
                    [b'{"metadata": {"total_size": 1}, "weight_map": {"a": "model.safetensors"}}'],
                ),
            ),
            "state": (
                ("safetensors", [safetensors_bytes({"0.ssm": np.ones((2, 3), np.float32)})]),
            ),
            "benchmark": (("text", [BENCHMARK]),),
            "package": (("text", [b'{"x": [1, [2, 3]], "y": [3, []]}']),),
            "logged": (
                (
                    "text",
                    [
                        b"step,name,value\r\n1,loss,2.5\r\n2,loss,2.25\r\n",
                        b'{"configs": ["a = 1"]}',
                    ],
                ),
            ),
            "weights": (
                (
                    "safetensors",
                    [safetensors_bytes({"w": np.ones((2, 3), np.float32), "b": np.ones(3)})],
                ),
            ),
        }

    def __call__(self, number: int) -> tuple[str, bytes]:
        rng = random.Random(f"{self.seed}/{number}")
        reader = self.readers[number % len(self.readers)]
        kind, pool = rng.choice(self.kinds[reader])
        data = rng.choice(pool)
        if kind == "text":
            if (
                len(data) > 3000 and rng.random() < 0.98
            ):  # reading text is slow, and a piece is enough
                data = _piece(data, rng)
            return reader, mutate_text(data, rng) if rng.random() < 0.7 else mutate_bytes(data, rng)
        if kind == "bytes" or rng.random() < 0.3:
            return reader, mutate_bytes(data, rng)
        if kind == "minidb":
            return reader, mutate_minidb(data, pool, rng)
        if kind == "zip":
            return reader, mutate_zip(data, rng)
        if kind == "safetensors":
            return reader, mutate_safetensors(data, rng)
        return reader, mutate_message(data, kind, pool, rng)


# ---- The process that runs cases, and the one that watches it ----


def work(cases: Cases, numbers: range, until: float) -> None:
    """Runs cases; prints the number of each before it runs, and what was wrong afterwards."""
    jax.devices()  # JAX's threads do not start within the limit
    status = Path("/proc/self/statm").read_text().split()
    bound = int(status[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    for number in numbers:
        if time.time() > until:
            break
        reader, data = cases(number)
        print(number, flush=True)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process even if it hangs
        try:
            READERS[reader](data)
        except JrnnError as e:
            if not str(e) or len(str(e)) > 4000:
                print(number, f"an error of {len(str(e))} characters", flush=True)
        except BaseException as e:
            frame = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            print(number, f"{type(e).__name__} at {where}: {str(e)[:160]!r}", flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
    print("end", flush=True)


def watch(args: argparse.Namespace) -> int:
    """Starts workers until all cases have run; records the failing cases and returns their number."""
    until = time.time() + args.minutes * 60 if args.minutes else float("inf")
    known: set[str] = set()  # one case of a kind is enough
    first, last = args.first, args.first + args.cases if not args.minutes else sys.maxsize
    cases, findings = Cases(args.seed, args.reader or READERS), 0
    begun = time.time()
    while first < last and time.time() < until:
        command = [
            sys.executable,
            SCRIPT,
            "--worker",
            f"--seed={args.seed}",
            f"--first={first}",
            f"--until={until}",
        ]
        command += [f"--cases={last - first}", *(f"--reader={name}" for name in args.reader)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        number, ended = first, False
        assert worker.stdout is not None and worker.stderr is not None
        for line in worker.stdout:
            where, _, wrong = line.strip().partition(" ")
            if where == "end":
                ended = True
                break
            number = int(where)
            kind = wrong.partition(": ")[0]
            if wrong and kind not in known:
                known.add(kind)
                findings += _record(cases, number, wrong)
        _, err = worker.communicate()
        first = number + 1
        if ended:
            break
        what = f"ended the process ({signal.strsignal(-worker.returncode) if worker.returncode < 0 else err[-300:]})"
        findings += _record(cases, number, what)
        if worker.returncode > 0:
            return findings
    print(f"{first - args.first} cases in {time.time() - begun:.0f} s, {findings} findings")
    return findings


def _record(cases: Cases, number: int, wrong: str) -> int:
    reader, data = cases(number)
    folder = CORPUS / reader
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    print(f"case {number} of seed {cases.seed}: {reader}: {wrong}; see {path}")
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=2000, help="number of cases (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=0, help="run for so many minutes instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument(
        "--reader", action="append", default=[], choices=list(READERS), help="only this one"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        readers = args.reader or READERS
        work(Cases(args.seed, readers), range(args.first, args.first + args.cases), args.until)
        return 0
    return 1 if watch(args) else 0


if __name__ == "__main__":
    sys.exit(main())
