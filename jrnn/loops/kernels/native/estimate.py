"""What a call of the kernel costs, in the terms of the cost model (`loops/costs/estimates.py`): times of one core.

Its constants are `costs.constants.NativeKernelCosts`.
"""

from __future__ import annotations

import math

from jrnn.loops.costs.constants import NATIVE_KERNEL
from jrnn.loops.costs.machines import Machine
from jrnn.loops.kernels.native.operations import Operation
from jrnn.loops.kernels.native.program import KernelProgram
from jrnn.loops.kernels.native.views import View

_FUNCTIONS = frozenset(("exp", "expm1", "log", "log1p", "logistic", "tanh"))
_SCALARS = frozenset(("cos", "erf", "sin"))  # functions without vectors
_REDUCTIONS = frozenset(("reduce_min", "reduce_max", "reduce_sum"))
# Bytes of the columns that a product computes, even if it needs few, by the set of instructions.
_PANEL_BYTES = {"avx512": 256, "avx2": 64, "base": 32}


def matrix_bytes(program: KernelProgram) -> int:
    return _bytes(_products(program), program)


def _bytes(products: list[Operation], program: KernelProgram) -> int:
    sizes = {(o.matrix.array, o.matrix.offset): o.width * o.matrix.dims[0][0] for o in products}
    return sum(sizes.values()) * program.dtype.itemsize


def terms(program: KernelProgram, machine: Machine, instructions: str) -> dict[str, float]:
    """Returns the time of all steps on one core with a set of instructions, by the names of `costs/estimates.py`."""
    costs = NATIVE_KERNEL
    itemsize = program.dtype.itemsize
    wide = itemsize / 4
    steps = program.loop.length
    all_products = _products(program)
    work = [o for stage in program.stages for o in stage if o.kind != "product"]

    # Products, and the reading of their matrices.
    size = matrix_bytes(program)
    panel = _PANEL_BYTES[instructions] // itemsize if program.rows > 1 else 1
    operations = 0
    partial_panels = 0
    for product in all_products:
        width = -(-product.width // panel) * panel
        operations += 2 * program.rows * width * product.matrix.dims[0][0]
        partial_panels += width > product.width
    computing = operations * wide / (costs.product_speedup * machine.product_rate)
    reading = size / machine.cache_rate
    if size > costs.far_caches * machine.core_cache_bytes:
        products = computing + reading
    else:
        products = max(computing, reading)

    # Stages, instructions and rows.
    reductions = sum(o.kind in _REDUCTIONS for o in work)
    kernels = costs.stage_kernels * len(program.stages) + costs.instruction_kernels * len(work)
    kernels += costs.row_kernels * program.rows * (partial_panels + reductions)

    elements = sum(_seconds_of_element(o, machine) * _width(o) for o in work)
    unpacked = []  # matrices that are read as they are
    if program.rows == 1:
        unpacked = [o for o in all_products if o.matrix.dims[1][1] == 1]
    packed_bytes = size - _bytes(unpacked, program)
    return {
        "products": steps * products,
        "elements": steps * elements * program.rows * wide,
        "calls": (costs.call_kernels + steps * kernels) * machine.kernel,
        "packing": costs.packing_per_read * packed_bytes / machine.read_rate,
    }


def _products(program: KernelProgram) -> list[Operation]:
    return [o for stage in program.stages for o in stage if o.matrix is not None]


def _width(o: Operation) -> int:
    """Returns the elements of a row that an operation computes, or reads if it reduces them."""
    read = o.operands[0]
    if o.is_elementwise or not isinstance(read, View):
        return o.width
    return math.prod(n for axis, (n, _) in enumerate(read.dims) if axis != read.row)


def _seconds_of_element(o: Operation, machine: Machine) -> float:
    if o.kind in _FUNCTIONS:
        return NATIVE_KERNEL.function_per_xla * machine.function
    if o.kind in _SCALARS:
        return NATIVE_KERNEL.scalar_function_per_xla * machine.function
    return NATIVE_KERNEL.element_per_xla * machine.element
