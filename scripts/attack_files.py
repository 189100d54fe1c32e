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
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    from jrnn.corpus import pieces, tokenize

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
        status = main(["train", "good.toml", "--out", "trained", "--no-sample", "--set", "train.loggers=['csv']"])
    assert status == 0 or Path("trained/checkpoints/2").exists(), out.getvalue()
    return Path("trained")


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as other:
        yield Path(shutil.copytree(folder, Path(other) / folder.name))


# ---- Attacks on files that are read ----


def read_corpus(folder: Path) -> None:
    """Reads all of a corpus; raises AssertionError if it has other tokens than the one that was written."""
    from jrnn.corpus import Corpus

    found = Corpus.open(folder)
    found.verify()
    found.tokenizer()
    whole = Corpus.open(corpus())
    for name in ("tokens", "begins"):
        if not np.array_equal(getattr(found, name)(0, len(found)), getattr(whole, name)(0, len(whole))):
            raise AssertionError(f"other {name}")


def read_run(folder: Path) -> None:
    from jrnn.train import load_config, sample_run, train
    from jrnn.train.runs import curves, summarize

    summarize(folder)
    curves(folder)
    sample_run(folder)
    train(load_config(folder / "config.toml"), folder, resume=True, console=Console(file=io.StringIO()))


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
        from jrnn.corpus import Corpus

        with copied(corpus()) as folder:
            found = Corpus.open(folder)
            act(folder)
            return refused(lambda: [found.tokens(0, len(found)), found.begins(0, len(found))])

    for file in ("00000.tokens", "00001.begins"):
        yield f"{file} is gone during a run", lambda file=file: gone(lambda d: (d / file).unlink())
        yield f"{file} is cut off during a run", lambda file=file: gone(lambda d: os.truncate(d / file, 4))
        yield (
            f"{file} has other bytes during a run",
            lambda file=file: gone(lambda d: (d / file).write_bytes(b"\xff" * 4000)),
        )
    for key in (*index, "name", "tokens", "documents", "sha256"):
        for value in VALUES:
            if key in index:
                text = json.dumps({k: v for k, v in index.items() if k != key})[:-1] + f', "{key}": {value}}}'
            else:
                text = json.dumps(index).replace(json.dumps(index["shards"][0][key]), value, 1)
            yield f"{key} is {value:.30}", lambda text=text: changed("corpus.json", lambda _: text.encode())
    twice = json.dumps({**index, "shards": [index["shards"][0]] * 2})
    yield "a shard twice", lambda: changed("corpus.json", lambda _: twice.encode(), True)
    for _ in range(count):
        file = rng.choice(["00000.tokens", "00001.tokens", "00000.begins", "00001.begins"])
        place, bit = rng.random(), 1 << rng.randrange(8)

        def flip(data: bytes, place=place, bit=bit) -> bytes:
            found = bytearray(data)
            found[int(place * len(data))] ^= bit
            return bytes(found)

        yield f"bit {bit} of {file} at {place:.3f}", lambda file=file, flip=flip: changed(file, flip, True)
        yield f"corpus.json, bit {bit} at {place:.3f}", lambda flip=flip: changed("corpus.json", flip)


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
    listed += [("mamba", "tie_word_embeddings", '"false"'), ("mamba2", "time_step_limit", '[0, {"__float__": "abc"}]')]
    every = [
        (n, k, v) for n, f in families.items() for k in (*f.config.__dataclass_fields__, "eos_token_id") for v in VALUES
    ]
    for name, key, value in [*listed, *rng.sample(every, min(count, len(every)))]:
        yield f"{name}: {key} is {value:.30}", lambda name=name, key=key, value=value: with_value(name, key, value)
    for key, value in (("num_hidden_layers", 10**9), ("hidden_size", 10**6), ("vocab_size", 2**31), ("expand", 1e300)):
        config = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, key: value}
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
        index = {"weight_map": dict.fromkeys(arrays, "a.safetensors") | {"another": "b.safetensors"}}
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
    listed = [(f"checkpoints/{name}/x", "") for name in ("²", "1" * 200, "-1", "x", "99999999999999999999")]
    listed += [(f"checkpoints/{step}/sha256.json", v) for v in ("[]", "{", '{"x": 1}', "1" * 5000, "[" * 9999)]
    listed += [
        ("metrics.jsonl", f'{{"step": {"9" * 5000}}}\n'),
        ("metrics.jsonl", '{"step": 1099511627776, "loss": 1}\n'),
    ]
    listed += [
        ("metrics.csv", f"{'9' * 5000},a,1\n"),
        ("metrics.csv", '²,"a\n'),
        ("data.json", '{"characters": [1, 2]}'),
    ]
    names = ["run.json", "data.json", "metrics.jsonl", "metrics.csv", f"checkpoints/{step}/sha256.json"]
    every = [(name, value) for name in names for value in VALUES]
    keys = json.loads((run() / "data.json").read_text())
    every += [("data.json", json.dumps(keys | {"k": 0}).replace('"k": 0', f'"{k}": {v}')) for k in keys for v in VALUES]
    every += [("run.json", f'{{"configs": {value}}}') for value in VALUES]
    for name, text in [*listed, *rng.sample(every, min(count, len(every)))]:
        yield f"{name} is {text:.40}", lambda name=name, text=text: changed(name, text)


def pipes(count: int) -> Iterator[Attack]:
    """Pipes, devices, sockets, folders and links in the place of each file that is read."""
    from jrnn.arrays import load_npy, load_npz
    from jrnn.bench.report import load
    from jrnn.convert import Package
    from jrnn.errors import DataError
    from jrnn.interop import load_state_dict
    from jrnn.models import load_state
    from jrnn.nets.proto import read_net, read_plan
    from jrnn.nets.proto.database import read_database
    from jrnn.train import load_config
    from jrnn.train.tasks.classification import ClassificationData, read_examples
    from jrnn.train.tasks.forecast import read_columns
    from jrnn.train.text import TextConfig, text_of

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
        "b.json": lambda d: load(d / "b.json"),
        "db": lambda d: read_database(d / "db", "minidb"),
        "init_net.pb": lambda d: Package.load(d),
        "value_info.json": lambda d: Package.load(d),
    }
    folders: list[tuple[Callable[[], Path], str, Callable[[Path], Any]]] = []
    for file in ("config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"):
        folders.append((model, file, read_model))
    for file in ("corpus.json", "tokenizer.json", "00000.tokens", "00001.begins"):
        folders.append((corpus, file, read_corpus))
    seal, inner = "checkpoints/2/sha256.json", ("x", "_CHECKPOINT_METADATA", "default/manifest.ocdbt")
    files = ("config.toml", "run.json", "data.json", "metrics.jsonl", "metrics.csv", seal)
    for file in (*files, *(f"checkpoints/2/{name}" for name in inner)):
        folders.append((run, file, read_run))

    def placed(base: Path | None, file: str, make: Callable[[Path], Any], read: Callable[[Path], Any]) -> str:
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

    attacks = [(None, file, what, make, read) for file, read in single.items() for what, make in makes.items()]
    attacks += [(base, f, what, make, read) for base, f, read in folders for what, make in makes.items()]
    for base, file, what, make, read in attacks[: len(attacks) if count > 100 else None]:
        if count > 100 or base is None or what in ("a pipe", "/dev/zero"):
            yield f"{file} is {what}", lambda b=base, f=file, m=make, r=read: placed(b and b(), f, m, r)


def graphs(count: int) -> Iterator[Attack]:
    """ONNX models that other programs refuse: indices out of range, sizes of 0, sizes that contradict the weights."""
    from onnx.parser import parse_model

    from jrnn.onnx import from_onnx

    rng = random.Random(SEED)
    ops = {
        "Gather <axis = {axis}>": "x, i", "GatherElements <axis = {axis}>": "x, i",
        "ScatterElements <axis = {axis}>": "x, i, x", "ScatterND": "x, j, x", "GatherND": "x, j",
    }  # fmt: skip

    def picked(op: str, inputs: str, i: np.ndarray, j: np.ndarray) -> str:
        text = f"n (float[3,2] x, int64[3,2] i, int64[3,1] j) => (float y) {{ y = {op} ({inputs}) }}"
        source = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString()
        return refused(lambda: from_onnx(source)({"x": np.ones((3, 2), np.float32), "i": i, "j": j}))

    def resized(kind: str, given: list[float]) -> str:
        values = ", ".join(map(str, given))
        inputs = "x, , s" if kind == "float" else "x, , , s"
        text = f"n (float[3,2] x) => (float y) {{ s = Constant <value = {kind}[2] {{{values}}}> () y = Resize ({inputs}) }}"
        return refused(
            lambda: from_onnx(parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString())(
                {"x": np.ones((3, 2), np.float32)}
            )
        )

    for k in range(count):
        op, inputs = rng.choice(list(ops.items()))
        i, j, axis = np.zeros((3, 2), np.int64), np.zeros((3, 1), np.int64), rng.randrange(2)
        wrong = rng.choice([3, 4, -4, -5, 100, -100, 2**31 - 1, -(2**31)])
        i[rng.randrange(3), rng.randrange(2)] = j[rng.randrange(3), 0] = wrong
        op = op.format(axis=axis)
        yield f"{op} {k}: {wrong}", lambda op=op, n=inputs, i=i, j=j: picked(op, n, i, j)
    for kind, given in (("float", [0.0, 1.0]), ("float", [-1.0, 1.0]), ("int64", [0, 2]), ("int64", [2, -1])):
        yield f"Resize by {given}", lambda kind=kind, given=given: resized(kind, given)


# ---- Faults while files are written ----


def _children(act: Callable[[Path], Any], fault: Callable[[int], None], folder: Path) -> int:
    """Runs `act` in a process of its own, of which `fault` gets the number, and returns how it ended."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            if fault is limit:
                limit(0)
            with contextlib.suppress(Exception):
                act(folder)
                status = 0
        finally:
            os._exit(status)
    if fault is not limit:
        fault(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


LIMIT = [0]  # bytes that a file may have, as on a disk that is full


def limit(pid: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT[0], LIMIT[0]))


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for those that are under way."""
    paths = (p for p in folder.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


@functools.cache
def writers() -> dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]:
    """By name, what writes the old contents of a folder, and what writes the new ones."""
    import jrnn
    from jrnn.corpus import tokenize
    from jrnn.models import save_state
    from jrnn.nets.ir import Net
    from jrnn.train.run_dir import RunDir, export_run, load_trained, write_exported

    loaded = jrnn.models.load(model())
    old, new = ({n: np.asarray(p) + k for n, p in loaded.params.items()} for k in (0, 1))
    trained = load_trained(RunDir(run()))
    package = export_run(run())
    before = replace(package, shapes={}, predict_net=Net("before"))
    words, given = Path("words.txt").absolute(), (corpus() / "tokenizer.json").absolute()
    return {
        "save": (lambda d: replace(loaded, params=old).save(d), lambda d: replace(loaded, params=new).save(d)),
        "save in parts": (
            lambda d: replace(loaded, params=old).save(d, shard_bytes=500),
            lambda d: replace(loaded, params=new).save(d, shard_bytes=900),
        ),
        "save_state": (
            lambda d: (d.mkdir(exist_ok=True), save_state(d / "s.safetensors", old)),
            lambda d: save_state(d / "s.safetensors", new),
        ),
        "convert": (lambda d: before.save(d), lambda d: write_exported(package, trained, d)),
        "tokens": (lambda d: d.mkdir(), lambda d: tokenize([words], d, tokenizer=given, separator="\n")),
    }


def _complete(name: str, folder: Path) -> dict[str, bytes]:
    """What of a folder counts: of a corpus that is not finished, nothing, and the same call finishes it."""
    found = tree(folder)
    if name == "tokens":
        return found if "corpus.json" in found else {}
    return found


def _faulty(name: str, fault: Callable[[int], None]) -> str:
    write_old, write_new = writers()[name]
    with tempfile.TemporaryDirectory() as base:
        folders = [Path(base) / k for k in ("new", "out")]
        write_old(folders[0])
        write_new(folders[0])
        write_old(folders[1])
        old, new = _complete(name, folders[1]), _complete(name, folders[0])
        status = _children(write_new, fault, folders[1])
        found = _complete(name, folders[1])
        if found not in (old, new) or (status == 0 and found != new):
            wrong = [k for k in {*found, *old, *new} if found.get(k) not in (old.get(k), new.get(k))]
            return f"ended with {status}: a mixture of {sorted(found)}, {wrong}"
        write_new(folders[1])
        return "" if _complete(name, folders[1]) == new else "the same call does not end what was begun"


def full(count: int) -> Iterator[Attack]:
    """Files that may not grow beyond some bytes, as on a disk that is full."""
    rng = random.Random(SEED)

    def at(name: str, size: int) -> str:
        LIMIT[0] = size
        return _faulty(name, limit)

    for k in range(count):
        name, size = list(writers())[k % len(writers())], rng.choice([0, rng.randrange(300), rng.randrange(12_000)])
        yield f"{name}: {size} bytes", lambda name=name, size=size: at(name, size)


def kills(count: int) -> Iterator[Attack]:
    """SIGKILL at random moments, `count` times in each writer."""
    rng = random.Random(SEED)
    took: dict[str, float] = {}

    def at(name: str, share: float) -> str:
        if name not in took:
            begun = time.monotonic()
            wrong = _faulty(name, lambda pid: took.setdefault(name, -time.monotonic()) and None)
            took[name] = (time.monotonic() - begun) / 3
            if wrong:
                return wrong

        def kill(pid: int) -> None:
            time.sleep(share * took[name])
            os.kill(pid, signal.SIGKILL)

        return _faulty(name, kill)

    for name in writers():
        for _ in range(count):
            share = rng.random() ** 2
            yield f"{name} at {share:.3f}", lambda name=name, share=share: at(name, share)


KINDS: dict[str, tuple[Callable[[int], Iterator[Attack]], int, int]] = {  # with the counts of a short and a long attack
    "corpora": (corpora, 20, 200),
    "models": (models, 100, 4000),
    "runs": (runs, 8, 200),
    "pipes": (pipes, 0, 1000),
    "graphs": (graphs, 40, 400),
    "full": (full, 25, 300),
    "kills": (kills, 5, 200),
}
