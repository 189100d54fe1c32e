"""`jrnn.scan` with the batch divided over the cores of a CPU, next to the same on one device.

Run as a script, this file measures the divided loop, in a process of its own:

    python scripts/benchmarks/divided.py '{"devices": 2, "cell": "lstm", "size": "9x8x4x4", "mode": "train",
    "keep_memory": true}'

It answers the first line of its input with the seconds and the bytes of compiling, and each further line with the seconds
of a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from processes import Process

from jrnn.bench import measured_cells, peers
from jrnn.bench.peers import Timed, compiled
from jrnn.bench.sizes import CELLS, MODES, SETS, Size, flops
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import host, scan

OURS = ("jrnn", f"jrnn x{peers.cores()}")
TAKES = ("cells", "modes", "sizes")


def jobs(options: SuiteOptions) -> Iterator[Job]:
    cells, modes = options.chosen("cells", CELLS), options.chosen("modes", MODES)
    known, devices = peers.available(), peers.cores()
    for cell, mode, size in product(cells, modes, options.chosen_sizes(list(SETS))):
        programs = {name: known[name](cell, size, mode) for name in ("jrnn", "lax.scan")}
        programs[f"jrnn x{devices}"] = divided(devices, cell, size, mode)
        yield Job(cell, mode, str(size), programs, flops(cell, size, mode))


def divided(devices: int, cell: str, size: Size, mode: str) -> Timed | None:
    """`jrnn.scan` with the batch divided over `devices` devices of the CPU, in a process of its own.

    Returns None if there is nothing to divide: one device, or a batch that they do not divide.
    """
    if devices == 1 or size.batch % devices:
        return None
    asked = dict(
        devices=devices, cell=cell, size=str(size), mode=mode, keep_memory=host.retains_memory
    )
    process = Process([sys.executable, __file__, json.dumps(asked)])
    return process.program(*process.ask())


def divided_here(devices: int, cell: str, size: Size, mode: str) -> Timed:
    """Compiles `jrnn.scan` with input, carries and outputs divided over the devices of this process."""
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(tree: Any, *spec: str | None) -> Any:
        return jax.device_put(
            jax.tree.map(np.asarray, tree), NamedSharding(mesh, PartitionSpec(*spec))
        )

    weights, x = measured_cells.inputs(cell, size)
    carry = put(measured_cells.initial(cell, size), "batch")

    def forward(weights: Any, x: Any) -> Any:
        return scan(measured_cells.make(cell, weights), carry, x)[1]

    return compiled(forward, put(weights), put(x, None, "batch"), mode)


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked.pop("keep_memory"):
        host.retain_memory()
    host.divide_cpu(asked["devices"])
    program = divided_here(**{**asked, "size": Size.parse(asked["size"])})
    sys.stdin.readline()
    print(json.dumps([program.compile_seconds, program.peak_bytes]), flush=True)
    for _ in sys.stdin:
        print(program.run(), flush=True)


if __name__ == "__main__":
    main()
