"""What a call of the kernel costs, in the terms of the cost model (`loops/costs.py`): times of one core.

The constants were measured on an AMD EPYC with AVX-512, next to those of the model.
"""

from __future__ import annotations

from jrnn.loops.native.steps import Operation
from jrnn.loops.native.writer import Program

_PRODUCTS = 105e9  # floating-point operations a second
_NEAR = 50e9  # bytes of packed matrices a second, as fast as a core can use them
_FAR, _CACHE = 25e9, 4 << 20  # the same of matrices larger than a cache, which is not hidden behind the products
_PACKING = 3e9  # bytes a second
_CALL = 30e-6
_STAGE = 60e-9
_INSTRUCTION = 15e-9
_ELEMENT = 0.06e-9  # of one instruction; or of one that computes a function
_FUNCTION = 0.35e-9
_SCALAR = 15e-9  # of a function without vectors
_FUNCTIONS = frozenset(("exp", "expm1", "log", "log1p", "logistic", "tanh"))
_SCALARS = frozenset(("cos", "erf", "sin"))


def packed_bytes(program: Program) -> int:
    """Returns the bytes of the packed matrices."""
    found = {(o.matrix.array, o.matrix.offset): o.width * o.matrix.dims[0][0] for o in _products(program)}
    return sum(found.values()) * program.dtype.itemsize


def seconds(program: Program) -> float:
    """Returns the time of all steps on one core."""
    size = packed_bytes(program)
    wide = program.dtype.itemsize / 4
    products = sum(2 * program.rows * o.width * o.matrix.dims[0][0] for o in _products(program)) * wide / _PRODUCTS
    step = max(products, size / _NEAR) + (size / _FAR if size > _CACHE else 0.0)
    for stage in program.stages:
        step += _STAGE + sum(_elementwise(o, program.rows) * wide for o in stage)
    return _CALL + size / _PACKING + program.loop.length * step


def _products(program: Program) -> list[Operation]:
    return [o for stage in program.stages for o in stage if o.matrix is not None]


def _elementwise(o: Operation, rows: int) -> float:
    if o.kind == "product":
        return 0.0
    each = _FUNCTION if o.kind in _FUNCTIONS else _SCALAR if o.kind in _SCALARS else _ELEMENT
    return _INSTRUCTION + o.width * rows * each
