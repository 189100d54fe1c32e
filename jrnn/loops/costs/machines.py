"""What a processor is to the cost model: rates, overheads and caches.

A choice between two ways to run a loop depends on ratios alone. On a CPU all times follow from the width of the vectors and
from the caches, as the system reports them, and from a few ratios, at a nominal clock. The figures of GPUs and TPUs are from
their makers' documents.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from jrnn.errors import ScanError
from jrnn.files import read_text
from jrnn.jaxprs.jax_internals import XLA_MAKES_ONE_KERNEL

# XLA:CPU before jaxlib 0.12 makes one kernel of a loop if a trip accesses no more than this number of bytes; later versions
# make one of any loop without calls, and with this flag so do earlier ones.
SMALL_LOOP = 1_024
ONE_KERNEL_FLAG = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=100000000"


class Machine(NamedTuple):
    """The constants of the model. Times are seconds of one core of a CPU, or of a whole accelerator.

    Attributes:
        product_rate: floating-point operations of matrix products a second.
        tiny_product_rate: the same of products so small that they are not worth a call.
        call: one call of a product or solver.
        bulk_call: one call of a product for many steps, with the memory of its result.
        kernel: one kernel of elementwise equations, in a loop that also calls products.
        trip: one trip of such a loop.
        elementwise_trip: one trip of a loop of elementwise equations alone, which on a CPU is one kernel.
        array: one more array that a loop stacks at each step.
        element: one elementwise operation on one element.
        function: one value of a function such as tanh.
        cache_rate: bytes a second, read or written, of arrays that fit `cache_bytes`.
        read_rate, write_rate: bytes a second of larger arrays.
        cache_bytes: the bytes of the caches of a processor that one program may count on.
        core_cache_bytes: the bytes of the cache of one core.
        one_kernel_bytes: the most bytes that a trip of an elementwise loop may access, if the loop is to be one kernel.
        bfloat16: the rate of large products of bfloat16 over the rate of others.
    """

    product_rate: float
    tiny_product_rate: float
    call: float
    bulk_call: float
    kernel: float
    trip: float
    elementwise_trip: float
    array: float
    element: float
    function: float
    cache_rate: float
    read_rate: float
    write_rate: float
    cache_bytes: int
    core_cache_bytes: int = 1 << 20
    one_kernel_bytes: float = math.inf
    bfloat16: float = 1.0

    @property
    def makes_one_kernel(self) -> bool:
        """Whether a loop that calls nothing is one kernel, as on a CPU."""
        return self.elementwise_trip < self.kernel

    def reading(self, size: float, of: float) -> float:
        """Returns the time to read `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cache_rate if of <= self.cache_bytes else self.read_rate)

    def moving(self, size: float, of: float) -> float:
        """Returns the time to write `size` bytes of arrays of `of` bytes in all, and to read them again."""
        return self.writing(size, of) + self.reading(size, of)

    def storing(self, size: float) -> float:
        """Returns the time to write `size` bytes to new memory, however few, and to read them again."""
        return size / self.write_rate + self.reading(size, size)

    def writing(self, size: float, of: float) -> float:
        """Returns the time to write `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cache_rate if of <= self.cache_bytes else self.write_rate)


def quiet(machine: Machine) -> Machine:
    """Returns the machine inside of a kernel, where nothing is called."""
    return machine._replace(
        call=0.0,
        kernel=0.0,
        trip=machine.elementwise_trip,
    )


# CPUs -------------------------------------------------------------------------------------------------------------------


class CpuRatios(NamedTuple):
    """What CPUs have in common: all rates follow from these numbers, the width of the vectors and the caches.

    Attributes:
        clock_hz: a nominal clock. A faster one makes all times shorter, and changes no choice.
        multiply_adds_per_clock: on vectors; most processors with vectors of 32 bytes have two units for them.
        wide_vector_speedup: of products with vectors of 64 bytes. They double the rate of some processors (Intel's
            servers), and do not change the rate of others (Zen 4).
        peak_fraction: the part of the peak that products of XLA reach (docs/notes/cpu_log.md).
        tiny_product_slowdown: of products of less than a vector's work (docs/notes/cpu_log.md).
        operations_per_lane: elementwise operations for each clock and lane: some are fused into multiply-adds, or run next
            to each other.
        additions_per_function: `tanh` takes as long as this number of additions: XLA's polynomial, a division and the
            reading of both.
        bfloat16_speedup: of products of bfloat16, where the processor has instructions for them: 1.4 to 4.4 for 2^19 to 2^28
            operations on an Intel Xeon with AMX.
        kernel_seconds: a kernel of XLA's CPU runtime takes 0.05 to 0.2 us.
        cache_bytes_per_clock: what a core reads from a cache, or writes to it.
        read_bytes_per_clock: what a core reads from memory.
        written_bytes_per_clock: what a core writes to memory, where pages are written for the first time.
    """

    clock_hz: float = 3e9
    multiply_adds_per_clock: int = 2
    wide_vector_speedup: float = 1.4
    peak_fraction: float = 0.94
    tiny_product_slowdown: float = 7.5
    operations_per_lane: float = 1.4
    additions_per_function: float = 23
    bfloat16_speedup: float = 2.0
    kernel_seconds: float = 0.1e-6
    cache_bytes_per_clock: float = 16
    read_bytes_per_clock: float = 5
    written_bytes_per_clock: float = 5 / 3


RATIOS = CpuRatios()


def processor(
    vector: int = 32,
    near: int = 1 << 20,
    last: int = 32 << 20,
) -> Machine:
    """Returns the constants of a CPU.

    Args:
        vector: the bytes of a vector.
        near: the bytes of the cache of one core.
        last: the bytes of the last cache, which cores share; half of it is counted.
    """
    clock = RATIOS.clock_hz
    kernel = RATIOS.kernel_seconds
    lanes = min(vector, 32) / 4
    products = RATIOS.peak_fraction * 2 * RATIOS.multiply_adds_per_clock * lanes * clock
    if vector > 32:
        products *= RATIOS.wide_vector_speedup
    element = 1 / (clock * lanes) / RATIOS.operations_per_lane
    return Machine(
        product_rate=products,
        tiny_product_rate=products / RATIOS.tiny_product_slowdown,
        call=4 * kernel,
        bulk_call=30 * kernel,
        kernel=kernel,
        trip=2 * kernel,
        elementwise_trip=kernel / 10,
        array=kernel / 12,
        element=element,
        function=RATIOS.additions_per_function * element,
        cache_rate=RATIOS.cache_bytes_per_clock * clock,
        read_rate=RATIOS.read_bytes_per_clock * clock,
        write_rate=RATIOS.written_bytes_per_clock * clock,
        cache_bytes=max(near, last // 2),
        core_cache_bytes=near,
    )


CPU = processor()  # an unknown processor


@functools.cache
def this_processor() -> Machine:
    """Returns the constants of the CPU that runs this process, from what the system reports."""
    sizes = {level: size for level, size in _caches().items() if 1 << 15 <= size <= 1 << 30}
    near = sizes.get(2, CPU.core_cache_bytes)
    flags = os.environ.get("XLA_FLAGS", "")
    machine = processor(vector_bytes(flags), near, sizes.get(3, max(4 * near, 8 << 20)))
    if {"amx_bf16", "avx512_bf16"} & instructions():
        machine = machine._replace(bfloat16=RATIOS.bfloat16_speedup)
    return machine._replace(one_kernel_bytes=one_kernel_bytes(flags))


def one_kernel_bytes(flags: str = "") -> float:
    """Returns what a trip of a loop may access for XLA:CPU to make one kernel of it: the bytes of `flags`, or its own."""
    thresholds = re.findall(r"xla_cpu_small_while_loop_byte_threshold=(\d+)", flags)
    if thresholds:
        return float(thresholds[-1])
    return math.inf if XLA_MAKES_ONE_KERNEL else SMALL_LOOP


def vector_bytes(flags: str = "") -> int:
    """Returns the bytes of the vectors that XLA uses here, as its own `flags` bound them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    known = instructions()
    if "avx512f" in known:
        widest = 64
    elif "avx2" in known or not known:
        widest = 32
    else:
        widest = 16
    isa = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    if not isa:
        return widest
    return min(
        widest,
        {
            "SSE4_2": 16,
            "AVX": 32,
            "AVX2": 32,
        }.get(isa[-1].upper(), 64),
    )


def instructions() -> set[str]:
    """Returns the names of sets of instructions, as Linux reports them, or nothing."""
    try:
        flags = re.search(r"^flags.*$", read_text("/proc/cpuinfo", ScanError), re.M)
    except ScanError:
        return set()
    return set(re.findall(r"\w+", flags[0])) if flags else set()


def _caches() -> dict[int, int]:
    """Returns the bytes of the caches of data of the first core by level, as Linux reports them."""
    sizes: dict[int, int] = {}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = read_text(path / "level", ScanError).strip()
            kind = read_text(path / "type", ScanError).strip()
            size = read_text(path / "size", ScanError).strip()
            if kind != "Instruction":
                sizes[int(level)] = int(size.removesuffix("K")) << 10
        except ValueError:  # a ScanError, or no number
            continue
    return sizes


# Accelerators -----------------------------------------------------------------------------------------------------------


def _accelerator(
    *,
    product_rate: float,
    launch: float,
    trip: float,
    elementwise_trip: float,
    array: float,
    lane_rate: float,
    function: float,
    memory_rate: float,
    cache_speedup: float,
    cache_bytes: int,
) -> Machine:
    """Returns the constants of an accelerator. A product is a launch, however small it is.

    Args:
        product_rate: floating-point operations of matrix products a second.
        launch: seconds of a kernel.
        trip: one trip of a loop that also calls products, in launches.
        elementwise_trip: one trip of a loop of elementwise equations alone, in launches.
        array: one more array that a loop stacks at each step, in launches.
        lane_rate: elementwise operations a second.
        function: a function such as tanh takes as long as this number of additions.
        memory_rate: bytes a second.
        cache_speedup: the rate of the cache over the rate of memory.
        cache_bytes: the bytes of the cache.
    """
    return Machine(
        product_rate=product_rate,
        tiny_product_rate=product_rate,
        call=launch,
        bulk_call=launch,
        kernel=launch,
        trip=trip * launch,
        elementwise_trip=elementwise_trip * launch,
        array=array * launch,
        element=1 / lane_rate,
        function=function / lane_rate,
        cache_rate=cache_speedup * memory_rate,
        read_rate=memory_rate,
        write_rate=memory_rate,
        cache_bytes=cache_bytes,
    )


# Bandwidth, operations and caches are as in `jrnn bench --compile-for h100` (`bench/compile_for.py`). A kernel in a loop
# was measured on an H200 (docs/benchmarks/h200.json): 8 a trip took 7.8 us. A trip has the counter and the stacks of all ys.
# From the same description: 132 multiprocessors of 128 lanes at 1.98 GHz. A function takes 8 times as long: CUDA C++
# Programming Guide, "Throughput of Native Arithmetic Instructions", 16 results a clock and multiprocessor. L2 is 2.5 times
# as fast as memory: XLA's `kL2CacheSpeedup`.
H100 = _accelerator(
    product_rate=495e12,
    launch=1e-6,
    trip=2,
    elementwise_trip=3,
    array=0.0,
    lane_rate=132 * 128 * 1.98e9,
    function=8,
    memory_rate=3.352e12,
    cache_speedup=2.5,
    cache_bytes=52_428_800,
)

# Launches, bandwidth and operations are as in `--compile-for v5e`. How To Scale Your Model, "How to Think About TPUs":
# vectors of 8 x 128 lanes with 4 units at 1.5 GHz; VMEM of 128 MiB, 22 times as fast as memory. A function is estimated as
# ten operations. None was measured on a device.
V5E = _accelerator(
    product_rate=197e12,
    launch=0.5e-6,
    trip=1,
    elementwise_trip=2,
    array=1,
    lane_rate=8 * 128 * 4 * 1.5e9,
    function=10,
    memory_rate=819e9,
    cache_speedup=22,
    cache_bytes=128 << 20,
)


def of(platform: str) -> Machine:
    """Returns the constants for a platform of JAX."""
    if platform == "cpu":
        return this_processor()
    return V5E if platform == "tpu" else H100
