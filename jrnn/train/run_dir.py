"""A run's directory: its resolved config, where it came from, its metrics and checkpoints, and the lock that protects them.

config.toml    the resolved configuration, from which the run can be done again
run.json       seed, versions, machine, git state, and when it was started
data.json      what the task keeps of its data: a vocabulary, a scaling, a checksum
metrics.jsonl  one JSON object a line
checkpoints/   one folder a step
best/          the parameters that were validated best, where train.patience asks for them
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jrnn.errors import CheckpointError, ConfigError, DataError
from jrnn.named import from_the_root
from jrnn.train.config import Config, load_config
from jrnn.train.optimizers import follows_the_run
from jrnn.train.tasks import Task
from jrnn.train.toml_codec import encode, parse_json

PATHS = {"data": ("path",), "model": ("net", "init_net")}  # the keys, by table, that name files


class RunDir:
    """The files of one run; `with run:` holds the lock, so that no second process trains in the same directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Where the parameters that were validated best are, in a run with train.patience."""
        return self.path / "best"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def __enter__(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise ConfigError(f"{self.path}: cannot hold a run: {e.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the system when the process ends
            held = os.pread(self._lock, 32, 0)
            os.pwrite(self._lock, f"pid {os.getpid()}".ljust(len(held)).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"{self.path}: another process ({holder or 'unknown'}) is training in this directory; wait for it, or give "
                "another directory with --out"
            ) from None
        except OSError as e:
            os.close(self._lock)
            raise ConfigError(f"{self.path / 'lock'}: cannot be written: {e.strerror}") from None
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_begun(self) -> bool:
        """Whether its configuration was written: before that, nothing of a run is there."""
        return (self.path / "config.toml").exists()

    def has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and any(p.name.isdigit() for p in self.checkpoints.iterdir())

    def load_config(self) -> Config:
        """The run's configuration; CheckpointError where the directory holds no run."""
        if not self.is_begun():
            why = "it has no config.toml" if self.path.exists() else "there is no such folder"
            raise CheckpointError(f"{self.path}: is not a run directory: {why}")
        return load_config(self.path / "config.toml")

    def check_continues(self, config: Config, task: Task) -> None:
        """Raises where the run was of another model or of other data than the one that is to be continued."""
        before, config = self.load_config(), _resolved(config)
        for name in ("task", "seed"):
            self._check_same(name, getattr(before, name), getattr(config, name))
        for table in ("model", "data"):
            old, new = vars(getattr(before, table)), vars(getattr(config, table))
            for key in dict.fromkeys([*old, *new]):
                if table == "model" or key not in ("source", *PATHS["data"]):  # data may move: the fingerprint tells
                    self._check_same(f"{table}.{key}", old.get(key), new.get(key))
        length, now = before.optimizer.schedule_steps or before.train.steps, config.train.steps
        if length != now and follows_the_run(config.optimizer):
            raise ConfigError(
                f"{self.path}: its learning rate follows the schedule {config.optimizer.schedule!r} over {length} steps, "
                f"and train.steps is {now} now; add --set optimizer.schedule_steps={length} to keep it as it is, or "
                f"--set optimizer.schedule_steps={now} to stretch or shorten it to the run's length"
            )
        if self.load_fingerprint() != _as_json(task.fingerprint()):
            raise DataError(f"{self.path}: the data have changed since this run began; start a new one")

    def _check_same(self, name: str, old: Any, new: Any) -> None:
        if old != new:
            raise CheckpointError(f"{self.path}: is another run: {name} is {old!r} there, and {new!r} here")

    def load_fingerprint(self) -> dict[str, Any]:
        """What the task kept of its data: see `Task.fingerprint`."""
        path = self.path / "data.json"
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; the run directory is not complete") from None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: is damaged; it must hold a JSON object")
        return found

    def write(self, config: Config, task: Task) -> None:
        """Writes what is known before the first step: with it, the run can be done again from any working directory."""
        config = _resolved(config)
        self._write_text("data.json", json.dumps(task.fingerprint(), ensure_ascii=False) + "\n")
        self._write_text("run.json", json.dumps({"seed": config.seed, **provenance()}, indent=2) + "\n")
        self._write_text("config.toml", encode(config))

    def _write_text(self, name: str, text: str) -> None:
        aside = self.path / (name + ".tmp")
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.path / name)  # atomic: a reader finds the old file or the new one
        except OSError as e:
            raise ConfigError(f"{self.path / name}: cannot be written: {e.strerror}") from None


def _resolved(config: Config) -> Config:
    """A configuration whose files are named from the root, not from the working directory."""
    tables = {}
    for table, keys in PATHS.items():
        found = getattr(config, table)
        named = {key: value for key in keys if isinstance(value := getattr(found, key, None), str)}
        tables[table] = replace(found, **{key: str(Path(value).absolute()) for key, value in named.items()})
    if isinstance(kind := getattr(tables["model"], "kind", None), str) and ":" in kind:
        tables["model"] = replace(tables["model"], kind=from_the_root(kind))
    named = replace(config.train, metrics=[from_the_root(name) for name in config.train.metrics])
    return replace(config, task=from_the_root(config.task), train=named, **tables)


def _as_json(value: Any) -> Any:
    """A value as it is after being written and read."""
    return json.loads(json.dumps(value))


def provenance() -> dict[str, Any]:
    """Where a result comes from: versions, devices, command, and the state of the repository it was run in."""
    packages = ("jrnn", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "devices": [str(d) for d in jax.devices()],
        "processes": jax.process_count(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """The commit of the source tree and whether it was changed since; None outside a repository."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True, timeout=20).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": git("status", "--porcelain").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None


def first_free(folder: Path, name: str) -> Path:
    """`folder/name`, or with -2, -3, ... after it where that exists."""
    found, number = folder / name, 1
    while found.exists():
        number += 1
        found = folder / f"{name}-{number}"
    return found
