"""`jrnn doctor`: which packages are installed or missing, how to install them, and which devices JAX uses."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jrnn.errors import UsageError
from jrnn.files import read_text
from jrnn.loops.kernels.native import library
from jrnn.train.run_dir import version_of
from jrnn.version import __version__

HERE = Path(__file__).parents[1]
# Extras that no user misses.
FOR_CONTRIBUTORS = ("test", "dev", "docs", "release", "aot-cuda", "aot-tpu")
# Packages that jrnn uses if present, but no extra installs.
OPTIONAL = {"torch": "reads .pt files: pip install torch"}
# Releases with a fault that no code of jrnn avoids.
FAULTY = {
    ("jaxlib", "0.11.1"): "a loop that stacks its outputs takes quadratic time on CPUs (jax#40101)",
}
# What extras are for.
USES = {
    "plot": "pictures",
    "data": "the config digits",
    "onnx": "ONNX models",
    "tensorboard": "TensorBoard",
    "text": "tokenizers",
    "lmdb": "databases that Caffe2 wrote",
    "hub": "models of the Hugging Face hub",
    "wandb": "Weights & Biases",
    "trackio": "Trackio",
    "mlflow": "MLflow",
    "completion": "completion in a shell",
}


@dataclass(frozen=True)
class Installed:
    """A package that jrnn uses.

    Attributes:
        wanted: the lowest version that jrnn supports.
        installed: the installed version, or None.
        extra: the extra of jrnn that installs it; "" if jrnn always needs it.
    """

    name: str
    wanted: str
    installed: str | None
    extra: str

    @property
    def is_satisfied(self) -> bool:
        return self.installed is not None and _release(self.installed) >= _release(self.wanted)

    @property
    def remedy(self) -> str:
        """How to install it; "" if `is_satisfied`."""
        if self.is_satisfied:
            return ""
        if self.extra:
            return f"for {USES[self.extra]}: pip install 'jrnn[{self.extra}]'"
        return f"jrnn needs it: pip install '{self.name}>={self.wanted}'"


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with.

    >>> _release("0.11.2rc1"), _release("3")
    ((0, 11, 2), (3,))
    """
    numbers = re.sub(r"[^\d.].*", "", version)
    return tuple(map(int, filter(None, numbers.split("."))))


def packages() -> list[Installed]:
    """The packages that jrnn uses: from pyproject.toml in a source tree, else from the metadata of the installation."""
    source = HERE.parent / "pyproject.toml"
    if source.exists():
        project = tomllib.loads(read_text(source, UsageError))["project"]
        lines = list(project["dependencies"])
        for extra, of_extra in project["optional-dependencies"].items():
            lines += [f'{line}; extra == "{extra}"' for line in of_extra]
    else:
        lines = importlib.metadata.requires("jrnn") or []
    known: dict[str, Installed] = {}
    for line in lines:
        match = re.match(
            r"([\w.-]+)(?:\[.*\])?(?:[^;]*?>=([\w.]+))?(?:.*extra == ['\"]([\w-]+)['\"])?", line
        )
        assert match is not None, line
        name, wanted, extra = match.groups(default="")
        # An extra may list jrnn itself, with other extras.
        if name != "jrnn" and extra not in FOR_CONTRIBUTORS:
            known.setdefault(name, Installed(name, wanted or "0", version_of(name), extra))
    return list(known.values())


def _devices() -> list[str]:
    """Lines that describe the devices, a test computation, and a GPU that JAX does not use."""
    lines = []
    for device in jax.devices():
        held = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {held / 2**30:.0f} GiB" if held else ""
        lines.append(f"{device.platform}:{device.id}  {device.device_kind}{memory}")
    begun = time.perf_counter()
    total = float(jax.jit(_sum)(jax.numpy.ones(8)))
    seconds = time.perf_counter() - begun
    if total == 8:
        lines.append(f"a loop compiles and runs in {seconds:.2f} s")
    else:
        lines.append(f"a sum of 8 ones is {total}: WRONG")
    if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
        lines.append(
            "nvidia-smi is installed, but JAX does not use a GPU: pip install 'jax[cuda13]'"
        )
    return lines


def _sum(xs: jax.Array) -> jax.Array:
    """Returns the sum of numbers by a loop."""
    return jax.lax.scan(lambda carry, x: (carry + x, None), 0.0, xs)[0]


def examine(out: Any = None) -> bool:
    """Prints a report to the file `out`, or to the standard output. Returns whether jrnn can work."""
    needed = []
    optional = []
    missing = {}
    for package in packages():
        (optional if package.extra else needed).append(package)
        if package.remedy:
            missing[package.extra or package.name] = package.remedy

    def section(title: str, lines: Iterable[str]) -> None:
        print(f"{title}\n" + "\n".join(map("  {}".format, lines)), file=out)

    python = f"Python {platform.python_version()}, {sys.executable}"
    section(
        f"jrnn {__version__}",
        [str(HERE), python, f"{platform.platform()}, {os.cpu_count()} processors"],
    )
    section("packages that jrnn needs", _rows(needed))
    section("packages of extras", _rows(optional))
    others = [f"{name}  {version_of(name) or 'absent'}  {use}" for name, use in OPTIONAL.items()]
    section("optional packages", others)
    section("devices", _devices())
    section("kernel for CPUs (executor 'native')", [str(library.loaded())])
    faults = []
    for (name, version), fault in FAULTY.items():
        if version_of(name) == version:
            faults.append(f"{name} {version}: {fault}: pip install '{name}!={version}'")
    if faults:
        section("faulty", faults)
    remedies = map(": ".join, missing.items())
    section("missing" if missing else "nothing is missing", remedies)
    return all(p.is_satisfied for p in needed)


def _rows(installed: list[Installed]) -> Iterator[str]:
    width = max((len(p.name) for p in installed), default=0)
    for p in installed:
        extra = f"  {p.extra}" if p.extra else ""
        yield f"{p.name:{width}}  {p.installed or 'absent':10} (>= {p.wanted}){extra}"
