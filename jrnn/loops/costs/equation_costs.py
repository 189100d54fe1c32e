"""What single equations cost: products, lookups, updates and elementwise work, at one step or at all steps together."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import XLA_MAKES_ONE_KERNEL
from jrnn.loops.costs.machines import CPU, Machine

# Times of one element of these, compared with a function, measured on a CPU: `sort` for each doubling of the length.
_SORTING = 8
_SELECTING = 7
_RUNNING = 7
_FUNCTIONS_PER_ELEMENT = 0.5  # that a lookup or an update places
_FUNCTIONS_PER_INDEX = (
    3,
    30,
)  # at one step; and for all steps together, which XLA:CPU does not vectorize
# A draw of random bits is elementwise work: the time of one element, and the fewest elements that a draw costs as much as,
# at one step and for all steps together.
_DRAWING = (4, 32)
_DRAWING_FOR_ALL = (6, 8)
# The kernels of a draw for all steps together; and at one step, if its rounds are one kernel (jax 0.10.2: 0.6 us for 4 to
# 128 words) or several (2.9 us for 160 to 1,024 words).
_ROUNDS = 70
_ROUNDS_OF_ONE_STEP = (6, 29)
_GAMMA = 300  # functions, of one number, which is drawn by rejection: 200 ns with jax 0.12
LIBRARY_SUM = 4_096  # elements of a reduction that XLA:CPU gives to a library
LARGE_PRODUCT = 2 * LIBRARY_SUM  # operations of a product that stays a call
MIN_ELEMENTS = 24  # arrays with fewer elements cost as much as with so many
# XLA:CPU unrolls loops over so few elements, more than a vector has, and computes functions of each by itself: with jax 0.12
# a step with one logistic function of 8, 16 and 64 elements took 40, 84 and 56 ns.
_UNVECTORIZED = range(9, 33)
_UNVECTORIZED_COST = 6
_FLOAT64 = np.dtype("float64")
_SOLVING = 30  # an operation of a solver on small matrices takes so many times the time of one in a product
_LARGE = (
    1 << 19
)  # operations from which a product of bfloat16 is faster than one of float32: see `Machine.bfloat16`
_TRANSPOSED = 1.25  # a product x W^T in a loop takes so many times the time of x W
# XLA before jaxlib 0.12 writes small products of one row itself, where others are slower than large ones by calls: with jax
# 0.10.2 [1, 32] by [32, 32] takes 113 ns, of 222 that would be estimated, and [1, 64] by [64, 64] 422 of 565.
_ONE_ROW_FRACTION = 0.5  # of what a tiny product costs more
_OWN_CACHE = 2  # a core reads its own cache so many times as fast as one that cores share
_VECTOR = 8  # elements
_PACKED_ROWS = 8  # a product of fewer rows reads its other operand in place; others pack it first, at each call
_PACKED = 0.25  # smaller operands, in parts of the cache of a core, stay there, where packing them takes little
_RESULTS = 4  # results of many steps at once leave these caches: each byte takes as long as packing so many
# an operation of a small convolution, compared with products; and its call
_CONVOLVING = 4
_CONVOLUTION = 6
_BATCHED = 10  # many triangular systems at once, which JAX does not give to LAPACK, take so many times the time of one


def is_call(eqn: Eqn) -> bool:
    """Returns True for what is not fused into kernels of elementwise equations."""
    name = eqn.primitive.name
    if name == "dot_general":
        return not is_outer(eqn)
    row = primitives.row_of(eqn)
    return row.heavy or not (row.cheap or row.kind in ("reduction", "key"))


def is_outer(eqn: Eqn) -> bool:
    """Returns True for a product that sums nothing, which XLA computes as a multiplication of elements."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[a] == 1 for a in axes)


def is_library_reduction(eqn: Eqn) -> bool:
    """Returns True for a reduction that XLA:CPU gives to a library, which computes the operand but for what `selects`."""
    large = jaxprs.elements(eqn.invars[0].aval.shape) >= LIBRARY_SUM
    return large and eqn.primitive.name in ("reduce_max", "reduce_min", "reduce_sum")


def selects(eqn: Eqn) -> bool:
    """Returns True for a select, and for a truth value as a number, whose product XLA writes as a select."""
    of_truth: bool = (
        eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == bool
    )
    return of_truth or eqn.primitive.name == "select_n"


def call_seconds(eqn: Eqn, machine: Machine, all_steps: bool = False) -> float:
    """Returns what an equation costs at each call, for one step or for many. Tiny products are slower, but are not calls."""
    if eqn.primitive.name == "dot_general":
        if all_steps:
            return machine.bulk_call
        in_the_loop = (
            is_matvec(eqn) and machine.elementwise_trip < machine.kernel
        )  # a kernel a loop, as on a CPU
        if in_the_loop:
            return 0.0
        slower = (
            _ONE_ROW_FRACTION if has_one_row(eqn) and jaxprs.operations(eqn) <= LARGE_PRODUCT else 1
        )
        return machine.kernel + slower * _tiny_seconds(eqn, machine)
    if primitives.is_kind(eqn, "draw"):
        return (_ROUNDS if all_steps else _rounds(eqn, machine)) * machine.kernel
    if primitives.is_kind(eqn, "lookup") or eqn.primitive.name == "dynamic_update_slice":
        return 0.0  # part of a kernel
    if eqn.primitive.name == "conv_general_dilated":
        return _CONVOLUTION * machine.call
    return machine.call if primitives.is_contraction(eqn) else machine.kernel


def _rounds(eqn: Eqn, machine: Machine) -> int:
    """Returns the kernels of a draw at one step, whose rounds are an inner loop: none if it is part of the step's kernel."""
    if machine.one_kernel_bytes == math.inf:
        return 0
    one_kernel, several = _ROUNDS_OF_ONE_STEP
    return (
        one_kernel
        if 2 * sum(map(jaxprs.nbytes, eqn.outvars)) <= machine.one_kernel_bytes
        else several
    )


def _tiny_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns what a product costs next to its operations at the rate of large ones."""
    return min(
        machine.call,
        jaxprs.operations(eqn) * (1 / machine.tiny_product_rate - 1 / machine.product_rate),
    )


def is_matvec(eqn: Eqn) -> bool:
    """Returns True for a product with a vector, which XLA:CPU computes in the program of the loop, without a call."""
    batch = eqn.params["dimension_numbers"][1][0]
    return (not batch and any(a.aval.ndim == 1 for a in eqn.invars)) or is_one_row(eqn)


def is_one_row(eqn: Eqn) -> bool:
    """Returns True for matrices of one row by matrices, since jaxlib 0.12. XLA before calls them."""
    return XLA_MAKES_ONE_KERNEL and has_one_row(eqn)


def has_one_row(eqn: Eqn) -> bool:
    """Returns True for a product of matrices, one of which has one row."""
    is_product = eqn.primitive.name == "dot_general" and all(a.aval.ndim > 1 for a in eqn.invars)
    return is_product and min(_sides(eqn))[0] == 1


def _sides(eqn: Eqn) -> list[tuple[int, int]]:
    """Returns the rows of each operand of a product, and the elements of a row that are multiplied and summed."""
    numbers = zip(eqn.invars, *eqn.params["dimension_numbers"])
    return [_rows_and_summed(a.aval.shape, tuple(s), tuple(b)) for a, s, b in numbers]


@functools.lru_cache(maxsize=1024)  # asked several times for each product, of which most are alike
def _rows_and_summed(
    shape: tuple[Any, ...], summed: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[int, int]:
    free_sizes = [n for axis, n in enumerate(shape) if axis not in summed and axis not in batch]
    return jaxprs.elements(free_sizes), jaxprs.elements([shape[axis] for axis in summed])


def packing_seconds(
    eqn: Eqn, moving: Collection[Var], xs: Collection[Var], machine: Machine
) -> float:
    """Returns the time in which a product packs a large operand at each call, less what larger arrays would cost.

    These are its results, and the other operand if the loop computes it. `moving` are the values that differ between steps.
    """
    if eqn.primitive.name != "dot_general" or is_matvec(eqn):
        return 0.0
    axes, batch = eqn.params["dimension_numbers"]
    moved = [(a.aval.shape, at) for a, at in zip(eqn.invars, axes) if jaxprs.is_in(a, moving)]
    rows = [jaxprs.elements([n for i, n in enumerate(shape) if i not in at]) for shape, at in moved]
    if any(batch) or len(rows) != 1 or rows[0] < _PACKED_ROWS:
        return 0.0
    size = sum(jaxprs.nbytes(a) for a in eqn.invars if not jaxprs.is_in(a, moving))
    results = sum(map(jaxprs.nbytes, eqn.outvars))
    results += sum(jaxprs.nbytes(a) for a in eqn.invars if jaxprs.is_in(a, moving) and a not in xs)
    if size <= _PACKED * machine.core_cache_bytes:
        return 0.0
    return max(size - _RESULTS * results, 0) / (
        machine.read_rate if size > machine.core_cache_bytes else _OWN_CACHE * machine.cache_rate
    )


def operation_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns the time of the operations of a product."""
    operations = jaxprs.operations(eqn)
    narrow = all(a.aval.dtype == jnp.bfloat16 for a in eqn.invars)
    return (
        operations
        / machine.product_rate
        / (machine.bfloat16 if narrow and operations >= _LARGE else 1.0)
    )


def product_seconds(eqn: Eqn, moving: Collection[Var] | None, machine: Machine) -> float:
    def is_read(atom: Atom) -> bool:
        return moving is None or jaxprs.is_in(atom, moving)

    name = eqn.primitive.name
    out = sum(map(jaxprs.nbytes, eqn.outvars))
    size = out + sum(jaxprs.nbytes(a) for a in eqn.invars if is_read(a))
    moved = machine.reading(size, size)
    count = max((jaxprs.elements(v.aval.shape) for v in eqn.outvars), default=0)
    shapes = [a.aval.shape for a in eqn.invars]
    all_steps = moving is not None
    if name == "dot_general":
        is_single = all(map(is_read, eqn.invars)) if all_steps else is_matvec(eqn)
        if not all_steps and is_one_row(eqn):
            is_single = any(summed < _VECTOR or 1 < rows < _VECTOR for rows, summed in _sides(eqn))
            moved /= _OWN_CACHE if size <= machine.core_cache_bytes else 1
        each = _tiny_seconds(eqn, machine) if is_single else 0.0
        by_rows = _TRANSPOSED if jaxprs.is_by_rows(eqn) and not all_steps else 1.0
        return by_rows * max(operation_seconds(eqn, machine), moved) + each
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        taps = jaxprs.elements(shapes[1]) // max(jaxprs.extent(shapes[1][numbers.rhs_spec[0]]), 1)
        calls = all_steps and all(map(is_read, eqn.invars))  # a group for each step
        return (
            max(_CONVOLVING * 2 * count * taps / machine.product_rate, moved)
            + calls * _CONVOLUTION * machine.call
        )
    if primitives.is_kind(eqn, "solver"):
        n = jaxprs.extent(shapes[0][-1])
        matrices = jaxprs.elements(shapes[0][:-2])  # also for many at once, each is one call
        slower = _BATCHED if name == "triangular_solve" and (all_steps or matrices > 1) else 1
        return slower * (
            matrices * machine.call
            + jaxprs.elements(shapes[0]) * n * _SOLVING / machine.product_rate
        )
    if name == "optimization_barrier":
        return moved
    of_first = jaxprs.elements(shapes[0]) if shapes else count
    if name == "sort":
        n = jaxprs.extent(shapes[0][-1])
        return _SORTING * of_first * math.log2(n + 1) * machine.function
    if name in ("top_k", "approx_top_k"):
        return _SELECTING * of_first * machine.function
    if name == "random_gamma":
        return _GAMMA * count * machine.function
    if primitives.is_kind(eqn, "draw"):
        drawing, min_count = _DRAWING_FOR_ALL if all_steps else _DRAWING
        return moved + drawing * max(count, min_count) * machine.function
    slower = _RUNNING if primitives.is_kind(eqn, "running") else 1
    return moved + slower * count * machine.function


def indexing_seconds(eqn: Eqn, all_steps: bool, in_place: bool, machine: Machine) -> float:
    """Returns the time of a lookup or an update at indices. An update in place moves only what it writes."""
    name = eqn.primitive.name
    at = {"gather": 1, "dynamic_slice": None, "dynamic_update_slice": None}.get(name, 1)
    rows = 1 if at is None else jaxprs.elements(eqn.invars[at].aval.shape[:-1])
    table = 0
    if primitives.is_kind(eqn, "lookup"):
        placed = eqn.outvars[0]
        whole = 0
        table = jaxprs.nbytes(eqn.invars[0])
    else:
        placed = eqn.invars[1 if name == "dynamic_update_slice" else 2]
        whole = 0 if in_place else 2 * jaxprs.nbytes(eqn.outvars[0])
    size = whole + 2 * jaxprs.nbytes(placed)
    count = (
        _FUNCTIONS_PER_ELEMENT * jaxprs.elements(placed.aval.shape)
        + rows * _FUNCTIONS_PER_INDEX[all_steps]
    )
    return machine.reading(size, max(size, table)) + count * machine.function


def element_seconds(eqn: Eqn, machine: Machine = CPU, alone: bool = False) -> float:
    """Returns the time of the operations of an elementwise equation, a view or a reduction.

    Args:
        eqn: the equation.
        machine: the constants.
        alone: nothing in the loop is a call, so that it is one kernel.
    """
    row = primitives.row_of(eqn)
    cost = row.cost
    reduces = row.kind == "reduction"
    if cost == 0.0:
        return 0.0
    avals = [a.aval for a in (eqn.invars if reduces else eqn.outvars)]
    wide = 1.0  # a vector has half as many numbers of 64 bits, and XLA:CPU sums products of these by themselves
    if _FLOAT64 in [aval.dtype for aval in avals]:
        wide = 4.0 if reduces else 2.0
    count = max(
        wide * max([jaxprs.elements(aval.shape) for aval in avals], default=1), MIN_ELEMENTS
    )
    if cost is not None:
        size = jaxprs.elements(eqn.outvars[0].aval.shape)
        by_itself = (
            alone and size in _UNVECTORIZED and machine.elementwise_trip < machine.kernel
        )  # as on a CPU
        return (_UNVECTORIZED_COST * wide * size if by_itself else count) * machine.function * cost
    last = (
        reduces and eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]
    )  # XLA:CPU vectorizes others
    return count * machine.element * (4.0 if last else 1.5 if reduces else 1.0)
