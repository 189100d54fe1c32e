"""The attacks of scripts/attack.py by faults: full disks, and SIGKILL at random moments, while files are written.

What is left must be the old or the new, and the same call must end what was begun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from attack_files import SEED, Attack, corpus, model, run


def _children(act: Callable[[Path], Any], fault: Callable[[int], None], folder: Path) -> int:
    """Runs `act` in a process of its own, of which `fault` gets the number, and returns how it ended."""
    pid = os.fork()
    if not pid:
        status = 1
        signal.alarm(60)  # ends a process that hangs
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


STEPS = 4000  # of a training that is killed
LIMIT = [0]  # bytes that a file may have, as on a disk that is full


def limit(pid: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT[0], LIMIT[0]))


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for those that are under way."""
    paths = (
        p
        for p in folder.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.parts)
    )
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


@functools.cache
def writers() -> dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]:
    """By name, what writes the old contents of a folder, and what writes the new ones."""
    import jrnn
    from jrnn.files.corpus import tokenize
    from jrnn.models import save_state
    from jrnn.nets.ir import Net
    from jrnn.train import load_run

    loaded = jrnn.models.load(model())
    old, new = ({n: np.asarray(p) + k for n, p in loaded.params.items()} for k in (0, 1))
    trained = load_run(run())
    before = replace(trained.package(), shapes={}, predict_net=Net("before"))
    words, given = Path("words.txt").absolute(), (corpus() / "tokenizer.json").absolute()
    return {
        "save": (
            lambda d: replace(loaded, params=old).save(d),
            lambda d: replace(loaded, params=new).save(d),
        ),
        "save in parts": (
            lambda d: replace(loaded, params=old).save(d, shard_bytes=500),
            lambda d: replace(loaded, params=new).save(d, shard_bytes=900),
        ),
        "save_state": (
            lambda d: (d.mkdir(exist_ok=True), save_state(d / "s.safetensors", old)),
            lambda d: save_state(d / "s.safetensors", new),
        ),
        "convert": (lambda d: before.save(d), trained.save),
        "tokens": (
            lambda d: d.mkdir(),
            lambda d: tokenize([words], d, tokenizer=given, separator="\n"),
        ),
    }


def _complete(name: str, folder: Path) -> dict[str, bytes]:
    """What of a folder counts: of a corpus that is not finished, nothing."""
    contents = tree(folder)
    if name == "tokens":
        return contents if "corpus.json" in contents else {}
    return contents


def _faulty(name: str, fault: Callable[[int], None]) -> str:
    write_old, write_new = writers()[name]
    with tempfile.TemporaryDirectory() as base:
        folders = [Path(base) / k for k in ("new", "out")]
        write_old(folders[0])
        write_new(folders[0])
        write_old(folders[1])
        old, new = _complete(name, folders[1]), _complete(name, folders[0])
        status = _children(write_new, fault, folders[1])
        contents = _complete(name, folders[1])
        if contents not in (old, new) or (status == 0 and contents != new):
            wrong = [
                k
                for k in {*contents, *old, *new}
                if contents.get(k) not in (old.get(k), new.get(k))
            ]
            return f"ended with {status}: a mixture of {sorted(contents)}, {wrong}"
        write_new(folders[1])
        if left := [p.name for p in Path(base).rglob(".*.part")]:
            return f"the same call leaves {left}"
        return (
            ""
            if _complete(name, folders[1]) == new
            else "the same call does not end what was begun"
        )


def full(count: int) -> Iterator[Attack]:
    """Files that may not grow beyond some bytes, as on a disk that is full."""
    rng = random.Random(SEED)

    def at(name: str, size: int) -> str:
        LIMIT[0] = size
        return _faulty(name, limit)

    for k in range(count):
        name, size = (
            list(writers())[k % len(writers())],
            rng.choice([0, rng.randrange(300), rng.randrange(12_000)]),
        )
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


def trainings(count: int) -> Iterator[Attack]:
    """SIGKILL at random moments of one run, which goes on after each; it ends with the numbers of a run without kills."""
    from forks import Forks

    from jrnn.train.checkpoint import Checkpoints, broken_seal, steps_in

    rng, forks = random.Random(SEED), Forks(Path.cwd())
    changes = (
        f"train.steps={STEPS}",
        "train.steps_per_call=20",
        "train.checkpoint_every=20",
        "train.validate_every=1000",
    )
    words = [
        "train",
        "good.toml",
        "--no-sample",
        *(word for change in changes for word in ("--set", change)),
        "--out",
    ]

    def begin(*more: str) -> Any:
        return forks.start(*words, *more)

    def killed(share: float) -> str:
        fork, waits = begin("often", "--resume"), 4 * share
        time.sleep(waits)
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork.pid, signal.SIGKILL)
        fork.wait()
        folder = Path("often") / "checkpoints"
        wrong = [(step, broken_seal(folder / str(step))) for step in steps_in(folder)]
        return "; ".join(f"{step}: {why}" for step, why in wrong if why)

    weights: dict[str, dict[str, np.ndarray]] = {}

    def ended(name: str) -> str:
        fork = begin(name, "--resume", "--set", "train.checkpoint_every=1000").wait()
        if fork.status:
            return f"ended with {fork.status}: {fork.err[-300:]}"
        with Checkpoints(Path(name) / "checkpoints") as checkpoints:
            weights[name] = {
                k: np.asarray(v) for k, v in checkpoints._manager.restore(STEPS).items()
            }
        same = all(np.array_equal(weights["once"][k], v) for k, v in weights[name].items())
        return "" if same else "other numbers than a run that was not killed"

    yield "a run that is not killed", lambda: ended("once")
    for _ in range(count):
        share = rng.random()
        yield f"at {share:.3f}", lambda share=share: killed(share)
    yield "the end of the other", lambda: ended("often")
    forks.close()
