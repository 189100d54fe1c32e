"""The readers that scripts/fuzz.py feeds, by name: each takes bytes, and checks what it reads from them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from jrnn.convert import Package
from jrnn.errors import DataError, JrnnError
from jrnn.files.corpus import Corpus
from jrnn.files.corpus.corpus import FORMAT
from jrnn.files.corpus.pieces import Documents, pieces_of
from jrnn.files.tensors import load_npy
from jrnn.interop import load_state_dict
from jrnn.models import load, load_state
from jrnn.models.loading import model_of, shapes_of
from jrnn.models.text import write_text
from jrnn.nets.graph import show, to_dot, upgrade
from jrnn.nets.proto import (
    blob_to_numpy,
    format_net,
    read_net,
    read_net_or_plan,
    read_plan,
    serialize_net,
    serialize_plan,
    tensor_to_numpy,
)
from jrnn.nets.proto.database import parse_minidb, read_predictor_file, tensors_of
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


def net(data: bytes) -> None:
    _check_net(read_net(data))


def net_of_text(data: bytes) -> None:
    _check_net(read_net(data.decode("utf-8", "surrogateescape")))


def _check_net(original) -> None:
    text = format_net(original)
    if " nan" not in text:  # nan does not equal itself, and text has only one kind of it
        for again in (read_net(serialize_net(original)), read_net(text.encode())):
            if again != original:
                raise AssertionError("a net changes when it is written and read")
    show(original)
    to_dot(original)
    upgrade(original)


def net_or_plan(data: bytes) -> None:
    with _file(data, "file") as path:
        read_net_or_plan(path)


def plan(data: bytes) -> None:
    plan_read = read_plan(data)
    if "nan" not in repr(plan_read) and read_plan(serialize_plan(plan_read)) != plan_read:
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
        loaded = load_config(path)
        path.write_text(encode(loaded), encoding="utf-8")
        if "nan" not in repr(loaded) and load_config(path) != loaded:
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
        path.write_text(
            json.dumps({"format": FORMAT, "vocabulary": 2**16, "end": None, "shards": [shard]})
        )
        opened = Corpus.open(path.parent)
        for start in range(0, len(opened), 97):
            with suppress(JrnnError):
                opened.begins(start, min(start + 97, len(opened)))
        opened.tokens(0, len(opened))
        opened.verify()


def jsonl(data: bytes) -> None:
    with _file(data, "t.jsonl") as path:
        documents = Documents(None, "text")
        for piece in pieces_of(str(path), documents):
            list(documents.of(piece))


def model_config(data: bytes) -> None:
    shapes_of(model_of(data.decode("utf-8", "surrogateescape"), "config.json"))


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
        package,
        logged,
    )
}
