"""Feeds mutated files to jrnn's readers: each must end in a value or a jrnn error, within limits of time and memory.

python scripts/fuzz.py [--cases N | --minutes M] [--seed S] [--reader NAME]

A case is a function of the seed and its number. Cases run in a separate process with limits of memory and time. A case that
fails is written to tests/nets/proto/corpus/READER/, and a test feeds it to the reader from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from onnx.parser import parse_model
from safetensors.numpy import save as safetensors_bytes

from jrnn.arrays import load_npy
from jrnn.bench import report
from jrnn.convert import Package
from jrnn.corpus import Corpus
from jrnn.corpus.corpus import FORMAT
from jrnn.corpus.pieces import Documents, pieces_of
from jrnn.errors import DataError, JrnnError
from jrnn.interop import load_state_dict
from jrnn.models import load, load_state
from jrnn.models.loading import model_of
from jrnn.models.text import write_text
from jrnn.nets.graph import show, to_dot, upgrade
from jrnn.nets.proto import (
    blob_to_numpy,
    format_net,
    message_class,
    read_net,
    read_net_or_plan,
    read_plan,
    serialize_net,
    serialize_plan,
    tensor_to_numpy,
)
from jrnn.nets.proto.database import parse_minidb, tensors_of
from jrnn.nets.proto.messages import format_message
from jrnn.nets.proto.predictor_file import read_predictor_file
from jrnn.onnx import from_onnx
from jrnn.train.checkpoint import SEAL, broken_seal
from jrnn.train.config import load_config
from jrnn.train.loggers import Csv
from jrnn.train.metrics import MetricsFile
from jrnn.train.run_dir import RunDir
from jrnn.train.runs import summarize
from jrnn.train.tasks.classification import ClassificationData, read_examples
from jrnn.train.tasks.forecast import read_columns
from jrnn.train.toml_codec import encode

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_mutate import mutate_bytes, mutate_message, mutate_minidb, mutate_safetensors, mutate_text, mutate_zip

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


# ---- The readers, and checks of their results ----


def net(data: bytes) -> None:
    _check_net(read_net(data))


def net_of_text(data: bytes) -> None:
    _check_net(read_net(data.decode("utf-8", "surrogateescape")))


def _check_net(found) -> None:
    text = format_net(found)
    if " nan" not in text:  # nan does not equal itself, and text has only one kind of it
        for again in (read_net(serialize_net(found)), read_net(text.encode())):
            if again != found:
                raise AssertionError("a net changes when it is written and read")
    show(found)
    to_dot(found)
    upgrade(found)


def net_or_plan(data: bytes) -> None:
    with _file(data, "file") as path:
        read_net_or_plan(path)


def plan(data: bytes) -> None:
    found = read_plan(data)
    if "nan" not in repr(found) and read_plan(serialize_plan(found)) != found:
        raise AssertionError("a plan changes when it is written and read")


def tensor(data: bytes) -> None:
    repr(tensor_to_numpy(data))


def blob(data: bytes) -> None:
    repr(blob_to_numpy(data))


def minidb(data: bytes) -> None:
    parse_minidb(data)


def record(data: bytes) -> None:
    repr(tensors_of(data))


def predictor_file(data: bytes) -> None:
    read_predictor_file(data)


def config(data: bytes) -> None:
    with _file(data, "config.toml") as path:
        found = load_config(path)
        path.write_text(encode(found), encoding="utf-8")
        if "nan" not in repr(found) and load_config(path) != found:
            raise AssertionError("a config changes when it is written and read")


def run_directory(data: bytes) -> None:
    """The files that jrnn writes next to a config; each reader gets the same bytes."""
    with _file(data, "metrics.jsonl") as path:
        (path.parent / "config.toml").write_text("")
        summarize(path.parent)
        with MetricsFile(path, resume_at=2):
            pass
        summarize(path.parent)
    with _file(data, "config.toml") as path, suppress(JrnnError):
        summarize(path.parent)
    with _file(data, "data.json") as path:
        RunDir(path.parent).load_fingerprint()


def seal(data: bytes) -> None:
    with _file(data, SEAL) as path:
        (path.parent / "manifest").write_bytes(data)
        broken_seal(path.parent)


def npy(data: bytes) -> None:
    with _file(data, "x.npy") as path:
        repr(load_npy(path, DataError))


def npz(data: bytes) -> None:
    with _file(data, "x.npz") as path:
        read_examples(ClassificationData(path=str(path)))


def csv(data: bytes) -> None:
    with _file(data, "x.csv") as path:
        read_columns(path, ["load"])


def onnx(data: bytes) -> None:
    repr(from_onnx(data).inputs)


def weights(data: bytes) -> None:
    with _file(data, "x.safetensors") as path:
        repr(load_state_dict(path))


def corpus(data: bytes) -> None:
    """A corpus whose index has the same bytes as its tokens, begins and tokenizer."""
    with _file(data, "corpus.json") as path:
        for name in ("00000.tokens", "00000.begins", "tokenizer.json"):
            (path.parent / name).write_bytes(data)
        with suppress(JrnnError):
            Corpus.open(path.parent)
        tokens = np.frombuffer(data[: len(data) // 2 * 2], "<u2")
        (path.parent / "00000.tokens").write_bytes(tokens.tobytes())
        (path.parent / "00000.begins").write_bytes(data[: len(data) // 8 * 8])
        shard = {"name": "00000", "tokens": len(tokens), "documents": len(data) // 8, "sha256": ""}
        path.write_text(json.dumps({"format": FORMAT, "vocabulary": 2**16, "end": None, "shards": [shard]}))
        found = Corpus.open(path.parent)
        for start in range(0, len(found), 97):
            with suppress(JrnnError):
                found.begins(start, min(start + 97, len(found)))
        found.tokens(0, len(found))
        found.verify()


def jsonl(data: bytes) -> None:
    with _file(data, "t.jsonl") as path:
        documents = Documents(None, "text")
        for piece in pieces_of(str(path), documents):
            list(documents.of(piece))


def model_config(data: bytes) -> None:
    model = model_of(data.decode("utf-8", "surrogateescape"), "config.json")
    model.family.shapes(model.config)


def model_folder(data: bytes) -> None:
    """A folder whose tensors, index and tokenizer have the same bytes; then its tensors alone."""
    config = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
    with _file(data, "model.safetensors") as path:
        (path.parent / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors.index.json", "tokenizer.json"):
            (path.parent / name).write_bytes(data)
            with suppress(JrnnError):
                "".join(write_text(path.parent, "1", 1))
            (path.parent / name).unlink()
        load(path.parent)


def state(data: bytes) -> None:
    with _file(data, "s.safetensors") as path:
        repr(load_state(path))


def benchmark(data: bytes) -> None:
    with _file(data, "b.json") as path:
        report.load(path)


def package(data: bytes) -> None:
    with _file(data, "value_info.json") as path:
        for name in ("init_net.pb", "predict_net.pb"):
            (path.parent / name).write_bytes(b'name: "n"')
        Package.load(path.parent)


def logged(data: bytes) -> None:
    """What loggers and origins of runs leave; each reader gets the same bytes."""
    with _file(data, "metrics.csv") as path:
        Csv(path.parent, None, 2).close()
    with _file(data, "run.json") as path:
        RunDir(path.parent)._kept_configs()


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


READERS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (
        net,
        net_of_text,
        net_or_plan,
        plan,
        tensor,
        blob,
        minidb,
        record,
        predictor_file,
        config,
        run_directory,
        seal,
        npy,
        npz,
        csv,
        onnx,
        weights,
        corpus,
        jsonl,
        model_config,
        model_folder,
        state,
        benchmark,
        package,
        logged,
    )
}


# ---- Cases ----


def _written(write: Callable, *values) -> list[bytes]:
    found = []
    for value in values:
        made = io.BytesIO()
        write(made, value)
        found.append(made.getvalue())
    return found


def _examples() -> list[bytes]:
    x, y = np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])
    return _written(lambda f, arrays: np.savez(f, **arrays), {"inputs": x, "targets": y}) + _written(
        lambda f, arrays: np.savez_compressed(f, **arrays), {"inputs": x, "targets": y, "lengths": y + 1}
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
    return [parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}').SerializeToString() for graph in ONNX]


def _piece(data: bytes, rng: random.Random, size: int = 3000) -> bytes:
    """Some of the outermost blocks of a text, as many as fit."""
    ends = [m.end() for m in re.finditer(rb"(?:^|\n)\}\n", data)] or [len(data)]
    first = rng.randrange(len(ends))
    begin = ends[first - 1] if first else 0
    return data[begin : max([e for e in ends[first:] if e - begin <= size], default=ends[first])]


class Cases:
    """The cases of a seed: a function from a number to the name of a reader, and bytes."""

    def __init__(self, seed: int, readers: Sequence[str]):
        self.seed, self.readers = seed, tuple(readers)
        golden = TESTS / "golden"
        nets = [p.read_bytes() for p in sorted((golden / "proto").glob("*.pb"))]
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
        plan_texts = [format_message(message_class("PlanDef").FromString(p)).encode() for p in plans[:6]]
        self.kinds = {
            "net": (("NetDef", nets), ("text", texts)),
            "net_of_text": (("text", texts),),
            "net_or_plan": (("NetDef", nets), ("PlanDef", plans), ("text", texts), ("text", plan_texts)),
            "plan": (("PlanDef", plans), ("text", plan_texts)),
            "tensor": (("TensorProto", tensors),),
            "blob": (("BlobProto", blobs),),
            "config": (("text", configs),),
            "run_directory": (("text", [METRICS, *configs, b'{"characters": "ab", "sha256": "00"}']),),
            "seal": (("text", [b'{"manifest": "00", "d/0": "11"}', b"[1]"]),),
            "minidb": (("minidb", models),),
            "record": (("TensorProtos", records),),
            "predictor_file": (("minidb", models),),
            "npy": (("bytes", _written(np.save, np.ones((2, 3)), np.arange(9), np.array([b"a", b"bc"]))),),
            "npz": (("zip", _examples()),),
            "csv": (("text", [b"hour,load\n" + b"".join(b"%d,%d.5\n" % (k, k) for k in range(40))]),),
            "onnx": (("ModelProto", _onnx_models()),),
            "corpus": (("text", [CORPUS_INDEX]), ("bytes", [np.arange(200, dtype="<i8").tobytes()])),
            "jsonl": (("text", [b'{"text": "a cat"}\n{"text": "\\ud83d\\ude00", "more": [1, {"a": null}]}\n']),),
            "model_config": (("text", [p.read_bytes() for p in sorted((golden / "models").glob("*/config.json"))]),),
            "model_folder": (
                ("safetensors", [(golden / "models" / "mamba_0" / "model.safetensors").read_bytes()]),
                ("text", [b'{"metadata": {"total_size": 1}, "weight_map": {"a": "model.safetensors"}}']),
            ),
            "state": (("safetensors", [safetensors_bytes({"0.ssm": np.ones((2, 3), np.float32)})]),),
            "benchmark": (("text", [BENCHMARK]),),
            "package": (("text", [b'{"x": [1, [2, 3]], "y": [3, []]}']),),
            "logged": (("text", [b"step,name,value\r\n1,loss,2.5\r\n2,loss,2.25\r\n", b'{"configs": ["a = 1"]}']),),
            "weights": (("safetensors", [safetensors_bytes({"w": np.ones((2, 3), np.float32), "b": np.ones(3)})]),),
        }

    def __call__(self, number: int) -> tuple[str, bytes]:
        rng = random.Random(f"{self.seed}/{number}")
        reader = self.readers[number % len(self.readers)]
        kind, pool = rng.choice(self.kinds[reader])
        data = rng.choice(pool)
        if kind == "text":
            if len(data) > 3000 and rng.random() < 0.98:  # reading text is slow, and a piece is enough
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
    cases, found = Cases(args.seed, args.reader or READERS), 0
    begun = time.time()
    while first < last and time.time() < until:
        command = [sys.executable, SCRIPT, "--worker", f"--seed={args.seed}", f"--first={first}", f"--until={until}"]
        command += [f"--cases={last - first}", *(f"--reader={name}" for name in args.reader)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
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
                found += _record(cases, number, wrong)
        _, err = worker.communicate()
        first = number + 1
        if ended:
            break
        what = f"ended the process ({signal.strsignal(-worker.returncode) if worker.returncode < 0 else err[-300:]})"
        found += _record(cases, number, what)
        if worker.returncode > 0:
            return found
    print(f"{first - args.first} cases in {time.time() - begun:.0f} s, {found} findings")
    return found


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
    parser.add_argument("--cases", type=int, default=2000, help="number of cases (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=0, help="run for so many minutes instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--reader", action="append", default=[], choices=list(READERS), help="only this one")
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
