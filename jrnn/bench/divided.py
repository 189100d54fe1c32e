"""`jrnn.scan` with the batch divided over the devices that a CPU counts as, in a process of its own that waits for turns.

    python -m jrnn.bench.divided '{"devices": 2, "cell": "lstm", "size": "9x8x4x4", "mode": "train", "keep_memory": true}'

The first line that it is sent it answers with what compiling took and needs, each further one with the seconds of a run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrnn.bench import peers, steps
from jrnn.bench.sizes import Size
from jrnn.executor import host_devices, host_memory, scan


def build(devices: int, cell: str, size: Size, mode: str) -> peers.Program:
    """The program of `jrnn.scan` whose input, carries and outputs lie in parts on the devices."""
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(tree: Any, *spec: str | None) -> Any:
        return jax.device_put(jax.tree.map(np.asarray, tree), NamedSharding(mesh, PartitionSpec(*spec)))

    weights, x = steps.inputs(cell, size)
    carry = put(steps.initial(cell, size), "batch")

    def forward(weights: Any, x: Any) -> Any:
        return scan(steps.STEPS[cell](weights), carry, x)[1]

    return peers.compiled(forward, put(weights), put(x, None, "batch"), mode)


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked.pop("keep_memory"):
        host_memory.keep()
    host_devices.divide(asked["devices"])
    program = build(**{**asked, "size": Size.parse(asked["size"])})
    sys.stdin.readline()
    print(json.dumps([program.compile_seconds, program.peak_bytes]), flush=True)
    for _ in sys.stdin:
        print(program.run(), flush=True)


if __name__ == "__main__":
    main()
