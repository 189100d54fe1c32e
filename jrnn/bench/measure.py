"""`jrnn bench`: runs the jobs of a suite, times their programs interleaved, prints tables and writes files.

Interleaved, the noise of the machine affects all programs alike.
"""

from __future__ import annotations

import math
import os
import platform
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench import peers, results
from jrnn.bench.peers import Timed
from jrnn.bench.suites import SuiteOptions, check_options
from jrnn.loops import host

_SETTLED = 0.01  # seconds that a program runs before it is measured
_TURNS = 3  # the least number of turns for a median


@dataclass(frozen=True)
class Timing:
    """Seconds of one program: median, quartiles and the least over its turns."""

    median: float
    low: float
    high: float
    turns: int
    least: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """
        >>> Timing.of([3.0, 1.0, 2.0]).median
        2.0
        """
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        return Timing(median, low, high, len(seconds), min(seconds))


def in_turns(
    programs: Mapping[str, Timed], turns: int, seconds: float = math.inf
) -> dict[str, Timing]:
    """Runs all programs interleaved, each turn in another random order.

    After `seconds` no more turns begin, except for the first three. Each program first runs unmeasured, because in a
    training loop it follows itself: another program leaves its data in the caches, and its threads (OpenMP's, for some
    milliseconds) busy waiting on the cores.
    """
    took: dict[str, list[float]] = {}
    for name, program in programs.items():
        took[name] = []
        program.run()
    orders = random.Random(0)
    start = time.perf_counter()
    for turn in range(turns):
        if turn >= _TURNS and time.perf_counter() - start > seconds:
            break
        for name in orders.sample(list(programs), len(programs)):
            settled = 0.0
            begun = time.perf_counter()
            while settled < _SETTLED:
                settled = max(settled + programs[name].run(), time.perf_counter() - begun)
            took[name].append(programs[name].run())
    return {name: Timing.of(values) for name, values in took.items()}


def gemm_flops(seconds: float = 0.3, sides: Sequence[int] = (384, 512, 1024)) -> float:
    """Returns the best rate of float32 matrix products in floating-point operations a second.

    The best turn counts, because other work of the machine only slows a product down. Several sizes are measured, because a
    large product takes so long that every turn is disturbed, while the programs to compare are short.
    """
    best = 0.0
    for side in sides:
        a = jnp.ones((side, side), jnp.float32)
        product = jax.jit(jnp.matmul).lower(a, a).compile()
        jax.block_until_ready(product(a, a))
        begun = time.perf_counter()
        turns = 0
        while turns < _TURNS or time.perf_counter() - begun < seconds / len(sides):
            start = time.perf_counter()
            jax.block_until_ready(product(a, a))
            best = max(best, 2 * side**3 / (time.perf_counter() - start))
            turns = turns + 1
    return best


def run(options: SuiteOptions, suite: ModuleType) -> list[results.Record]:
    """Runs a suite of the benchmark, prints its tables and writes its files.

    Raises:
        ConfigError: for an unknown cell, mode or peer.
        UsageError: for an option that means nothing for the suite.
    """
    check_options(options, suite)
    gemm = 0.0  # the best rate of all jobs
    records: list[results.Record] = []
    for job in suite.jobs(options):
        options.console.print(f"{job.cell} {job.mode} {job.size}", style="dim")
        gemm = max(gemm, gemm_flops())
        programs = {name: program for name, program in job.programs.items() if program is not None}
        try:
            timings = in_turns(programs, options.turns, options.seconds)
        finally:
            for program in programs.values():
                program.close()
        for name, t in timings.items():
            records.append(
                results.Record(
                    cell=job.cell,
                    size=job.size,
                    mode=job.mode,
                    peer=name,
                    **asdict(t),
                    compile_seconds=programs[name].compile_seconds,
                    peak_bytes=programs[name].peak_bytes,
                    flops_per_second=job.flops / t.median,
                )
            )
    options.console.print(results.times_table(records, gemm))
    for peer in dict.fromkeys(r.peer for r in records):
        if peer in suite.OURS and results.ratios(records, peer):
            options.console.print(results.ratios_table(records, peer))
    if hasattr(suite, "summary"):
        options.console.print(suite.summary(records))
    if options.json:
        results.save(options.json, conditions(gemm, options.turns), "records", records)
    if options.plot:
        results.plot(options.plot, records)
    return records


def conditions(gemm: float, turns: int) -> dict[str, Any]:
    """Returns the conditions of a measurement."""
    device = jax.devices()[0]
    flags = [name for name in ("XLA_FLAGS", "OMP_NUM_THREADS") if name in os.environ]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "devices": len(jax.devices()),
        "processor": peers.processor(),
        "cores": peers.cores(),
        "processor_time": peers.by_processor(),
        "system": platform.platform(),
        "versions": peers.versions(),
        "flags": {name: os.environ[name] for name in flags},
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "gemm_flops_per_second": gemm,
        "keeps_memory": host.retains_memory,
        "turns": turns,
    }
