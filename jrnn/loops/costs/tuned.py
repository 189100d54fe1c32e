"""Plans that were chosen by measurement: which loop takes which way, kept in a file that later runs read.

`jrnn.tune` (bench/tuning.py) measures and writes. A loop has a key: its structure, its shapes, its options, the device, and
the versions. So an entry holds for the loop that was measured, and others are never found. The file is the one
that the environment variable JRNN_PLANS names, or that of a context `using`, such as a run directory's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.files import kind_of, read_json, read_text, record, write_whole
from jrnn.loops.costs.candidates import REFERENCE
from jrnn.loops.loop import Options
from jrnn.loops.loop.recorder import Collected as Questions
from jrnn.version import __version__

VARIABLE = "JRNN_PLANS"
NOTE = "chosen by measurement: "  # before the way, in the notes of a plan
_ADDRESS = r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}"


@dataclass(frozen=True)
class Table:
    """What was chosen: a way by the key of a loop. Equal tables are the same to JAX's caches."""

    taken: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(taken: Mapping[str, str]) -> Table:
        return Table(tuple(sorted(taken.items())))

    @staticmethod
    def read(path: Path) -> Table:
        """Returns the table of a file; raises ScanError as `read` does."""
        return Table.of({key: entry["take"] for key, entry in read(path).items()})

    @functools.cached_property
    def ways(self) -> dict[str, str]:
        return dict(self.taken)


@dataclass(frozen=True)
class Question:
    """A loop for which a way has to be chosen.

    Attributes:
        key: see the module.
        params: those of its equation.
        avals: the types of the equation's arguments.
        options: the mark.
        moves: which arguments have tangents, where the loop is about to be differentiated; () where it is lowered.
        ways: all that there are, the untuned choice first.
        title: what to call it.
        held: bytes that exist besides its temporary arrays, and bytes that `jax.lax.scan` would hold besides these.
    """

    key: str
    params: Mapping[str, Any] = field(compare=False, repr=False)
    avals: tuple[Any, ...] = field(compare=False, repr=False)
    options: Options = field(compare=False, repr=False)
    moves: tuple[bool, ...] = field(default=(), compare=False)
    ways: tuple[str, ...] = field(default=(), compare=False)
    title: str = field(default="", compare=False)
    held: tuple[int, int] = field(default=(0, 0), compare=False)


# The table in use, or None for that of the environment. It is a part of the keys of JAX's caches.
_table = jax.make_user_context(None)
# The list that collects the questions of what is lowered, or None.
_asked = jax.make_user_context(None)


def using(table: Table) -> AbstractContextManager[None]:
    """Chooses by a table in this context."""
    return _table(table)


def use(table: Table) -> None:
    """Chooses by a table in this process from now on."""
    _table.set_global(table)


def collecting(questions: Questions) -> AbstractContextManager[None]:
    """Collects the questions that are asked in this context."""
    return _asked(questions)


def taken(key: Callable[[], str]) -> str | None:
    """Returns the way that was chosen for a loop, or None. The key is computed only if it is needed."""
    table = current()
    return table.ways.get(key()) if table.taken else None


def current() -> Table:
    """Returns the table in use."""
    if _table.value is not None:
        return _table.value
    path = os.environ.get(VARIABLE)
    return _of_environment(path) if path else Table()


def is_asked() -> bool:
    """Returns True where questions are collected."""
    return _asked.value is not None


def ask(question: Question) -> None:
    """Adds a question, unless it was asked before."""
    if _asked.value is not None and question not in _asked.value:
        _asked.value.append(question)


def unrolled(way: str, steps: int) -> str:
    """Returns a way with several steps a trip of the loop.

    >>> unrolled("lax.scan", 4), parted("lax.scan, 4 steps a trip"), parted("lax.scan")
    ('lax.scan, 4 steps a trip', ('lax.scan', 4), ('lax.scan', 1))
    """
    return f"{parted(way)[0]}, {steps} steps a trip"


def runs_steps(way: str) -> bool:
    """Returns True for a way that goes around a loop of steps."""
    return way == REFERENCE or way.endswith("steps")


def parted(way: str) -> tuple[str, int]:
    """Returns a way without the number of steps a trip, and that number."""
    parts = re.fullmatch(r"(.*), (\d+) steps a trip", way)
    return (parts[1], int(parts[2])) if parts else (way, 1)


# Files ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _of_environment(path: str) -> Table:
    """Returns the table of a file. It is read once in a process, so that one program does not change while it runs."""
    try:
        return Table.read(Path(path))
    except ScanError as error:
        warnings.warn(f"{error}; loops are planned without it", stacklevel=2)
        return Table()


@dataclass(frozen=True)
class _File:
    """A file of plans."""

    format: Literal[1]
    plans: dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    """What must be in an entry."""

    take: str


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of a file.

    Raises:
        ScanError: if it cannot be read, or is not such a file.
    """
    try:
        plans = record(_File, read_json(path, ScanError), str(path), ScanError).plans
        for key, entry in plans.items():
            record(_Entry, entry, f"{path}: {key}", ScanError)
    except ScanError as error:
        raise ScanError(f"{error}; jrnn.tune writes a file of plans") from None
    return plans


def write(path: Path, entries: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Changes entries of a file; those of other loops stay in it. It is written completely or not at all.

    Args:
        path: the file.
        entries: what was chosen, by key; None removes an entry.

    Raises:
        ScanError: if the file cannot be written, or is there and is no file of plans.
    """
    before = read(path) if kind_of(path) else {}
    plans = {key: dict(entry) for key, entry in sorted({**before, **entries}.items()) if entry is not None}
    if kind_of(path) and plans == before:
        return
    data = {"format": 1, "plans": plans}
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode(), ScanError)


# Keys -----------------------------------------------------------------------------------------------------------------


def key_of(kind: str, params: Mapping[str, Any], avals: Sequence[Any], options: Options, device: str) -> str:
    """Returns the key of a loop, which is the same in every process.

    Args:
        kind: what is chosen.
        params: those of the equation of the loop.
        avals: the types of its arguments.
        options: the mark.
        device: names the platform, the kind of the devices and their number.
    """
    about = {name: value for name, value in options._asdict().items() if name not in ("strict", "verify")}
    counts = [params[name] for name in ("length", "reverse", "unroll")]
    types = [(str(a.shape), str(a.dtype)) for a in avals]
    text = repr([kind, device, versions(), about, jaxprs.scan_counts(params), counts, types])
    return hashlib.sha256((text + _structure(params["jaxpr"])).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=512)
def _structure(jaxpr: Any) -> str:
    return "\n".join(_lines(jaxprs.jaxpr_of(jaxpr)))


def _lines(jaxpr: Any) -> Iterator[str]:
    """Yields the equations of a jaxpr with numbered variables, without names and addresses of functions."""
    numbers: dict[Any, int] = {}

    def named(atom: Any) -> str:
        if jaxprs.is_literal(atom):
            return f"{atom.val!r}:{atom.aval.str_short()}"
        return f"%{numbers.setdefault(atom, len(numbers))}:{atom.aval.str_short()}"

    yield " ".join(map(named, (*jaxpr.constvars, *jaxpr.invars)))
    for eqn in jaxpr.eqns:
        outs, given = (" ".join(map(named, atoms)) for atoms in (eqn.outvars, eqn.invars))
        values = [f"{name}={_param(value)}" for name, value in sorted(eqn.params.items())]
        yield f"{outs} = {eqn.primitive.name} {given} {' '.join(values)}"
    yield " ".join(map(named, jaxpr.outvars))


def _param(value: Any) -> str:
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
        return "{" + "\n".join(_lines(jaxprs.jaxpr_of(value))) + "}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_param, value))})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{value.shape}"
    return type(value).__name__ if callable(value) else re.sub(_ADDRESS, "", repr(value))


def versions() -> tuple[str, str]:
    """Returns the versions of JAX and jrnn."""
    return jax.__version__, __version__


def device(platform: str, kind: str) -> str:
    """Names a device: its platform and its kind; of a CPU the model, and the number of cores that this process may use."""
    return f"{processor()}, {cores()} cores" if platform == "cpu" else f"{platform} {kind}"


def cores() -> int:
    """Returns the number of the processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """Returns the model of this machine's processor."""
    try:
        lines = read_text("/proc/cpuinfo", ScanError).splitlines()
    except ScanError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
