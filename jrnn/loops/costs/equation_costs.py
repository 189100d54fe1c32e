"""What single equations cost: products, lookups, updates and elementwise work, at one step or at all steps together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import XLA_MAKES_ONE_KERNEL
from jrnn.loops.costs.constants import EQUATIONS
from jrnn.loops.costs.machines import CPU, Machine

LIBRARY_SUM = 4_096  # elements of a reduction that XLA:CPU gives to a library
LARGE_PRODUCT = 2 * LIBRARY_SUM  # operations of a product that stays a call
# Operations from which a product of bfloat16 is faster than one of float32: see `Machine.bfloat16`.
_LARGE_NARROW_PRODUCT = 1 << 19
_FLOAT64 = np.dtype("float64")


def has_large_products(eqns: Sequence[Eqn]) -> bool:
    """Returns True for a step that calls products: one more loop, of a few elements, takes a small part of its time."""
    products = (e for e in eqns if e.primitive.name == "dot_general")
    return any(jaxprs.operations(product) >= LARGE_PRODUCT for product in products)


def is_call(eqn: Eqn) -> bool:
    """Returns True for equations that XLA does not fuse into elementwise kernels."""
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
    """Returns True for a reduction that XLA:CPU gives to a library, which computes the operand, except what `selects`."""
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
    row = primitives.row_of(eqn)
    if eqn.primitive.name == "dot_general":
        return _product_call(eqn, machine, all_steps)
    if row.kind == "draw":
        return _draw_kernels(eqn, machine, all_steps) * machine.kernel
    return machine.kernel if row.calls is None else row.calls * machine.call


def _product_call(eqn: Eqn, machine: Machine, all_steps: bool) -> float:
    if all_steps:
        return machine.bulk_call
    if is_matvec(eqn) and machine.makes_one_kernel:
        return 0.0  # the product is in the kernel of the loop
    is_written_out = has_one_row(eqn) and jaxprs.operations(eqn) <= LARGE_PRODUCT
    slower = EQUATIONS.one_row_fraction if is_written_out else 1
    return machine.kernel + slower * _tiny_seconds(eqn, machine)


def _draw_kernels(eqn: Eqn, machine: Machine, all_steps: bool) -> int:
    """Returns the kernels of a draw. At one step its rounds are an inner loop, or part of the step's kernel."""
    if all_steps:
        return EQUATIONS.draw_kernels_of_all_steps
    if machine.one_kernel_bytes == math.inf:
        return 0
    is_one_kernel = 2 * sum(map(jaxprs.nbytes, eqn.outvars)) <= machine.one_kernel_bytes
    return EQUATIONS.draw_kernels_in_one if is_one_kernel else EQUATIONS.draw_kernels_in_several


def _tiny_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns what a product costs in addition to its operations at the rate of large ones."""
    slower = 1 / machine.tiny_product_rate - 1 / machine.product_rate
    return min(machine.call, jaxprs.operations(eqn) * slower)


def is_matvec(eqn: Eqn) -> bool:
    """Returns True for a product with a vector, which XLA:CPU computes in the program of the loop, without a call."""
    batch = eqn.params["dimension_numbers"][1][0]
    return (not batch and any(a.aval.ndim == 1 for a in eqn.invars)) or is_one_row(eqn)


def is_one_row(eqn: Eqn) -> bool:
    """Returns True for matrices of one row by matrices, since jaxlib 0.12. XLA before calls them."""
    return XLA_MAKES_ONE_KERNEL and has_one_row(eqn)


def has_one_row(eqn: Eqn) -> bool:
    """Returns True for a product of matrices if one of them has one row."""
    is_product = eqn.primitive.name == "dot_general" and all(a.aval.ndim > 1 for a in eqn.invars)
    return is_product and min(_sides(eqn))[0] == 1


def _sides(eqn: Eqn) -> list[tuple[int, int]]:
    """Returns the rows of each operand of a product, and the elements of a row that are multiplied and summed."""
    numbers = zip(eqn.invars, *eqn.params["dimension_numbers"])
    return [_rows_and_summed(a.aval.shape, tuple(s), tuple(b)) for a, s, b in numbers]


@functools.lru_cache(maxsize=1024)  # called often, and most products are alike
def _rows_and_summed(
    shape: tuple[Any, ...], summed: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[int, int]:
    free = jaxprs.other_axes(len(shape), (*summed, *batch))
    free_sizes = jaxprs.take(shape, free)
    return jaxprs.elements(free_sizes), jaxprs.elements(jaxprs.take(shape, summed))


def packing_seconds(
    eqn: Eqn, moving: Collection[Var], xs: Collection[Var], machine: Machine
) -> float:
    """Returns the time in which a product packs a large operand at each call, less what larger arrays would cost.

    These are its results, and the other operand if the loop computes it. `moving` are the values that differ between steps.
    """
    if eqn.primitive.name != "dot_general" or is_matvec(eqn):
        return 0.0
    contracted, batch = eqn.params["dimension_numbers"]
    rows = []
    packed_bytes = 0
    result_bytes = sum(map(jaxprs.nbytes, eqn.outvars))
    for operand, axes in zip(eqn.invars, contracted):
        if not jaxprs.is_in(operand, moving):
            packed_bytes += jaxprs.nbytes(operand)
            continue
        free = jaxprs.other_axes(operand.aval.ndim, axes)
        rows.append(jaxprs.elements(jaxprs.take(operand.aval.shape, free)))
        if operand not in xs:
            result_bytes += jaxprs.nbytes(operand)
    if any(batch) or len(rows) != 1 or rows[0] < EQUATIONS.min_packed_rows:
        return 0.0
    if packed_bytes <= EQUATIONS.min_packed_caches * machine.core_cache_bytes:
        return 0.0
    is_far = packed_bytes > machine.core_cache_bytes
    rate = machine.read_rate if is_far else EQUATIONS.own_cache * machine.cache_rate
    return max(packed_bytes - EQUATIONS.packed_bytes_of_result * result_bytes, 0) / rate


def operation_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns the time of the operations of a product."""
    operations = jaxprs.operations(eqn)
    seconds = operations / machine.product_rate
    is_narrow = all(a.aval.dtype == jnp.bfloat16 for a in eqn.invars)
    return seconds / (
        machine.bfloat16 if is_narrow and operations >= _LARGE_NARROW_PRODUCT else 1.0
    )


class _Run(NamedTuple):
    """How an equation runs that is not fused.

    Attributes:
        machine: the constants.
        all_steps: it is computed for all steps together.
        reads_all: all of its operands differ between steps, or it is computed for one step.
        size: the bytes that it reads and writes.
        moved: the time of reading and writing these bytes.
        elements: of its largest result.
    """

    machine: Machine
    all_steps: bool
    reads_all: bool
    size: int
    moved: float
    elements: int

    def function_seconds(self, eqn: Eqn, elements: float) -> float:
        """Returns the time of some elements of the equation's function."""
        cost = primitives.row_of(eqn).cost
        return elements * self.machine.function * (1.0 if cost is None else cost)


def product_seconds(eqn: Eqn, moving: Collection[Var] | None, machine: Machine) -> float:
    """Returns the time of a product, a convolution, a solver, a sort, a draw or a running sum, without its call.

    Args:
        eqn: the equation.
        moving: the values that differ between steps, if it is computed for all steps together; None for one step.
        machine: the constants.
    """
    read = [a for a in eqn.invars if moving is None or jaxprs.is_in(a, moving)]
    size = sum(map(jaxprs.nbytes, (*eqn.outvars, *read)))
    run = _Run(
        machine=machine,
        all_steps=moving is not None,
        reads_all=len(read) == len(eqn.invars),
        size=size,
        moved=machine.reading(size, size),
        elements=max((jaxprs.elements(v.aval.shape) for v in eqn.outvars), default=0),
    )
    rule = primitives.rule_of(eqn, _RULES)
    if rule is not None:
        return rule(eqn, run)
    return run.moved + run.function_seconds(eqn, run.elements)


def _matrix_product_seconds(eqn: Eqn, run: _Run) -> float:
    """Returns the time of a product: of its operations or of reading its operands, whichever takes longer."""
    machine = run.machine
    moved = run.moved
    is_tiny = run.reads_all if run.all_steps else is_matvec(eqn)
    if not run.all_steps and is_one_row(eqn):
        lanes = EQUATIONS.vector_elements
        is_tiny = any(summed < lanes or 1 < rows < lanes for rows, summed in _sides(eqn))
        if run.size <= machine.core_cache_bytes:
            moved /= EQUATIONS.own_cache
    added = _tiny_seconds(eqn, machine) if is_tiny else 0.0
    by_rows = EQUATIONS.transposed if jaxprs.is_by_rows(eqn) and not run.all_steps else 1.0
    return by_rows * max(operation_seconds(eqn, machine), moved) + added


def _convolution_seconds(eqn: Eqn, run: _Run) -> float:
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    taps = jaxprs.elements(kernel) // max(jaxprs.extent(kernel[numbers.rhs_spec[0]]), 1)
    operations = EQUATIONS.convolution_operations * 2 * run.elements * taps
    seconds = max(operations / run.machine.product_rate, run.moved)
    is_grouped = run.all_steps and run.reads_all  # a group for each step
    return seconds + is_grouped * call_seconds(eqn, run.machine)


def _solver_seconds(eqn: Eqn, run: _Run) -> float:
    """Returns the time of a factorization or of the solution of systems. Of many matrices, each is one call."""
    shape = eqn.invars[0].aval.shape
    matrices = jaxprs.elements(shape[:-2])
    is_batched = run.all_steps or matrices > 1
    slower = 1.0
    if eqn.primitive.name == "triangular_solve" and is_batched:
        slower = EQUATIONS.batched_systems
    operations = jaxprs.elements(shape) * jaxprs.extent(shape[-1]) * EQUATIONS.solver_operations
    return slower * (matrices * run.machine.call + operations / run.machine.product_rate)


def _order_seconds(eqn: Eqn, run: _Run) -> float:
    shape = eqn.invars[0].aval.shape
    doublings = math.log2(jaxprs.extent(shape[-1]) + 1) if eqn.primitive.name == "sort" else 1
    return run.function_seconds(eqn, doublings * jaxprs.elements(shape))


def _draw_seconds(eqn: Eqn, run: _Run) -> float:
    functions = EQUATIONS.draw_functions * max(run.elements, EQUATIONS.draw_min_elements)
    if run.all_steps:
        drawn = max(run.elements, EQUATIONS.draw_min_elements_of_all_steps)
        functions = EQUATIONS.draw_functions_of_all_steps * drawn
    return run.moved + functions * run.machine.function


_RULES: dict[str, Callable[[Eqn, _Run], float]] = {  # by primitive or kind
    "dot_general": _matrix_product_seconds,
    "conv_general_dilated": _convolution_seconds,
    "solver": _solver_seconds,
    "order": _order_seconds,
    "draw": _draw_seconds,
}


def indexing_seconds(eqn: Eqn, all_steps: bool, in_place: bool, machine: Machine) -> float:
    """Returns the time of a lookup or an update at indices. An update in place moves only what it writes."""
    name = eqn.primitive.name
    indices = 1
    if name not in ("dynamic_slice", "dynamic_update_slice"):
        indices = jaxprs.elements(eqn.invars[1].aval.shape[:-1])
    table_bytes = 0
    whole_bytes = 0
    if primitives.is_kind(eqn, "lookup"):
        placed = eqn.outvars[0]
        table_bytes = jaxprs.nbytes(eqn.invars[0])
    else:
        placed = eqn.invars[1 if name == "dynamic_update_slice" else 2]
        if not in_place:
            whole_bytes = 2 * jaxprs.nbytes(eqn.outvars[0])
    size = whole_bytes + 2 * jaxprs.nbytes(placed)
    functions = EQUATIONS.placed_functions * jaxprs.elements(placed.aval.shape)
    if all_steps:
        functions += EQUATIONS.index_functions_of_all_steps * indices
    else:
        functions += EQUATIONS.index_functions * indices
    return machine.reading(size, max(size, table_bytes)) + functions * machine.function


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
    elements = max([jaxprs.elements(aval.shape) for aval in avals], default=1)
    count = max(wide * elements, EQUATIONS.min_elements)
    if cost is not None:
        size = jaxprs.elements(eqn.outvars[0].aval.shape)
        is_unrolled = EQUATIONS.unvectorized_from <= size <= EQUATIONS.unvectorized_to
        if alone and machine.makes_one_kernel and is_unrolled:
            count = EQUATIONS.unvectorized_functions * wide * size
        return count * machine.function * cost
    slower = 1.0
    if reduces:
        is_along_last = eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]
        slower = 4.0 if is_along_last else 1.5  # XLA:CPU vectorizes reductions along other axes
    return count * machine.element * slower
