"""The attacks of scripts/attack.py on files: what a stranger puts into a folder, and faults while files are written.

Each attack is a name and a function that returns what is wrong, or "". A reader must end in a value or in a `JrnnError`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

Attack = tuple[str, Callable[[], str]]
SEED = 0
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "models"
VALUES = [
    "null", "true", "false", "0", "-1", "1", "2", "3.5", "1e9", "1000000000", "4294967296", "1e999", "Infinity", "NaN",
    "9" * 400, "9" * 5000, '""', '"x"', '"false"', '"\\ud800"', '"\\u0000"', '"../x"', "[]", "[1]", '["x"]', "{}",
    "[[1, 2], [3]]", '{"__float__": "abc"}', '{"__float__": "NaN"}', '{"a": 1, "a": 2}', "{",
    "[" * 3000 + "]" * 3000, '"' + "x" * 5000 + '"',
]  # fmt: skip


def ends(call: Callable[[], Any]) -> str:
    """What is wrong with a call, which must return or raise a JrnnError; "" if nothing is."""
    return _tried(call, False)


def refused(call: Callable[[], Any]) -> str:
    """As `ends`; the call must raise."""
    return _tried(call, True)


def _tried(call: Callable[[], Any], must_raise: bool) -> str:
    from jrnn.errors import JrnnError

    try:
        call()
    except JrnnError as e:
        return "" if 0 < len(str(e)) < 4000 else f"an error of {len(str(e))} characters"
    except BaseException as e:
        return f"raw {type(e).__name__}: {str(e)[:200]}"
    return "accepted" if must_raise else ""


# ---- What there is to damage ----


@functools.cache
def corpus() -> Path:
    """A corpus of several shards."""
    from jrnn.files.corpus import pieces, tokenize

    pieces.PIECE = 300
    Path("words.txt").write_text("the cat sat on the mat\nand the dog ran away\n" * 20)
    tokenize(["words.txt"], "corpus", vocabulary=270, separator="\n")
    return Path("corpus")


@functools.cache
def model(name: str = "mamba") -> Path:
    """A tiny model, with a tokenizer."""
    shutil.copytree(GOLDEN / f"{name}_0", f"model_{name}", dirs_exist_ok=True)
    shutil.copy(corpus() / "tokenizer.json", f"model_{name}")
    return Path(f"model_{name}")


@functools.cache
def run() -> Path:
    """A run of two steps."""
    from jrnn.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(
            [
                "train",
                "good.toml",
                "--out",
                "trained",
                "--no-sample",
                "--set",
                "train.loggers=['csv']",
            ]
        )
    assert status == 0 or Path("trained/checkpoints/2").exists(), out.getvalue()
    return Path("trained")


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as other:
        yield Path(shutil.copytree(folder, Path(other) / folder.name))


# ---- Attacks on files that are read ----


def read_corpus(folder: Path) -> None:
    """Reads all of a corpus; raises AssertionError if it has other tokens than the one that was written."""
    from jrnn.files.corpus import Corpus

    opened = Corpus.open(folder)
    opened.verify()
    opened.tokenizer()
    whole = Corpus.open(corpus())
    for name in ("tokens", "begins"):
        if not np.array_equal(
            getattr(opened, name)(0, len(opened)), getattr(whole, name)(0, len(whole))
        ):
            raise AssertionError(f"other {name}")


def read_run(folder: Path) -> None:
    from jrnn.train import load_config, load_run, train
    from jrnn.train.runs import curves, summarize

    summarize(folder)
    curves(folder)
    load_run(folder).sample()
    train(
        load_config(folder / "config.toml"),
        folder,
        resume=True,
        console=Console(file=io.StringIO()),
    )


def read_model(folder: Path) -> None:
    import jrnn
    from jrnn.models.text import write_text

    jrnn.models.load(folder)
    "".join(write_text(folder, "the", 1, temperature=0))


def corpora(count: int) -> Iterator[Attack]:
    rng = random.Random(SEED)
    index = json.loads((corpus() / "corpus.json").read_text())

    def changed(file: str, change: Callable[[bytes], bytes], must_raise: bool = False) -> str:
        with copied(corpus()) as folder:
            (folder / file).write_bytes(change((folder / file).read_bytes()))
            return (refused if must_raise else ends)(lambda: read_corpus(folder))

    def gone(act: Callable[[Path], Any]) -> str:
        from jrnn.files.corpus import Corpus

        with copied(corpus()) as folder:
            opened = Corpus.open(folder)
            act(folder)
            return refused(lambda: [opened.tokens(0, len(opened)), opened.begins(0, len(opened))])

    for file in ("00000.tokens", "00001.begins"):
        yield f"{file} is gone during a run", lambda file=file: gone(lambda d: (d / file).unlink())
        yield (
            f"{file} is cut off during a run",
            lambda file=file: gone(lambda d: os.truncate(d / file, 4)),
        )
        yield (
            f"{file} has other bytes during a run",
            lambda file=file: gone(lambda d: (d / file).write_bytes(b"\xff" * 4000)),
        )
    for key in (*index, "name", "tokens", "documents", "sha256"):
        for value in VALUES:
            if key in index:
                text = (
                    json.dumps({k: v for k, v in index.items() if k != key})[:-1]
                    + f', "{key}": {value}}}'
                )
            else:
                text = json.dumps(index).replace(json.dumps(index["shards"][0][key]), value, 1)
            yield (
                f"{key} is {value:.30}",
                lambda text=text: changed("corpus.json", lambda _: text.encode()),
            )
    twice = json.dumps({**index, "shards": [index["shards"][0]] * 2})
    yield "a shard twice", lambda: changed("corpus.json", lambda _: twice.encode(), True)
    for _ in range(count):
        file = rng.choice(["00000.tokens", "00001.tokens", "00000.begins", "00001.begins"])
        place, bit = rng.random(), 1 << rng.randrange(8)

        def flip(data: bytes, place=place, bit=bit) -> bytes:
            flipped = bytearray(data)
            flipped[int(place * len(data))] ^= bit
            return bytes(flipped)

        yield (
            f"bit {bit} of {file} at {place:.3f}",
            lambda file=file, flip=flip: changed(file, flip, True),
        )
        yield (
            f"corpus.json, bit {bit} at {place:.3f}",
            lambda flip=flip: changed("corpus.json", flip),
        )


def models(count: int) -> Iterator[Attack]:
    """Values in config.json of each family, of which `count` are drawn; and damaged tensors."""
    import jax

    import jrnn

    rng, families = random.Random(SEED), jrnn.models.FAMILIES

    def with_value(name: str, key: str, value: str) -> str:
        with copied(model(name)) as folder:
            given = {**json.loads((folder / "config.json").read_text())}
            given.pop(key, None)
            (folder / "config.json").write_text(json.dumps(given)[:-1] + f', "{key}": {value}}}')
            return ends(lambda: jrnn.models.load(folder))

    listed = [
        ("mamba", "num_hidden_layers", "1000000000"),
        ("mamba", "model_type", "[]"),
        ("mamba", "vocab_size", "1e999"),
    ]
    listed += [
        ("mamba", "tie_word_embeddings", '"false"'),
        ("mamba2", "time_step_limit", '[0, {"__float__": "abc"}]'),
    ]
    every = [
        (n, k, v)
        for n, f in families.items()
        for k in (*f.config.__dataclass_fields__, "eos_token_id")
        for v in VALUES
    ]
    for name, key, value in [*listed, *rng.sample(every, min(count, len(every)))]:
        yield (
            f"{name}: {key} is {value:.30}",
            lambda name=name, key=key, value=value: with_value(name, key, value),
        )
    for key, value in (
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**6),
        ("vocab_size", 2**31),
        ("expand", 1e300),
    ):
        config = {
            "model_type": "mamba",
            "vocab_size": 16,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            key: value,
        }
        yield (
            f"create: {key} is {value}",
            lambda config=config: refused(lambda: jrnn.models.create(config, jax.random.key(0))),
        )
    for k in range(count // 4):
        yield f"tensors {k}", lambda k=k: damaged(k)


def damaged(k: int) -> str:
    """A tensor file with another header, or two files with one tensor."""
    from fuzz_mutate import mutate_safetensors
    from safetensors.numpy import load_file, save_file

    rng = random.Random(k)
    with copied(model()) as folder:
        file = folder / "model.safetensors"
        if k % 2:
            file.write_bytes(mutate_safetensors(file.read_bytes(), rng))
            return ends(lambda: read_model(folder))
        arrays = load_file(file)
        name = rng.choice(sorted(arrays))
        file.unlink()
        save_file(arrays, folder / "a.safetensors")
        save_file({name: 1 + arrays[name]}, folder / "b.safetensors")
        index = {
            "weight_map": dict.fromkeys(arrays, "a.safetensors") | {"another": "b.safetensors"}
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return refused(lambda: read_model(folder))


def runs(count: int) -> Iterator[Attack]:
    """Damaged files of a run; each of `count` attacks is on a file of its own."""
    rng = random.Random(SEED)

    def changed(file: str, text: str) -> str:
        with copied(run()) as folder:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, errors="surrogatepass")
            return ends(lambda: read_run(folder))

    step = max(int(p.name) for p in (run() / "checkpoints").iterdir())
    listed = [
        (f"checkpoints/{name}/x", "")
        for name in ("²", "1" * 200, "-1", "x", "99999999999999999999")
    ]
    listed += [
        (f"checkpoints/{step}/sha256.json", v)
        for v in ("[]", "{", '{"x": 1}', "1" * 5000, "[" * 9999)
    ]
    listed += [
        ("metrics.jsonl", f'{{"step": {"9" * 5000}}}\n'),
        ("metrics.jsonl", '{"step": 1099511627776, "loss": 1}\n'),
    ]
    listed += [
        ("metrics.csv", f"{'9' * 5000},a,1\n"),
        ("metrics.csv", '²,"a\n'),
        ("data.json", '{"characters": [1, 2]}'),
    ]
    names = [
        "run.json",
        "data.json",
        "metrics.jsonl",
        "metrics.csv",
        f"checkpoints/{step}/sha256.json",
    ]
    every = [(name, value) for name in names for value in VALUES]
    keys = json.loads((run() / "data.json").read_text())
    every += [
        ("data.json", json.dumps(keys | {"k": 0}).replace('"k": 0', f'"{k}": {v}'))
        for k in keys
        for v in VALUES
    ]
    every += [("run.json", f'{{"configs": {value}}}') for value in VALUES]
    for name, text in [*listed, *rng.sample(every, min(count, len(every)))]:
        yield f"{name} is {text:.40}", lambda name=name, text=text: changed(name, text)


def pipes(count: int) -> Iterator[Attack]:
    """Pipes, devices, sockets, folders and links in the place of each file that is read."""
    from jrnn.convert import Package
    from jrnn.errors import DataError
    from jrnn.files.tensors import load_npy, load_npz
    from jrnn.interop import load_state_dict
    from jrnn.models import load_state
    from jrnn.nets.proto import read_net, read_plan
    from jrnn.nets.proto.database import read_database
    from jrnn.train import load_config
    from jrnn.train.tasks.classification import ClassificationData, read_examples
    from jrnn.train.tasks.forecast import read_columns
    from jrnn.train.text_streams import TextConfig, text_of

    def mkfifo(path: Path) -> None:
        os.mkfifo(path)

    def bind(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
        os.chdir(here)

    makes: dict[str, Callable[[Path], Any]] = {
        "a pipe": mkfifo,
        "/dev/zero": lambda p: p.symlink_to("/dev/zero"),
        "a folder": lambda p: p.mkdir(),
        "a socket": bind,
        "a link to nothing": lambda p: p.symlink_to("nothing"),
        "a loop of links": lambda p: p.symlink_to(p.name),
        "a huge file": lambda p: (p.touch(), os.truncate(p, 1 << 42)),
    }

    def onnx(folder: Path) -> None:
        from jrnn.onnx import from_onnx

        from_onnx(folder / "m.onnx")

    single: dict[str, Callable[[Path], Any]] = {
        "net.pb": lambda d: read_net(d / "net.pb"),
        "plan.pb": lambda d: read_plan(d / "plan.pb"),
        "m.onnx": onnx,
        "x.npy": lambda d: load_npy(d / "x.npy", DataError),
        "x.npz": lambda d: load_npz(d / "x.npz", DataError),
        "e.npz": lambda d: read_examples(ClassificationData(path=str(d / "e.npz"))),
        "x.csv": lambda d: read_columns(d / "x.csv", ["a"]),
        "x.txt": lambda d: text_of(TextConfig(path=str(d / "x.txt"))),
        "c.toml": lambda d: load_config(d / "c.toml"),
        "w.safetensors": lambda d: load_state_dict(d / "w.safetensors"),
        "s.safetensors": lambda d: load_state(d / "s.safetensors"),
        "db": lambda d: read_database(d / "db", "minidb"),
        "init_net.pb": lambda d: Package.load(d),
        "value_info.json": lambda d: Package.load(d),
    }
    folders: list[tuple[Callable[[], Path], str, Callable[[Path], Any]]] = []
    for file in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "model.safetensors.index.json",
    ):
        folders.append((model, file, read_model))
    for file in ("corpus.json", "tokenizer.json", "00000.tokens", "00001.begins"):
        folders.append((corpus, file, read_corpus))
    seal, inner = (
        "checkpoints/2/sha256.json",
        ("x", "_CHECKPOINT_METADATA", "default/manifest.ocdbt"),
    )
    files = ("config.toml", "run.json", "data.json", "metrics.jsonl", "metrics.csv", seal)
    for file in (*files, *(f"checkpoints/2/{name}" for name in inner)):
        folders.append((run, file, read_run))

    def placed(
        base: Path | None, file: str, make: Callable[[Path], Any], read: Callable[[Path], Any]
    ) -> str:
        with copied(base) if base else tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            if base is None and file == "value_info.json":
                for name in ("init_net.pb", "predict_net.pb"):
                    shutil.copy("net.pbtxt", Path(folder) / name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            make(path)
            must_raise = base is None and (file != "value_info.json" or make is makes["a pipe"])
            return (refused if must_raise else ends)(lambda: read(Path(folder)))

    attacks = [
        (None, file, what, make, read)
        for file, read in single.items()
        for what, make in makes.items()
    ]
    attacks += [
        (base, f, what, make, read) for base, f, read in folders for what, make in makes.items()
    ]
    for base, file, what, make, read in attacks[: len(attacks) if count > 100 else None]:
        if count > 100 or base is None or what in ("a pipe", "/dev/zero"):
            yield (
                f"{file} is {what}",
                lambda b=base, f=file, m=make, r=read: placed(b and b(), f, m, r),
            )
