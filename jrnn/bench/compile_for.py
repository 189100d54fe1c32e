"""`jrnn bench --compile-for`: cells compiled for an accelerator that this machine lacks.

XLA compiles for a device that is described to it; the compilers are in the plugins of the extras `aot-cuda` and `aot-tpu`.
Kernels, bytes and operations are counted exactly from the HLO. The time is only the estimate of a model.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from rich.table import Table

from jrnn.bench import results
from jrnn.bench.hlo import Cost, Module
from jrnn.bench.peers import FUNCTIONS, in_mode, versions
from jrnn.bench.sizes import CELLS, MODES, Size, check_names
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError
from jrnn.jaxprs.jax_internals import platform_of, topologies
from jrnn.loops.costs.target import planned_platform

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 79368880128
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


_COLUMNS = (
    "cell", "mode", "T x N x D x H", "peer", "kernels a step", "KB a step", "temporary MB", "GFLOP", "estimated us a step",
)  # fmt: skip


@dataclass(frozen=True)
class Accelerator:
    """A device to compile for.

    Attributes:
        title: its name in tables.
        platform: its platform in JAX.
        topology: its name and the options that describe it to XLA.
        modules: Python packages; one of them must be installed.
        extra: the extra of jrnn that installs them.
        launch: the least seconds of a kernel in a loop.
        bandwidth: bytes a second between the chip and its memory.
        peak: operations a second of float32 products at JAX's default precision: TF32 on an H100, one pass of
            bfloat16 on a TPU.
    """

    title: str
    platform: str
    topology: tuple[str, dict[str, str]]
    modules: tuple[str, ...]
    extra: str
    launch: float
    bandwidth: float
    peak: float

    def estimate(self, launches: Sequence[Cost]) -> float:
        """Returns the seconds of launches in sequence; the longest of launch, bytes and operations counts for each."""
        seconds = 0.0
        for c in launches:
            seconds += max(self.launch * c.kernels, c.bytes / self.bandwidth, c.flops / self.peak)
        return seconds

    @property
    def model(self) -> str:
        """The model of `estimate` in words."""
        return (
            f"{self.launch * 1e6:g} us a kernel, {self.bandwidth / 1e12:.3g} TB/s, {self.peak / 1e12:.3g} TFLOP/s; of each "
            "kernel the longest of the three"
        )


DEVICES = {
    "h100": Accelerator(
        title="NVIDIA H100",
        platform="cuda",
        topology=("H100", {"target_config": _H100, "topology": "1x1x1"}),
        modules=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        extra="aot-cuda",
        launch=1e-6,
        bandwidth=3.352e12,
        peak=495e12,
    ),
    "v5e": Accelerator(
        title="TPU v5e",
        platform="tpu",
        topology=("v5e:2x2", {}),
        modules=("libtpu",),
        extra="aot-tpu",
        launch=0.5e-6,
        bandwidth=819e9,
        peak=197e12,
    ),
}


def described(accelerator: Accelerator) -> Any:
    """Returns the device to compile for. Call this before JAX has started: it restricts JAX to the CPU.

    Raises:
        ConfigError: if the plugin that compiles for it is missing, or of another version than JAX.
    """
    if not any(map(_is_installed, accelerator.modules)):
        raise ConfigError(
            f"bench: compiling for {accelerator.title} needs a plugin of JAX that is not installed; "
            f"pip install 'jrnn[{accelerator.extra}]'"
        )
    # Otherwise libtpu queries a cloud for the TPU of this machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # loads the plugins
    name, options = accelerator.topology
    try:
        topology = topologies.get_topology_desc(name, platform=accelerator.platform, **options)
        return topology.devices[0]
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"bench: JAX {jax.__version__} cannot compile for {accelerator.title} here ({error}); its plugin must "
            f"be of JAX's version: pip install -U 'jrnn[{accelerator.extra}]'"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


@dataclass(frozen=True)
class CompiledRow:
    """One peer on one cell, size and mode, compiled for a device.

    Attributes:
        kernels: launches a step in each loop, the forward one first; empty if no loop is left.
        bytes: the bytes a step that all kernels of the loops read and write, from memory or a cache.
        temporary: bytes of temporary memory; 0 if the compiler does not report it (libtpu).
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

    @property
    def job(self) -> tuple[str, str, str]:
        return self.cell, self.mode, self.size


def run(target: str, options: SuiteOptions) -> list[CompiledRow]:
    """Compiles each peer on each cell, mode and size; prints a table and writes it.

    Raises:
        ConfigError: for an unknown device, cell, mode or peer, or a plugin that is missing.
    """
    check_names("device to compile for", [target], DEVICES)
    cells = options.chosen("cells", CELLS) if options.cells else ["lstm", "gru"]
    modes = options.chosen("modes", MODES)
    peers = options.chosen("peers", FUNCTIONS)
    accelerator = DEVICES[target]
    sizes = options.chosen_sizes(["six"])
    device = described(accelerator)
    rows = []
    for cell, mode, size in product(cells, modes, sizes):
        options.console.print(f"{cell} {mode} {size}", style="dim")
        for peer in peers:
            compiled = compile_for(device, peer, cell, size, mode)
            if compiled is not None:
                rows.append(_row(accelerator, compiled, peer, cell, size, mode))
    options.console.print(table(rows, accelerator))
    if options.json:
        conditions = {
            "target": target,
            "model": accelerator.model,
            "versions": versions(),
            "times": "estimated",
        }
        results.save(options.json, conditions, "rows", rows)
    return rows


def compile_for(device: Any, peer: str, cell: str, size: Size, mode: str) -> Any:
    """Compiles the program of a peer for a device; returns None if the peer has no such cell."""
    program = FUNCTIONS[peer](cell, size)
    if program is None:
        return None
    there = SingleDeviceSharding(device)
    given = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=there),
        (program.weights, program.x),
    )
    with planned_platform(platform_of(device.client)):
        return jax.jit(in_mode(program.forward, mode)).lower(*given).compile()


def _row(
    accelerator: Accelerator, compiled: Any, peer: str, cell: str, size: Size, mode: str
) -> CompiledRow:
    module = Module(compiled.as_text())
    launches = module.costs()

    kernels = []
    loop_bytes = 0
    for loop in module.loops():
        if loop.trips > 1:
            kernels.append(loop.body.kernels * loop.trips / size.steps)
            loop_bytes += loop.body.bytes * loop.trips
    return CompiledRow(
        cell=cell,
        mode=mode,
        size=str(size),
        peer=peer,
        kernels=tuple(kernels),
        bytes=loop_bytes // size.steps,
        temporary=int(compiled.memory_analysis().temp_size_in_bytes),
        flops=sum(launches, Cost()).flops,
        estimated_seconds=accelerator.estimate(launches),
    )


def table(rows: Sequence[CompiledRow], accelerator: Accelerator) -> Table:
    """Returns a table of the rows with a section for each cell, mode and size."""
    shown = []
    jobs = []
    for r in rows:
        kernels = " + ".join(f"{n:.3g}" for n in r.kernels) or "no loop"
        size = results.megabytes(r.temporary or None)
        seconds_a_step = r.estimated_seconds / Size.parse(r.size).steps
        figures = (
            f"{r.bytes / 1e3:.3g}",
            size,
            f"{r.flops / 1e9:.3g}",
            f"{seconds_a_step * 1e6:.3g}",
        )
        shown.append((*r.job, r.peer, kernels, *figures))
        jobs.append(r.job)
    title = (
        f"compiled for {accelerator.title}, not run; the time is an ESTIMATE: {accelerator.model}"
    )
    return results.table_of(title, results.columns_of(_COLUMNS, shown), jobs)
