"""Layers with matrix states: seconds to the first gradient in a fresh process, with `jrnn.scan` and with `jax.lax.scan`.

Times are processor time of tracing, lowering, compilation and one run, without a cache of compiled programs. Imports and
the backend's start do not count. A size is that of the suite "linear".
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import jax
import linear
from linear_layers import LAYERS, problem
from pairs import pairs_of

from jrnn.bench.peers import Timed
from jrnn.bench.sizes import parse_sizes
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "sizes", "peers")
PEERS = ("jrnn", "lax.scan")


def seconds(cell: str, peer: str, size: str) -> float:
    """Returns the seconds of the first call of the gradient of a layer in this process."""
    given = problem(cell, parse_sizes([size])[0])
    fn = jax.jit(linear.train(linear.programs(cell)[peer]))
    jax.block_until_ready(given)
    start = time.process_time()
    jax.block_until_ready(fn(*given))
    return time.process_time() - start


def in_fresh_process(cell: str, peer: str, size: str) -> float:
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, __file__, cell, peer, size]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def jobs(options: SuiteOptions) -> Iterator[Job]:
    peers = options.chosen("peers", PEERS)
    for cell in options.chosen("cells", LAYERS):
        for size in map(str, options.chosen_sizes(["1024x8x64x64"])):
            programs = {
                p: Timed(lambda p=p, cell=cell, size=size: in_fresh_process(cell, p, size))
                for p in peers
            }
            yield Job(cell, "train", size, programs)


def summary(records: Sequence[Any]) -> str:
    """Returns the geometric mean of the times over those of `lax.scan`."""
    ratios = [a.least / b.least for a, b in pairs_of(records, "train")]
    if not ratios:
        return ""
    return (
        f"first call: {geometric_mean(ratios):.2f} of lax.scan's time (at most {max(ratios):.2f})"
    )


if __name__ == "__main__":
    print(seconds(*sys.argv[1:]))
