"""Suites of measurements behind the figures of docs/benchmarks.md, which `jrnn bench` does not have.

    python scripts/benchmarks SUITE [--cells A,B] [--modes A,B] [--sizes TxNxDxH,...] [--peers A,B] [--json FILE] ...

Each suite is a module of this folder. It says what it measures, and in `TAKES` which options it takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from jrnn.bench import measure
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import DataError, JrnnError

SUITES = {
    "custom-steps": "custom_steps",
    "divided": "divided",
    "layers": "recurrent_layers",
    "convert": "conversion",
    "growth": "growth",
    "libraries": "libraries",
    "streaming": "streaming",
    "never-worse": "never_worse",
    "linear": "linear",
    "filters": "filters",
    "spellings": "spelling_suite",
    "tiny": "tiny_loops",
    "first-call": "first_call",
    "caffe2": "caffe2_cells",
    "constants": "machine_constants",
    "as-written": "as_written",
    "carries": "carries",
    "peers": "peers",
}


def suite_of(name: str) -> ModuleType:
    """Returns the module of a suite; raises DataError if a library that it needs is missing."""
    module = import_module(SUITES[name])
    for library, package in getattr(module, "NEEDS", {}).items():
        if find_spec(library) is None:
            raise DataError(f"bench: the suite {name!r} needs {library}: pip install {package}")
    return module


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("suite", choices=SUITES)
    for name in ("cells", "modes", "sizes", "peers"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0)
    for name in ("json", "plot"):
        parser.add_argument(f"--{name}", type=Path)
    options = SuiteOptions(**vars(parser.parse_args(argv)))
    try:
        measure.run(options, suite_of(options.suite))
    except JrnnError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
