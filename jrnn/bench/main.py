"""`jrnn bench`: cells, sizes, modes and peers, in one process and in turns."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jrnn.bench import measure, peers, report
from jrnn.bench.sizes import CAFFE2_SIZES, CELLS, MODES, SIZES, Size, check_names, flops
from jrnn.executor import host_memory


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        cells, modes, peers: names; peers None for all that can run here.
        sizes: what to run them on.
        turns: measured runs of each program, at most.
        seconds: after which no more turns of a size begin, but for the first three.
        devices: how many devices a CPU is divided into for a further row of jrnn; None for its cores, 1 for no such row.
        caffe2_python: a Python interpreter that has Caffe2, to measure it too.
        json, plot: files to write.
        compare: a JSON file of an earlier run to compare with.
    """

    cells: Sequence[str] = ("lstm", "gru")
    modes: Sequence[str] = MODES
    sizes: Sequence[Size] = (*SIZES, *CAFFE2_SIZES)
    peers: Sequence[str] | None = None
    turns: int = 15
    seconds: float = 20.0
    devices: int | None = None
    caffe2_python: str | None = None
    json: Path | None = None
    plot: Path | None = None
    compare: Path | None = None
    console: Console = field(default_factory=Console)


def run(options: Options) -> list[report.Record]:
    """Runs the benchmark, prints its tables and writes its files.

    Raises:
        ConfigError: a cell, mode or peer that there is not.
        DataError: a file to compare with that is not a benchmark's.
    """
    devices = _cores() if options.devices is None else options.devices
    known = peers.available(options.caffe2_python, devices if jax.default_backend() == "cpu" else 1)
    chosen = list(known) if options.peers is None else list(options.peers)
    check_names("cell", options.cells, CELLS)
    check_names("mode", options.modes, MODES)
    check_names("peer", chosen, known)
    old = report.load(options.compare)[1] if options.compare else None

    gemm = 0.0  # measured again beside each job: the best of all is the machine's
    records: list[report.Record] = []
    jobs = [(cell, mode, size) for cell in options.cells for mode in options.modes for size in options.sizes]
    for cell, mode, size in jobs:
        options.console.print(f"{cell} {mode} {size}", style="dim")
        gemm = max(gemm, measure.gemm_flops())
        built = {name: known[name](cell, size, mode) for name in chosen}
        programs = {name: program for name, program in built.items() if program is not None}
        try:
            timings = measure.in_turns(programs, options.turns, options.seconds)
        finally:
            for program in programs.values():
                program.close()
        work = flops(cell, size, mode)
        for name, t in timings.items():
            made = programs[name]
            records.append(
                report.Record(
                    cell,
                    str(size),
                    mode,
                    name,
                    t.median,
                    t.low,
                    t.high,
                    t.turns,
                    made.compile_seconds,
                    made.peak_bytes,
                    work / t.median,
                )
            )
    options.console.print(report.times_table(records, gemm))
    for ours in ("jrnn", peers.on_devices(devices)):
        if report.ratios(records, ours):
            options.console.print(report.ratios_table(records, ours))
    if old is not None:
        options.console.print(report.comparison_table(old, records))
    if options.json:
        report.save(options.json, conditions(gemm, options.turns), records)
    if options.plot:
        report.plot(options.plot, records)
    return records


def conditions(gemm: float, turns: int) -> dict[str, Any]:
    """What a figure means nothing without."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "devices": len(jax.devices()),
        "processor": _processor(),
        "cores": _cores(),
        "system": platform.platform(),
        "versions": peers.versions(),
        "flags": {name: os.environ[name] for name in ("XLA_FLAGS", "OMP_NUM_THREADS") if name in os.environ},
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "gemm_flops_per_second": gemm,
        "keeps_memory": host_memory.kept,
        "turns": turns,
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
