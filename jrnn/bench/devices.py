"""Accelerators that programs are compiled for on machines without one: their descriptions, and a model of their time.

XLA compiles for a device that is described to it; the compiler comes with the plugins of the extras `aot-cuda` and
`aot-tpu`. The model of the time is an estimate and never a measurement.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jrnn.bench.hlo import Cost
from jrnn.errors import ConfigError
from jrnn.jax_names import topologies

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


@dataclass(frozen=True)
class Accelerator:
    """A device to compile for.

    Attributes:
        title: what tables call it.
        platform: of JAX.
        topology: its name and the options that describe it.
        modules: Python packages, of which one must be installed.
        extra: the extra of jrnn that brings them.
        launch: seconds that one more kernel in a loop takes at least.
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
        """Seconds of launches, one after the other; each takes as long as the launch, its bytes or its operations."""
        times = ((self.launch * c.kernels, c.bytes / self.bandwidth, c.flops / self.peak) for c in launches)
        return sum(map(max, times))

    @property
    def model(self) -> str:
        """The model in words."""
        return (
            f"{self.launch * 1e6:g} us a kernel, {self.bandwidth / 1e12:.3g} TB/s, {self.peak / 1e12:.3g} TFLOP/s; of each "
            "kernel the longest of the three"
        )


DEVICES = {
    "h100": Accelerator(
        "NVIDIA H100",
        "cuda",
        ("H100", {"target_config": _H100, "topology": "1x1x1"}),
        ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        "aot-cuda",
        2.5e-6,
        3.352e12,
        495e12,
    ),
    "v5e": Accelerator("TPU v5e", "tpu", ("v5e:2x2", {}), ("libtpu",), "aot-tpu", 0.5e-6, 819e9, 197e12),
}


def described(accelerator: Accelerator) -> Any:
    """The device to compile for. To be called before JAX has started: it keeps JAX to the CPU.

    Raises:
        ConfigError: the plugin that compiles for it is missing or of another version than JAX.
    """
    if not any(map(_is_installed, accelerator.modules)):
        raise ConfigError(
            f"bench: compiling for {accelerator.title} needs a plugin of JAX that is not installed; "
            f"pip install 'jrnn[{accelerator.extra}]'"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu looks for the TPU of this machine in a cloud
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing is run, so no chip is claimed
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # loads the plugins
    name, options = accelerator.topology
    try:
        return topologies.get_topology_desc(name, platform=accelerator.platform, **options).devices[0]
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"bench: JAX {jax.__version__} cannot compile for {accelerator.title} here ({error}); its plugin must "
            f"be of JAX's version: pip install -U 'jrnn[{accelerator.extra}]'"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
