"""Caffe2's LSTM, in a process of Caffe2's own Python, next to `jrnn.scan` and `jax.lax.scan`.

The environment variable CAFFE2_PYTHON names a Python that has Caffe2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from processes import Process

from jrnn.bench import peers
from jrnn.bench.sizes import MODES, SETS, Size, flops
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.errors import DataError

OURS = ("jrnn",)
TAKES = ("modes", "sizes")


def caffe2(python: str, size: Size, mode: str) -> peers.Timed:
    script = Path(__file__).with_name("caffe2_worker.py")
    sizes = map(str, (size.steps, size.batch, size.features, size.hidden))
    return Process([python, str(script), *sizes, mode]).program()


def jobs(options: SuiteOptions) -> Iterator[Job]:
    python = os.environ.get("CAFFE2_PYTHON")
    if not python:
        raise DataError(
            "bench: the suite 'caffe2' needs a Python with Caffe2: set CAFFE2_PYTHON to its path"
        )
    known = peers.available()
    for mode, size in product(options.chosen("modes", MODES), options.chosen_sizes(list(SETS))):
        programs = {name: known[name]("lstm", size, mode) for name in ("jrnn", "lax.scan")}
        yield Job(
            "lstm",
            mode,
            str(size),
            programs | {"caffe2": caffe2(python, size, mode)},
            flops("lstm", size, mode),
        )
