"""`jrnn doctor`: what is installed, which devices JAX sees, what is missing, and how to install it."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jrnn.version import __version__

HERE = Path(__file__).parent
BESIDE = {"torch": "reads .pt files: pip install torch"}  # what is used where it is there, and is no extra


@dataclass(frozen=True)
class Package:
    """A package that jrnn uses: the version that is wanted at least, and the one that is there, or None.

    extra: the extra of jrnn that brings it; "" where jrnn needs it.
    """

    name: str
    wanted: str
    installed: str | None
    extra: str

    @property
    def is_well(self) -> bool:
        return self.installed is not None and _release(self.installed) >= _release(self.wanted)

    @property
    def remedy(self) -> str:
        """How to get it; "" where it is well."""
        if self.is_well:
            return ""
        if self.extra:
            return f"for the extra {self.extra!r}: pip install 'jrnn[{self.extra}]'"
        return f"jrnn needs it: pip install '{self.name}>={self.wanted}'"


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with.

    >>> _release("0.11.2rc1"), _release("3")
    ((0, 11, 2), (3,))
    """
    return tuple(int(n) for n in re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version or "0").groups() if n)  # type: ignore[union-attr]


def _requirements() -> list[tuple[str, str, str]]:
    """(package, least version, extra or "") that jrnn asks for, by pyproject.toml in a source tree, else by its metadata."""
    source = HERE.parent / "pyproject.toml"
    if source.exists():
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].items()
        lines = [*project["dependencies"], *(f'{line}; extra == "{e}"' for e, more in extras for line in more)]
    else:
        lines = importlib.metadata.requires("jrnn") or []
    found: list[tuple[str, str, str]] = []
    for line in lines:  # extras of the repository gather others, and some ask for an extra of what jrnn needs anyway
        name, wanted, extra = re.match(
            r"([\w.-]+)(?:\[.*\])?(?:>=([\w.]+))?(?:.*extra == ['\"]([\w-]+)['\"])?", line
        ).groups()  # type: ignore[union-attr]
        if name != "jrnn" and extra not in ("test", "dev") and name not in [known for known, *_ in found]:
            found.append((name, wanted or "0", extra or ""))
    return found


def packages() -> list[Package]:
    """What jrnn uses, what it needs first."""
    return [Package(name, wanted, _installed(name), extra) for name, wanted, extra in _requirements()]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """A line for each device, for a computation on it, and for what JAX does not use."""
    lines = []
    for device in jax.devices():
        held = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {held / 2**30:.0f} GiB" if held else ""
        lines.append(f"{device.platform}:{device.id}  {device.device_kind}{memory}")
    begun = time.perf_counter()
    total = float(jax.jit(lambda x: jax.lax.scan(lambda c, x: (c + x, None), 0.0, x)[0])(jax.numpy.ones(8)))
    seconds = time.perf_counter() - begun
    lines.append(f"a loop compiles and runs in {seconds:.2f} s" if total == 8 else f"a sum of 8 ones is {total}: WRONG")
    if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
        lines.append("an NVIDIA GPU seems to be there, which JAX does not use: pip install 'jax[cuda13]'")
    return lines


def examine(out: Any = None) -> bool:
    """Prints what was found; returns whether jrnn can work.

    Args:
        out: the file to print to; the standard output by default.
    """
    found = packages()
    needed, optional = ([p for p in found if bool(p.extra) == is_extra] for is_extra in (False, True))

    def section(title: str, lines: Iterable[str]) -> None:
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines), file=out)

    python = f"Python {platform.python_version()}, {sys.executable}"
    section(f"jrnn {__version__}", [str(HERE), python, f"{platform.platform()}, {os.cpu_count()} processors"])
    section("packages that jrnn needs", _rows(needed))
    section("packages of extras", _rows(optional))
    section(
        "packages used where they are there", (f"{n}  {_installed(n) or 'absent'}  {use}" for n, use in BESIDE.items())
    )
    section("devices", _devices())
    missing = [p for p in found if p.remedy]
    section("missing" if missing else "nothing is missing", (f"{p.name}: {p.remedy}" for p in missing))
    return all(p.is_well for p in needed)


def _rows(found: list[Package]) -> list[str]:
    width = max((len(p.name) for p in found), default=0)
    return [
        f"{p.name:{width}}  {p.installed or 'absent':10} (>= {p.wanted}){f'  {p.extra}' if p.extra else ''}"
        for p in found
    ]
