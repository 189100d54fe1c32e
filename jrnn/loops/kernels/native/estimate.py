"""What a call of the kernel costs, in the terms of the cost model (`loops/costs/estimates.py`): times of one core.

Ratios to the constants of the machine, measured on AMD EPYCs with AVX-512 and with AVX2 (docs/notes/native_kernel.md).
"""

from __future__ import annotations

import math

from jrnn.loops.costs.machines import Machine
from jrnn.loops.kernels.native.operations import Operation
from jrnn.loops.kernels.native.program import KernelProgram
from jrnn.loops.kernels.native.views import View

_RATE = 1.15  # products run so many times as fast as those of XLA, whose weights are packed at each call
_FAR = 4  # packed matrices larger than so many caches of a core are not read while products run
_PACKING = 2  # packing takes so many times as long as reading from memory
_CALL = 100  # a call takes as long as so many kernels of XLA: decoding, memory and threads
# the same of a stage and of an instruction
_STAGE = 0.6
_INSTRUCTION = 0.15
_KERNELS_PER_ROW = 0.1  # the same of a reduction of one row, and of a row of a product whose last panel is not full
# an instruction on one element, and a function of it, compared with those of XLA
_ELEMENT = 2
_FUNCTION = 0.5
_SCALAR = 20  # the same of a function without vectors
_FUNCTIONS = frozenset(("exp", "expm1", "log", "log1p", "logistic", "tanh"))
_PANELS = {
    "avx512": 256,
    "avx2": 64,
    "base": 32,
}  # bytes of the columns that a product computes, even if it needs few
_SCALARS = frozenset(("cos", "erf", "sin"))
_REDUCTIONS = frozenset(("reduce_min", "reduce_max", "reduce_sum"))


def matrix_bytes(program: KernelProgram) -> int:
    return _bytes(_products(program), program)


def _bytes(products: list[Operation], program: KernelProgram) -> int:
    sizes = {(o.matrix.array, o.matrix.offset): o.width * o.matrix.dims[0][0] for o in products}
    return sum(sizes.values()) * program.dtype.itemsize


def terms(program: KernelProgram, machine: Machine, instructions: str) -> dict[str, float]:
    """Returns the time of all steps on one core with a set of instructions, by the names of `costs/estimates.py`."""
    size = matrix_bytes(program)
    wide = program.dtype.itemsize / 4
    steps = program.loop.length
    panel = _PANELS[instructions] // program.dtype.itemsize if program.rows > 1 else 1
    computed = [(-(-o.width // panel) * panel, o) for o in _products(program)]
    operations = sum(2 * program.rows * width * o.matrix.dims[0][0] for width, o in computed) * wide
    computing = operations / (_RATE * machine.product_rate)
    reading = size / machine.cache_rate
    products = (
        computing + reading if size > _FAR * machine.core_cache_bytes else max(computing, reading)
    )
    work = [o for stage in program.stages for o in stage if o.kind != "product"]
    calls = machine.kernel * (_STAGE * len(program.stages) + _INSTRUCTION * len(work))
    by_row = sum(width > o.width for width, o in computed) + sum(
        o.kind in _REDUCTIONS for o in work
    )
    calls += machine.kernel * _KERNELS_PER_ROW * program.rows * by_row
    plain = [
        o for o in _products(program) if program.rows == 1 and o.matrix.dims[1][1] == 1
    ]  # read as they are
    elements = sum(_each(o, machine) * _width(o) for o in work) * program.rows * wide
    return {
        "products": steps * products,
        "elements": steps * elements,
        "calls": _CALL * machine.kernel + steps * calls,
        "packing": _PACKING * (size - _bytes(plain, program)) / machine.read_rate,
    }


def _products(program: KernelProgram) -> list[Operation]:
    return [o for stage in program.stages for o in stage if o.matrix is not None]


def _width(o: Operation) -> int:
    """Returns the elements of a row that an operation computes, or reads if it reduces them."""
    read = o.operands[0]
    if o.is_elementwise or not isinstance(read, View):
        return o.width
    return math.prod(n for axis, (n, _) in enumerate(read.dims) if axis != read.row)


def _each(o: Operation, machine: Machine) -> float:
    if o.kind in _FUNCTIONS:
        return _FUNCTION * machine.function
    return _SCALAR * machine.function if o.kind in _SCALARS else _ELEMENT * machine.element
