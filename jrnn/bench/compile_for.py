"""`jrnn bench --compile-for`: cells compiled for an accelerator that this machine lacks.

Every program is compiled by XLA for the described device, and its HLO is read. What is counted is exact; the time is the
estimate of a model and is called so wherever it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from jrnn.bench.devices import DEVICES, Accelerator, described
from jrnn.bench.hlo import Cost, Module
from jrnn.bench.peers import FUNCTIONS, in_mode, versions
from jrnn.bench.sizes import CELLS, MODES, Size, check_names, flops


@dataclass(frozen=True)
class Row:
    """One peer on one cell, size and mode, compiled for a device.

    Attributes:
        kernels: launches a step in each loop, the forward one first; empty where no loop is left.
        bytes: that all kernels of the loops read and write a step, from memory or a cache.
        temporary: bytes of temporary memory; 0 where the compiler does not say (libtpu).
        flops: operations of all contractions of the program.
        estimated_seconds: of the whole program, by the device's model.
    """

    cell: str
    mode: str
    size: str
    peer: str
    kernels: tuple[float, ...]
    bytes: int
    temporary: int
    flops: int
    estimated_seconds: float


def run(
    target: str,
    cells: Sequence[str],
    modes: Sequence[str],
    sizes: Sequence[Size],
    peers: Sequence[str] | None,
    console: Console,
    path: Path | None,
) -> list[Row]:
    """Compiles each peer on each cell, mode and size; prints a table and writes it.

    Raises:
        ConfigError: a device, cell, mode or peer that there is not, or a plugin that is missing.
    """
    check_names("device to compile for", [target], DEVICES)
    check_names("cell", cells, CELLS)
    check_names("mode", modes, MODES)
    check_names("peer to compile", peers or (), FUNCTIONS)
    accelerator = DEVICES[target]
    device = described(accelerator)
    rows = []
    for cell in cells:
        for mode in modes:
            for size in sizes:
                console.print(f"{cell} {mode} {size}", style="dim")
                for peer in peers or FUNCTIONS:
                    compiled = compile_for(device, peer, cell, size, mode)
                    if compiled is not None:
                        rows.append(_row(accelerator, compiled, peer, cell, size, mode))
    console.print(table(rows, accelerator))
    if path:
        save(path, target, rows)
    return rows


def compile_for(device: Any, peer: str, cell: str, size: Size, mode: str) -> Any:
    """The program of a peer compiled for a device, or None where the peer has no such cell."""
    found = FUNCTIONS[peer](cell, size)
    if found is None:
        return None
    there = SingleDeviceSharding(device)
    given = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=there), (found.weights, found.x))
    return jax.jit(in_mode(found.forward, mode)).lower(*given).compile()


def _row(accelerator: Accelerator, compiled: Any, peer: str, cell: str, size: Size, mode: str) -> Row:
    module = Module(compiled.as_text())
    launches = module.costs()
    loops = [loop for loop in module.loops() if loop.trips > 1]
    counted = sum(launches, Cost()).flops
    operations = flops(cell, size, mode) if module.has_opaque_calls() else counted
    rest = [Cost(0, 0, operations - counted)] if operations > counted else []
    return Row(
        cell,
        mode,
        str(size),
        peer,
        tuple(loop.body.kernels * loop.trips / size.steps for loop in loops),
        sum(loop.body.bytes * loop.trips for loop in loops) // size.steps,
        int(compiled.memory_analysis().temp_size_in_bytes),
        operations,
        accelerator.estimate([*launches, *rest]),
    )


def table(rows: Sequence[Row], accelerator: Accelerator) -> Table:
    """The rows, a section for each cell, mode and size."""
    found = Table(
        title=f"compiled for {accelerator.title}, not run; the time is an ESTIMATE: {accelerator.model}",
    )
    names = ("cell", "mode", "T x N x D x H", "peer")
    counts = ("kernels a step", "KB a step", "temporary MB", "GFLOP", "estimated us a step")
    for name in (*names, *counts):
        found.add_column(name, justify="left" if name in names else "right", no_wrap=True)
    job = None
    for row in rows:
        if job not in (None, (row.cell, row.mode, row.size)):
            found.add_section()
        job = row.cell, row.mode, row.size
        steps = Size.parse(row.size).steps
        found.add_row(
            *(*job, row.peer),
            " + ".join(f"{n:.3g}" for n in row.kernels) or "no loop",
            f"{row.bytes / 1e3:.3g}",
            f"{row.temporary / 1e6:.3g}" if row.temporary else "-",
            f"{row.flops / 1e9:.3g}",
            f"{row.estimated_seconds / steps * 1e6:.3g}",
        )
    return found


def save(path: Path, target: str, rows: Sequence[Row]) -> None:
    """Writes the rows with what they depend on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    conditions = {"target": target, "model": DEVICES[target].model, "versions": versions(), "times": "estimated"}
    path.write_text(json.dumps({"conditions": conditions, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
