"""Attacks jrnn as a stranger would, and prints a table of what was tried and what held.

python scripts/attack.py [--long] [--only NAME]

calls: bad calls of the command line; each must end with one line and status 2. names: nets and ONNX models whose names are
code, markup and escape codes. memory: operators that ask for more memory than there is. readers: mutated files, by
scripts/fuzz.py. interrupts: Ctrl-C at random moments after Python has begun to run jrnn. scripts/attack_files.py has
corpora, models, runs and pipes, attack_values.py graphs and options, and attack_faults.py full, kills and trainings.

By default two minutes; with --long, hundreds of each kind and 50 interrupts of each command. The exit status is 1 if
something did not hold; the reasons are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "scripts"),
    str(ROOT / "tests" / "nets"),
    str(ROOT / "tests" / "convert"),
    str(ROOT / "tests" / "train"),
]

import attack_faults  # noqa: E402 - of the folder that was just added
import attack_files  # noqa: E402
import attack_values  # noqa: E402

FILES: dict[
    str, tuple[Callable[[int], Iterator[attack_files.Attack]], int, int]
] = {  # with the counts of a short and a long attack
    "corpora": (attack_files.corpora, 20, 200),
    "models": (attack_files.models, 100, 4000),
    "runs": (attack_files.runs, 8, 200),
    "pipes": (attack_files.pipes, 0, 1000),
    "graphs": (attack_values.graphs, 40, 400),
    "options": (attack_values.options, 150, 1000),
    "full": (attack_faults.full, 25, 300),
    "kills": (attack_faults.kills, 5, 40),
    "trainings": (attack_faults.trainings, 3, 50),
}

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SECONDS = 120  # for one call

NET = """
name: "n" external_input: "x" external_input: "w" external_input: "b" external_output: "y"
op { type: "FC" input: "x" input: "w" input: "b" output: "y" }
op { type: "AveragedLoss" input: "y" output: "loss" }
"""
FEEDS = ["--feed", "x=normal[2,3]", "--feed", "w=normal[4,3]", "--feed", "b=normal[4]"]
TRAIN = """
[data]
path = "text.txt"
batch = 2
chunk = 4
[model]
embedding = 2
hidden = 4
[train]
steps = 2
[sample]
prompt = "t"
length = 3
"""
TASK = """
from dataclasses import dataclass
import numpy as np
@dataclass(frozen=True)
class Data:
    batch: int = 2
def fails(config):
    raise KeyError("planted")
def raises(config):
    return 1 / 0
class Kind: pass
"""


# ---- Bad calls of the command line ----


def files(folder: Path) -> None:
    """Makes the files that the calls name."""
    (folder / "net.pbtxt").write_text(NET)
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran away\n" * 30)
    (folder / "good.toml").write_text(TRAIN)
    (folder / "own.py").write_text(TASK)
    (folder / "raises.py").write_text("raise KeyError('planted')")
    (folder / "sub").mkdir()
    (folder / "sub" / "sibling.py").write_text("import other\nX = other.X()")
    (folder / "sub" / "other.py").write_text("def X():\n    raise ZeroDivisionError")
    shutil.copytree(attack_files.GOLDEN / "mamba_0", folder / "model", dirs_exist_ok=True)
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("")
    os.mkfifo(folder / "pipe.pb")
    contents = {
        "empty": b"",
        "zeros": b"\0" * 300,
        "noise": random.Random(0).randbytes(300),
        "text": b"name: 'x' nmae: 'y'",
        "deep": b"op{arg{n{" * 3000,
        "utf16": "name: 'x'".encode("utf-16"),
        "escapes": b'name: "\\033[2J" op { type: "\\033]0;x\\007" input: "\\033[1m" output: "y" }',
        "nul": b'op { type: "Relu" input: "a\\000b" output: "c" }',
        "twice": b'op { type: "Relu" input: "x" output: "y" arg { name: "q" i: 1 } arg { name: "q" i: 2 } }',
        "huge": b'op { type: "ConstantFill" output: "y" arg { name: "shape" ints: 1099511627776 } }',
        "cycle": b'op { type: "Relu" input: "z" output: "y" } op { type: "Relu" input: "y" output: "z" }',
        "unknown": b'op { type: "Sigmiod" input: "x" output: "y" }',
        "long": b'op { type: "' + b"x" * 100_000 + b'" output: "y" }',
    }
    for name, data in contents.items():
        for suffix in ("pb", "npy", "npz", "toml", "csv", "onnx"):
            (folder / f"{name}.{suffix}").write_bytes(data)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)}
    )
    (folder / "bomb.npy").write_bytes(header.getvalue())
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)


def bad_calls() -> Iterator[list[str]]:
    broken = [
        "empty",
        "zeros",
        "noise",
        "text",
        "deep",
        "utf16",
        "nul",
        "twice",
        "huge",
        "cycle",
        "unknown",
        "long",
        "escapes",
    ]
    odd = [
        "nope.pb",
        "folder",
        "pipe.pb",
        "",
        "\x1b[2J.pb",
        "x" * 300,
        "x" * 5000,
        "a\0b",
        "/dev/null",
        "\udc80.pb",
        ".",
    ]
    nets = [f"{name}.pb" for name in broken] + odd
    for net in nets:
        yield ["run", net, "--feed", "q=1"]
        yield ["check", net]
        yield ["convert", net, "out.py"]
        yield ["convert", net, "/nonexist/out.pb"]
        yield ["run", "net.pbtxt", "--init", net]
    for net in odd:
        yield ["show", net]
    numbers = ["-1", "1e9", "x", "", "100000000000000000000", "1.5", "nan", " ", "\x1b[1m"]
    for value in numbers:
        yield ["run", "net.pbtxt", *FEEDS, "--seed", value]
        yield ["run", "net.pbtxt", *FEEDS, "--max-iterations", value]
        yield ["check", "net.pbtxt", *FEEDS, "--elements", value]
        yield ["sample", "run", "--length", value]
        yield ["train", "good.toml", "--devices", value]
        yield ["bench", "--turns", value]
        for key in ("seed", "train.steps", "data.batch", "model.hidden", "train.keep"):
            yield ["train", "good.toml", "--set", f"{key}={value}"]
    for value in ("inf", "nan", "-1.0", "true", "[1]", "{}", "'x'", "1e400"):
        for key in (
            "optimizer.learning_rate",
            "optimizer.clip",
            "train.loss_limit",
            "data.validation",
            "optimizer.ema",
        ):
            if (key, value) not in {("train.loss_limit", "true")}:
                yield ["train", "good.toml", "--set", f"{key}={value}"]
    feeds = [
        "x", "=1", "x=", "x=normal[,]", "x=normal[1000000,1000000]", "x=normal[-1]", "x=" + "[" * 100_000, "x=3000000000",
        "x=[1,[2]]", "x={}", 'x="a"', "x=null", "x=1e39", "x=[99999999999999999999]", "x=bomb.npy", "x=objects.npy",
        "x=empty.npy", "x=noise.npy", "x=nope.npy", "x=folder.npy", "x=normal[" + "1," * 99 + "1]", "x=[NaN, 1e40]",
        "\x1b[1m=",
    ]  # fmt: skip
    for feed in feeds:
        yield ["run", "net.pbtxt", "--feed", feed]
        yield ["convert", "net.pbtxt", "o.py", "--feed", feed]
    for out in ("/nonexist/o.py", "/dev/full", "folder", "", "a\0b.py", "x" * 300 + ".py"):
        yield ["convert", "net.pbtxt", out, *FEEDS]
        yield ["show", "net.pbtxt", "--out", out]
        yield ["show", "net.pbtxt", "--out", out]
        yield ["check", "net.pbtxt", *FEEDS, "--out", out]
    for config in [f"{name}.toml" for name in ("zeros", "noise", "text", "deep", "utf16")] + [
        "ts.tml",
        "folder",
        "",
        "\x1b[1m",
    ]:
        yield ["train", config]
        yield ["check", config]
    for name in ("empty", "zeros", "noise", "utf16", "bomb"):
        yield [
            "train",
            "good.toml",
            "--set",
            "task=classification",
            "--set",
            f"data.path={name}.npz",
        ]
        changes = [
            "--set",
            "task=forecast",
            "--set",
            f"data.path={name}.csv",
            "--set",
            "data.targets=['a']",
        ]
        yield ["train", "good.toml", *changes]
    for task in (
        "own.py:Kind",
        "own.py:Missing",
        "nope.py:T",
        "own.py:",
        ":",
        "json:loads",
        "no.module:x",
    ):
        yield ["train", "good.toml", "--set", f"task={task}"]
        yield ["convert", task, "out"]
        yield ["check", task]
    for value in ("2147483647", "256", "-1", "x", "1" * 5000):
        yield ["tokens", "text.txt", "--out", "c", "--vocabulary", value]
    for value in ("\udc80", ""):
        yield ["tokens", "text.txt", "--out", "c", "--separator", value]
    for out in (
        "",
        "text.txt",
        "pipe.pb",
        "/dev/null",
        "/dev/null/c",
        "a\0b",
        "x" * 300,
        "x" * 5000,
    ):
        yield ["tokens", "text.txt", "--out", out]
    for text in odd:
        yield ["tokens", text, "--out", "c"]
        yield ["tokens", "text.txt", "--out", "c", "--tokenizer", text or "nothing"]
    for prompt in ("1099511627776", "-1", "1.5", "x", "9" * 5000, "", "1 2 ²"):
        yield ["sample", "model", "--prompt", prompt]
    for name in odd:
        yield ["train", "good.toml", "--set", "task=tokens", "--set", f"data.path={name}"]
        yield [
            "train",
            "good.toml",
            "--set",
            "model.kind=pretrained",
            "--set",
            f"model.pretrained={name}",
        ]
        yield ["runs", name if name not in ("", ".") else "nope"]
    for task in ("own.py:raises", "raises.py:X", "sub/sibling.py:X"):
        yield ["train", "good.toml", "--set", f"task={task}"]
    for run in ("run", "folder", "nope", "good.toml", "\x1b[1m"):
        yield ["sample", run]
        yield ["plot", run]
        yield ["export", f"{run}/", "out.pb"]
        yield ["train", run, "--resume", "--set", "nothing=1"]
    yield from (
        ["ops", "nosuchoperator"],
        ["bench", "--sizes", "x"],
        ["bench", "--suite", "graph", "--cells", "x"],
        ["nosuch"],
    )
    yield from (
        ["train", "good.toml", "--process", "0"],
        ["bench", "--compile-for", "abacus"],
        ["run"],
        ["--x"],
    )


def call(argv: list[str]) -> str:
    """What is wrong with how the command line answers; "" if nothing is."""
    from jrnn.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as e:  # of argparse
            status = e.code
        except BaseException as e:
            return f"raw {type(e).__name__}: {str(e)[:200]}"
    said = err.getvalue()
    if CONTROL.search(out.getvalue() + said):
        return "control characters"
    lines = [line for line in said.splitlines() if ": error: " in line]
    if status != 2 or len(lines) != 1 or "Traceback" in said:
        return f"status {status}: {said[-300:]!r}"
    return ""


# ---- Names and memory ----


def names(count: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names that are code; and `count` more of random characters of Python's, DOT's and HTML's syntax."""
    import test_names_run_no_code as names_tests

    rng = random.Random(attack_files.SEED)
    more = [
        {
            f: "".join(rng.choices("\"'\\\n\r{}[]();:#$%&<>=-,.*@!|` \0\tax0_é\x1b\u2028", k=20))
            + f
            for f in names_tests.FIELDS
        }
        for _ in range(count)
    ]
    for k, case in enumerate([*names_tests.CASES, *more]):
        for kind, source in (
            ("net", names_tests.source),
            ("ONNX model", names_tests.source_of_onnx),
        ):

            def compared(case=case, source=source) -> str:
                wanted = source({f: names_tests.harmless(n) for f, n in case.items()})
                same = names_tests.structure(source(case)) == names_tests.structure(wanted)
                return "" if same else "another program"

            yield f"{kind}, case {k}", compared


def memory(count: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Operators that ask for more than there is; and `count` more times with other huge numbers in their places."""
    import jax
    import test_memory

    import jrnn

    rng = random.Random(attack_files.SEED)

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(other, value))
        if isinstance(value, np.ndarray):
            return np.array([other(x) for x in value.flat], value.dtype).reshape(value.shape)
        most = np.iinfo(value.dtype).max if isinstance(value, np.integer) else 2**63 - 1
        factor = rng.randrange(1, 1 << 20)
        return (
            value
            if value < 1 << 19
            else value * factor
            if isinstance(value, float)
            else min(int(value) * factor, most)
        )

    once = list(test_memory.CASES.items())
    more = [once[k % len(once)] for k in range(count)]
    for type, (inputs, args) in [
        *once,
        *(
            (t, ([other(x) for x in inputs], {n: other(v) for n, v in args.items()}))
            for t, (inputs, args) in more
        ),
    ]:

        def refused(type=type, inputs=inputs, args=args) -> str:
            blobs = {f"in{k}": x for k, x in enumerate(inputs)}
            try:
                jrnn.run_net(
                    jrnn.Net("n", (jrnn.nets.Op.of(type, list(blobs), ["y"], **args),)),
                    blobs,
                    key=jax.random.key(0),
                )
            except jrnn.errors.JrnnError:
                return ""
            return "it ran"

        yield type, refused


# ---- Workers: a process runs the attacks one by one, so that one that ends the process is counted ----


def cases(kind: str, is_long: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    if kind == "calls":
        return ((repr(argv)[:150], lambda argv=argv: call(argv)) for argv in bad_calls())
    if kind in FILES:
        attacks, few, many = FILES[kind]
        return attacks(many if is_long else few)
    return {"names": names, "memory": memory}[kind](100 if is_long else 0)


def work(kind: str, first: int, is_long: bool) -> None:
    protocol = os.fdopen(os.dup(1), "w")
    for number, (name, attack) in enumerate(cases(kind, is_long)):
        if number >= first:
            print(json.dumps([number, name, None]), file=protocol, flush=True)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the process even if it hangs
            print(json.dumps([number, name, attack()]), file=protocol, flush=True)
            signal.setitimer(signal.ITIMER_REAL, 0)


def watch(kind: str, is_long: bool, failures: list[str]) -> int:
    """Runs all attacks of a kind, and returns how many."""
    first = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        files(Path(folder))
        while True:
            worker = subprocess.Popen(
                [sys.executable, __file__, "--worker", kind, "--first", str(first), *(["--long"] if is_long else [])],
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip
            assert worker.stdout is not None
            pending = None
            for line in worker.stdout:
                if not line.startswith("["):
                    continue
                number, name, wrong = json.loads(line)
                pending = (number, name) if wrong is None else None
                if wrong is not None:
                    tried += 1
                    failures += [f"{kind}: {name}: {wrong}"] if wrong else []
            _, said = worker.communicate()
            if pending is None and worker.returncode == 0:
                break
            if pending is None:
                failures.append(f"{kind}: the worker ended: {said[-300:]}")
                break
            failures.append(f"{kind}: {pending[1]}: ended the process with {worker.returncode}")
            tried, first = tried + 1, pending[0] + 1
        if (Path(folder) / "pwned").exists():
            failures.append(f"{kind}: code ran")
    return tried


def readers(count: int, failures: list[str]) -> int:
    import fuzz

    command = [sys.executable, fuzz.__file__, "--cases", str(count * len(fuzz.READERS))]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if ran.returncode:
        failures.append(f"readers: {ran.stdout[-2000:]}{ran.stderr[-500:]}")
    return count * len(fuzz.READERS)


# ---- Ctrl-C ----

INTERRUPTED = {
    "train": ["train", "good.toml", "--set", "train.steps=40", "--out", "runs/r"],
    "convert": ["convert", "net.pbtxt", "out/o.py", *FEEDS],
    "bench": [
        "bench",
        "--cells",
        "lstm",
        "--sizes",
        "8x2x4x4",
        "--turns",
        "1",
        "--json",
        "out/b.json",
    ],
    "check": ["check", "net.pbtxt", *FEEDS, "--out", "out/c.html"],
}


def interrupted(name: str, after: float | None) -> tuple[float, str | None]:
    """Runs a command, and interrupts it after so many seconds.

    Returns:
        How many seconds it ran, and what is wrong: "" if nothing is, None if Python had not yet begun to run jrnn.
    """
    with tempfile.TemporaryDirectory() as folder:
        files(Path(folder))
        (Path(folder) / "out").mkdir()
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "jrnn", *INTERRUPTED[name]],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return time.monotonic() - begun, "did not end"
        seconds = time.monotonic() - begun
        halves = [p.name for p in Path(folder).rglob("*") if p.suffix in (".part", ".tmp")]
    lines = [line for line in said.splitlines() if not line.startswith("WARNING")]
    if "Traceback" in said and str(ROOT / "jrnn") not in said:
        return seconds, None
    is_right = (process.returncode, len(lines)) in ((130, 1), (0, 0))
    return (
        seconds,
        "" if is_right and not halves else f"{process.returncode} {said[-400:]!r} {halves}",
    )


def interrupts(count: int, failures: list[str]) -> int:
    """Interrupts each command so many times; the commands run in parallel."""

    def of(name: str) -> list[str]:
        rng = random.Random(name)
        whole, wrong = interrupted(name, None)
        failures = [f"interrupts: {name}, not interrupted: {wrong}"] if wrong else []
        left = count
        while left:
            after = rng.uniform(0.05, 1.0) * whole
            _, wrong = interrupted(name, after)
            left -= wrong is not None
            failures += (
                [f"interrupts: {name} after {after:.1f} s of {whole:.1f}: {wrong}"] if wrong else []
            )
        return failures

    with ThreadPoolExecutor(min(len(INTERRUPTED), os.cpu_count() or 1)) as pool:
        for failed in pool.map(of, INTERRUPTED):
            failures += failed
    return count * len(INTERRUPTED)


def main() -> int:
    kinds = ("calls", "names", "memory", *FILES)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--long", action="store_true", help="hundreds of each kind, 50 interrupts of each command"
    )
    parser.add_argument("--only", action="append", choices=(*kinds, "readers", "interrupts"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.first, args.long)
        return 0
    attacks: dict[str, Callable[[list[str]], int]] = {
        **{kind: (lambda failures, kind=kind: watch(kind, args.long, failures)) for kind in kinds},
        "readers": lambda failures: readers(1_000 if args.long else 100, failures),
        "interrupts": lambda failures: interrupts(50 if args.long else 2, failures),
    }
    print("| attack | tried | held |\n|---|---|---|")
    failures: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each attack is a process of its own
        by_attack: dict[str, list[str]] = {
            name: [] for name in attacks if args.only is None or name in args.only
        }
        tried = {name: pool.submit(attacks[name], by_attack[name]) for name in by_attack}
        for name, count in tried.items():
            print(
                f"| {name} | {count.result()} | {count.result() - len(by_attack[name])} |",
                flush=True,
            )
            failures += by_attack[name]
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
