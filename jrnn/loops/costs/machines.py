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

# XLA:CPU before jaxlib 0.12 makes one kernel of a loop if a trip accesses no more bytes; later versions make one of any loop
# without calls, and with this flag so do earlier ones.
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
        cache_bytes: the bytes of the caches of a processor, as far as one program counts on them.
        core_cache_bytes: the bytes of the cache of one core.
        one_kernel_bytes: the most bytes that a trip of an elementwise loop may access, if the loop is to be one kernel.
        bfloat16: large products of bfloat16 run so many times as fast as others.
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

    def reading(self, size: float, of: float) -> float:
        """Returns the time to read `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cache_rate if of <= self.cache_bytes else self.read_rate)

    def writing(self, size: float, of: float) -> float:
        """Returns the time to write `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cache_rate if of <= self.cache_bytes else self.write_rate)


# CPUs -------------------------------------------------------------------------------------------------------------------

_CLOCK = 3e9  # nominal: a faster one makes all times shorter, and changes no choice
_UNITS = 2  # multiply-add a clock; most processors with vectors of 32 bytes have two units for that
_TWICE_AS_WIDE = 1.4  # vectors of 64 bytes double the rate of some processors (Intel's servers), of others not (Zen 4)
_PEAK_FRACTION = 0.94  # the part of the peak that products of XLA reach (docs/notes/cpu_log.md)
_TINY_SLOWDOWN = (
    7.5  # so many times slower are products of less than a vector's work (docs/notes/cpu_log.md)
)
_FUNCTION = 23  # `tanh` takes as long as so many additions: XLA's polynomial, a division and the reading of both
# Products of bfloat16, where the processor has instructions for them: 1.4 to 4.4 times the rate of float32 for 2^19 to 2^28
# operations on an Intel Xeon with AMX.
_BFLOAT16 = 2.0
_KERNEL = 0.1e-6  # of XLA's CPU runtime: 0.05 to 0.2 us a kernel
# A core reads 16 bytes a clock from a cache. Memory gives one core a third of that, and takes a third again where pages are
# written for the first time.
_FROM_CACHE = 16
_FROM_MEMORY = 5
_TO_MEMORY = 5 / 3


def processor(vector: int = 32, near: int = 1 << 20, last: int = 32 << 20) -> Machine:
    """Returns the constants of a CPU.

    Args:
        vector: the bytes of a vector.
        near: the bytes of the cache of one core.
        last: the bytes of the last cache, which cores share; half of it is counted.
    """
    lanes = min(vector, 32) / 4
    products = _PEAK_FRACTION * 2 * _UNITS * lanes * _CLOCK * (_TWICE_AS_WIDE if vector > 32 else 1)
    element = (
        1 / (_CLOCK * lanes) / 1.4
    )  # some are fused into multiply-adds, or run next to each other
    return Machine(
        product_rate=products,
        tiny_product_rate=products / _TINY_SLOWDOWN,
        call=4 * _KERNEL,
        bulk_call=30 * _KERNEL,
        kernel=_KERNEL,
        trip=2 * _KERNEL,
        elementwise_trip=_KERNEL / 10,
        array=_KERNEL / 12,
        element=element,
        function=_FUNCTION * element,
        cache_rate=_FROM_CACHE * _CLOCK,
        read_rate=_FROM_MEMORY * _CLOCK,
        write_rate=_TO_MEMORY * _CLOCK,
        cache_bytes=max(near, last // 2),
        core_cache_bytes=near,
    )


CPU = processor()  # a processor of which nothing is known


@functools.cache
def this_processor() -> Machine:
    """Returns the constants of the CPU that runs this process, from what the system reports."""
    sizes = {level: size for level, size in _caches().items() if 1 << 15 <= size <= 1 << 30}
    near = sizes.get(2, CPU.core_cache_bytes)
    flags = os.environ.get("XLA_FLAGS", "")
    machine = processor(vector_bytes(flags), near, sizes.get(3, max(4 * near, 8 << 20)))
    narrow = _BFLOAT16 if {"amx_bf16", "avx512_bf16"} & instructions() else 1.0
    return machine._replace(one_kernel_bytes=one_kernel_bytes(flags), bfloat16=narrow)


def one_kernel_bytes(flags: str = "") -> float:
    """Returns what a trip of a loop may access for XLA:CPU to make one kernel of it: the bytes of `flags`, or its own."""
    thresholds = re.findall(r"xla_cpu_small_while_loop_byte_threshold=(\d+)", flags)
    return float(thresholds[-1]) if thresholds else math.inf if XLA_MAKES_ONE_KERNEL else SMALL_LOOP


def vector_bytes(flags: str = "") -> int:
    """Returns the bytes of the vectors that XLA uses here, as its own `flags` bound them."""
    isa = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    widest = {"SSE4_2": 16, "AVX": 32, "AVX2": 32}.get(isa[-1].upper(), 64) if isa else 64
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    known = instructions()
    return min(widest, 64 if "avx512f" in known else 32 if "avx2" in known or not known else 16)


def instructions() -> set[str]:
    """Returns the names of sets of instructions, as Linux reports them, or nothing."""
    try:
        flags = re.search(r"^flags.*$", read_text("/proc/cpuinfo", ScanError), re.M)
    except ScanError:
        return set()
    return set(re.findall(r"\w+", flags[0])) if flags else set()


def _caches() -> dict[int, int]:
    """Returns the bytes of the caches of the first core by level, as Linux reports them, without those of instructions."""
    sizes: dict[int, int] = {}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                read_text(path / name, ScanError).strip() for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                sizes[int(level)] = int(size.removesuffix("K")) << 10
        except ValueError:  # a ScanError, or no number
            continue
    return sizes


# Accelerators -----------------------------------------------------------------------------------------------------------

# Bandwidth, operations and caches are those of `jrnn bench --compile-for h100` (`bench/compile_for.py`). A kernel in a loop
# was measured on an H200 (docs/benchmarks/h200.json): 8 a trip took 7.8 us. From the same description: 132 multiprocessors
# of 128 lanes at 1.98 GHz. A function takes 8 times as long: CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions", 16 results a clock and multiprocessor. L2 is 2.5 times as fast as memory: XLA's `kL2CacheSpeedup`.
_LAUNCH = 1e-6
_BANDWIDTH = 3.352e12
_LANES = 132 * 128 * 1.98e9
H100 = Machine(
    product_rate=495e12,
    tiny_product_rate=495e12,  # a product is a launch, however small it is
    call=_LAUNCH,
    bulk_call=_LAUNCH,
    kernel=_LAUNCH,
    trip=2 * _LAUNCH,  # the counter, and the stacks of all ys
    elementwise_trip=3 * _LAUNCH,
    array=0.0,
    element=1 / _LANES,
    function=8 / _LANES,
    cache_rate=2.5 * _BANDWIDTH,
    read_rate=_BANDWIDTH,
    write_rate=_BANDWIDTH,
    cache_bytes=52_428_800,
)

# Launches, bandwidth and operations are those of `--compile-for v5e`. How To Scale Your Model, "How to Think About TPUs":
# vectors of 8 x 128 lanes with 4 units at 1.5 GHz; VMEM of 128 MiB, 22 times as fast as memory. A function is estimated as
# ten operations. None was measured on a device.
_LAUNCH = 0.5e-6
_BANDWIDTH = 819e9
_LANES = 8 * 128 * 4 * 1.5e9
V5E = Machine(
    product_rate=197e12,
    tiny_product_rate=197e12,
    call=_LAUNCH,
    bulk_call=_LAUNCH,
    kernel=_LAUNCH,
    trip=_LAUNCH,
    elementwise_trip=2 * _LAUNCH,
    array=_LAUNCH,
    element=1 / _LANES,
    function=10 / _LANES,
    cache_rate=22 * _BANDWIDTH,
    read_rate=_BANDWIDTH,
    write_rate=_BANDWIDTH,
    cache_bytes=128 << 20,
)


def of(platform: str) -> Machine:
    """Returns the constants for a platform of JAX."""
    if platform == "cpu":
        return this_processor()
    return V5E if platform == "tpu" else H100
