"""A run's directory: its resolved config, its origin, its metrics and checkpoints.

config.toml    the resolved configuration, from which the run can be repeated
run.json       seed, versions, machine, git state, and when it was started
data.json      what the task keeps of its data: a vocabulary, a scaling, a checksum
metrics.jsonl  one JSON object a line
checkpoints/   one folder a step
best/          with train.patience, the parameters of the best validation, and of those that were the best at the checkpoints
lock           held by the process that trains
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict

from jrnn.convert.named import from_the_root
from jrnn.errors import CheckpointError, ConfigError, DataError, JrnnError, TrainError
from jrnn.files import checked, kind_of, read_json, write_whole
from jrnn.models.hub import folder_of
from jrnn.train.checkpoint import steps_in
from jrnn.train.config import Config, load_config
from jrnn.train.devices import ProcessLost
from jrnn.train.optimizers import follows_the_run
from jrnn.train.tasks import Task
from jrnn.train.tasks.task import COMPANIONS
from jrnn.train.toml_codec import Tables, encode

PATHS = {
    "data": ("path",),
    "model": ("net", "init_net", "pretrained"),
}  # the keys, by table, that name files


class RunDir:
    """The files of one run; `with run:` holds the lock, so that no second process trains in the same directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.metrics = self.path / "metrics.jsonl"
        self._lock = -1
        self._new: list[Path] = []  # folders that this object made, the innermost first
        self.is_running = False  # whether all processes have begun: the run can be resumed

    def __enter__(self) -> RunDir:
        try:
            # Surrogates stand for bytes that are not UTF-8; orbax cannot write such paths.
            str(self.path.resolve()).encode()
            folders = (self.path, *self.path.parents)
            self._new = [folder for folder in folders if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except UnicodeEncodeError:
            raise ConfigError(
                f"{self.path}: cannot hold a run: its path is not UTF-8; give another one with --out"
            ) from None
        except OSError as e:
            raise ConfigError(f"{self.path}: cannot hold a run: {e.strerror}") from None
        try:
            # The system frees the lock when the process ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.pread(self._lock, 32, 0)
            os.pwrite(self._lock, f"pid {os.getpid()}".ljust(len(held)).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.__exit__()
            raise ConfigError(
                f"{self.path}: another process ({holder or 'unknown'}) is training in this directory; wait for it, or give "
                "another directory with --out"
            ) from None
        except OSError as e:
            self.__exit__()
            raise ConfigError(f"{self.path / 'lock'}: cannot be written: {e.strerror}") from None
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the lock. A run that an error of its config or data prevented leaves no folder behind."""
        os.close(self._lock)
        if self._new and self._is_prevented(exc[1] if len(exc) > 1 else None):
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # others may have put something there meanwhile
                for folder in self._new[1:]:
                    folder.rmdir()

    def _is_prevented(self, error: object) -> bool:
        """Returns whether an error ended the run before anything was done that is worth keeping.

        The loss of another process says to resume the run, as do other errors of a run that has begun.
        """
        if not isinstance(error, JrnnError) or self.has_checkpoint():
            return False
        is_of_the_run = self.is_running or isinstance(error, ProcessLost)
        if self.is_begun() and isinstance(error, TrainError) and is_of_the_run:
            return False
        return kind_of(self.metrics) == "" or self.metrics.stat().st_size == 0

    def is_begun(self) -> bool:
        """Returns whether the configuration was written, which is the last file written before the first step."""
        return kind_of(self.path / "config.toml") != ""

    def has_checkpoint(self) -> bool:
        return bool(steps_in(self.checkpoints))

    def load_config(self) -> Config:
        """Returns the run's configuration; raises CheckpointError if the directory holds no run."""
        if not self.is_begun():
            why = "it has no config.toml" if self.path.exists() else "there is no such folder"
            raise CheckpointError(f"{self.path}: is not a run directory: {why}")
        path = self.path / "config.toml"
        if kind_of(path) == "a file" and not path.stat().st_size:
            raise CheckpointError(f"{path}: is empty; the run's configuration is lost")
        return load_config(path)

    def check_continues(self, config: Config, task: Task) -> None:
        """Raises CheckpointError, ConfigError or DataError if `config` cannot continue the run in this directory."""
        before = self.load_config()
        self._check_not_edited(before)
        old = _identity(before)
        new = _identity(_resolved(config))
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                raise CheckpointError(
                    f"{self.path}: is another run: {name} is {old.get(name)!r} there, and {new.get(name)!r} here; "
                    "leave the key as it is, or start a new run with another --out"
                )
        length = before.optimizer.schedule_steps or before.train.steps
        now = config.train.steps
        if length != now and follows_the_run(config.optimizer):
            raise ConfigError(
                f"{self.path}: its learning rate follows the schedule {config.optimizer.schedule!r} over {length} steps, "
                f"and train.steps is {now} now; add --set optimizer.schedule_steps={length} to keep it as it is, or "
                f"--set optimizer.schedule_steps={now} to stretch or shorten it to the run's length"
            )
        fingerprint = json.loads(json.dumps(task.fingerprint()))
        if self.load_fingerprint() | {COMPANIONS: None} != fingerprint | {COMPANIONS: None}:
            raise DataError(
                f"{self.path}: the data have changed since this run began; start a new one"
            )

    def _check_not_edited(self, config: Config) -> None:
        """Raises CheckpointError if config.toml was changed: the checkpoints belong to the config that the run wrote."""
        now = _tables(encode(config))
        kept = self._kept_configs()
        if kept and now not in map(_tables, kept):
            first = _tables(kept[0])
            changes = []
            for key in dict.fromkeys([*first, *now]):
                if first.get(key) != now.get(key):
                    changes.append(f"{key} was {first.get(key)!r:.80} and is {now.get(key)!r:.80}")
            raise CheckpointError(
                f"{self.path / 'config.toml'}: was changed after the run wrote it: {', '.join(changes)}; undo that, and "
                "continue with other values by --set, or start a new run"
            )

    def _kept_configs(self) -> list[str]:
        """Returns the configurations that the run wrote last, the newest first; none in runs of older versions."""
        try:
            configs = read_json(self.path / "run.json", CheckpointError).get("configs")
            return list(filter(_tables, checked(list[str], configs, "", CheckpointError)))
        except (ValueError, RecursionError):  # a CheckpointError, or no TOML
            return []

    def load_fingerprint(self) -> Tables:
        """Returns what the task kept of its data; see `Task.fingerprint`."""
        return read_json(self.path / "data.json", CheckpointError)

    def write(self, config: Config, task: Task) -> None:
        """Writes config, data and versions before the first step, so that the run can be repeated from any directory."""
        config = _resolved(config)
        self._write_text("data.json", json.dumps(task.fingerprint(), ensure_ascii=False) + "\n")
        text = encode(config)
        # Both, because the process may be killed before the new config.toml is there.
        configs = list(dict.fromkeys([text, *self._kept_configs()[:1]]))
        origin = {"seed": config.seed, **provenance(), "configs": configs}
        self._write_text("run.json", json.dumps(origin, indent=2) + "\n")
        self._write_text("config.toml", text)

    def _write_text(self, name: str, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as e:
            raise ConfigError(
                f"{self.path / name}: cannot hold {e.object[e.start]!r}, which is not UTF-8"
            ) from None
        write_whole(self.path / name, data, ConfigError)


def _tables(text: str) -> Tables:
    """Returns the keys and values of a configuration."""
    return flatten_dict(tomllib.loads(text), sep=".")


def _resolved(config: Config) -> Config:
    """Returns the configuration with absolute paths."""
    tables = {}
    for table, keys in PATHS.items():
        settings = getattr(config, table)
        paths = {}
        for key in keys:
            value = getattr(settings, key, None)
            if isinstance(value, str):
                folder = folder_of(value) if key == "pretrained" else Path(value)
                paths[key] = str(folder.absolute())
        tables[table] = replace(settings, **paths)
    if isinstance(kind := getattr(tables["model"], "kind", None), str) and ":" in kind:
        tables["model"] = replace(tables["model"], kind=from_the_root(kind))
    metrics = list(map(from_the_root, config.train.metrics))
    loggers = list(map(from_the_root, config.train.loggers))
    train = replace(config.train, metrics=metrics, loggers=loggers)
    return replace(config, task=from_the_root(config.task), train=train, **tables)


def _identity(config: Config) -> Tables:
    """Returns the keys that must not change between a run and its continuation, by name."""
    identity = {"task": config.task, "seed": config.seed}
    for key, value in vars(config.model).items():
        identity[f"model.{key}"] = value
    # The files of the data may move: the fingerprint says whether they have changed.
    moving = ("source", *PATHS["data"])
    for key, value in vars(config.data).items():
        if key not in moving:
            identity[f"data.{key}"] = value
    return identity


def provenance() -> Tables:
    """Returns where a result comes from: versions, devices, command, and the state of the repository."""
    packages = ("jrnn", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()} | {name: version_of(name) for name in packages}
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": versions,
        "devices": list(map(str, jax.devices())),
        "processes": jax.process_count(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_state(),
    }


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> Tables | None:
    """Returns the commit of the source tree and the changed files; None outside a repository."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", here, *args], capture_output=True, text=True, check=True, timeout=20
        ).stdout

    try:
        return {
            "commit": git("rev-parse", "HEAD").strip(),
            "changed": git("status", "--porcelain").splitlines(),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def first_free(folder: Path, name: str) -> Path:
    """Returns `folder/name`, or the first free one of `folder/name-2`, `folder/name-3`, ..."""
    path = folder / name
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path
