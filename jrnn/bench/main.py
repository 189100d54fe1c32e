"""`jrnn bench`: the jobs of a suite, in one process and in turns; their tables and files."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import jax

from jrnn.bench import measure, peers, report
from jrnn.bench.suites import Options, suite_of
from jrnn.executor import host_memory


def run(options: Options) -> list[report.Record]:
    """Runs a suite of the benchmark, prints its tables and writes its files.

    Raises:
        ConfigError: a cell, mode or peer that there is not.
        DataError: a file to compare with that is not a benchmark's, or a library that is not installed.
        UsageError: an option that means nothing for the suite.
    """
    suite = suite_of(options)
    old = report.load(options.compare)[1] if options.compare else None
    gemm = 0.0  # measured again with each job: the best of all is the machine's
    records: list[report.Record] = []
    for job in suite.jobs(options):
        options.console.print(f"{job.cell} {job.mode} {job.size}", style="dim")
        gemm = max(gemm, measure.gemm_flops())
        programs = {name: program for name, program in job.programs.items() if program is not None}
        try:
            timings = measure.in_turns(programs, options.turns, options.seconds)
        finally:
            for program in programs.values():
                program.close()
        for name, t in timings.items():
            p, rate = programs[name], job.flops / t.median
            of_job = (job.cell, job.size, job.mode, name)
            of_time = (t.median, t.low, t.high, t.turns)
            records.append(report.Record(*of_job, *of_time, p.compile_seconds, p.peak_bytes, rate))
    options.console.print(report.times_table(records, gemm))
    for peer in dict.fromkeys(r.peer for r in records):
        if peer.partition(" x")[0] in suite.OURS and report.ratios(records, peer):  # "jrnn x2" is jrnn on two devices
            options.console.print(report.ratios_table(records, peer))
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
        "cores": peers.cores(),
        "system": platform.platform(),
        "versions": peers.versions(),
        "flags": {name: os.environ[name] for name in ("XLA_FLAGS", "OMP_NUM_THREADS") if name in os.environ},
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "gemm_flops_per_second": gemm,
        "keeps_memory": host_memory.kept,
        "turns": turns,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
