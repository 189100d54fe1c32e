"""Programs whose loops were chosen by measurement (`jrnn.tune`), next to each executor alone.

Tuning should find at least what the best executor gives, and never less than the choice without it.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import jax

from jrnn.bench import peers
from jrnn.bench.peers import Timed, compiled, in_mode, scanned
from jrnn.bench.sizes import CELLS, MODES, Size
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.bench.tuning import into_file
from jrnn.errors import ScanError
from jrnn.loops import scan
from jrnn.loops.costs import tuned

OURS = ("tuned",)
TAKES = ("cells", "modes", "sizes", "peers")
EXECUTORS = ("auto", "scan", "associative", "native")


def jobs(options: SuiteOptions) -> Iterator[Job]:
    known = ["tuned", "lax.scan", *EXECUTORS]
    chosen = options.chosen("peers", known)
    sizes = options.chosen_sizes(["50x8x64x64"])
    for cell, mode, size in product(options.chosen("cells", CELLS), options.chosen("modes", MODES), sizes):
        built = {name: _program(name, cell, size, mode, options) for name in chosen}
        yield Job(cell, mode, str(size), built)


def _program(name: str, cell: str, size: Size, mode: str, options: SuiteOptions) -> Timed | None:
    if name == "tuned":
        return _tuned(cell, size, mode, options)
    which = jax.lax.scan if name == "lax.scan" else functools.partial(scan, executor=name)
    try:
        return compiled(*scanned(which, cell, size), mode)
    except ScanError:
        return None


def _tuned(cell: str, size: Size, mode: str, options: SuiteOptions) -> Timed:
    function = peers.scanned(scan, cell, size)
    with tempfile.TemporaryDirectory() as folder:
        args = function.weights, function.x
        tuning = into_file(
            Path(folder, "plans.json"), in_mode(function.forward, mode), args, {}, seconds=options.seconds
        )
    options.console.print(str(tuning), style="dim", markup=False, highlight=False)
    with tuned.using(tuned.Table.of({key: loop.taken for key, loop in tuning.kept.items()})):
        return compiled(*function, mode)
