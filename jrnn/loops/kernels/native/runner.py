"""Calls of the kernel for CPUs: a loop, and contractions over time such as the gradients of weights; what a call runs.

Shapes: N rows, T time. Of a contraction: R rows of all steps, M and W columns of two stacked arrays.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.kernel_calls import KernelCall
from jrnn.loops.costs.machines import Machine
from jrnn.loops.costs.times import Estimate, estimate, total
from jrnn.loops.ir import Loop, Results
from jrnn.loops.ir.description import Description, described
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.operations import Operation, View, elements_of, without
from jrnn.loops.kernels.native.program import KernelProgram, transposed_matrices
from jrnn.loops.passes.split_loop import SplitLoop
from jrnn.loops.passes.sums import ContractedAxes, dot_smaller_first

Values = Sequence[Array]

_MIN_ROWS = 2  # of a thread
_MIN_FLOPS = 3e6  # of a thread: about 50 microseconds

_FUNCTIONS = {
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "logistic", "tanh"), "functions"),
    **dict.fromkeys(("cos", "erf", "sin"), "scalar functions"),  # without vector instructions
}
_REDUCTIONS = frozenset(("reduce_min", "reduce_max", "reduce_sum"))
# Bytes of the columns that a product computes, even if it needs few, by the set of instructions.
_PANEL_BYTES = {"avx512": 256, "avx2": 64, "base": 32}

# Contractions over time for which XLA's product is as fast as a call.
_MIN_CONTRACTION_FLOPS = 1e6
_MIN_COLUMNS = 16  # with fewer columns most of a vector would be empty
_MIN_PART_COLUMNS = 64  # narrower stacked arrays would leave panels empty, and are joined


@dataclass(frozen=True)
class Native:
    """Runs a loop by the kernel. `level` is the place of its instructions in `library.loaded()`; `threads` bounds them."""

    program: KernelProgram
    level: int = 0
    threads: int | None = None

    @property
    def loop(self) -> Loop:
        """The whole loop."""
        return self.program.parts.loop

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        assert length == self.loop.length
        return self.program.parts.run(consts, init, xs, length, self._call)

    def _call(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: int,
    ) -> Results:
        """Calls the kernel for the loop that remains."""
        program = self.program
        residual = program.parts.residual
        carry = [jnp.asarray(v).astype(program.dtype) for v in init]
        operands = [*consts, *carry, *xs]
        results = [(v.aval.shape, program.dtype) for v in residual.carry]
        results += [((length, *y.aval.shape), y.aval.dtype) for y in residual.ys]
        out = library.call(
            library.TARGET,
            operands,
            results,
            level=self.level,
            program=program.encoded,
            literals=program.literals,
            threads=np.int64(self.threads or self.useful_threads()),
        )
        last = [value.astype(v.aval.dtype) for value, v in zip(out, residual.carry)]
        return last, out[len(last) :]

    def useful_threads(self) -> int:
        """Returns the most threads that all have enough rows and work."""
        by_work = int(self.flops * self.loop.length / _MIN_FLOPS)
        return max(1, min(self.program.rows // _MIN_ROWS, by_work))

    def is_worth_a_call(self, machine: Machine) -> bool:
        """Returns False for one row and small matrices: XLA computes such products in the kernel of the loop."""
        if self.program.rows > 1:
            return True
        return _matrix_bytes(self.program.products, self.program) > machine.core_cache_bytes / 8

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns the estimate of the loop.

        The memory counts arrays of all steps that the call reads or writes only because the kernel cannot compute
        something. Packed matrices and the values of one step are not counted.
        """
        parts = self.program.parts
        loop = parts.loop
        residual = parts.residual
        machine = estimator.machine
        varying_eqns = [e for e in loop.eqns if not loop.varying.isdisjoint(e.outvars)]
        inside_bytes = estimator.part(varying_eqns, loop.outputs).peak_bytes

        # What is computed for all steps before and after the call, and the arrays that are stacked only for that.
        ys = jaxprs.variables(loop.ys)
        hoisted = [v for v in residual.xs if v not in (*loop.xs, *ys)]
        sunk = [v for v in ys if v not in residual.ys]
        before = estimator.part(parts.hoisted_eqns, hoisted, all_steps=True)
        after = estimator.part(parts.sunk_eqns, sunk, all_steps=True)
        stacked = {*hoisted, *residual.ys}.difference(loop.xs, ys)
        stack_bytes = loop.length * estimator.sizes(stacked)
        size = stack_bytes + loop.length * max(before.peak_bytes, after.peak_bytes)
        seconds = total(
            {"stacks": estimator.stack_seconds(loop) + machine.moving(stack_bytes, size)},
            self.call().terms(machine),
            before.terms(machine, loop.length, size, 1),
            after.terms(machine, loop.length, size, 1),
        )
        return estimate(seconds, inside_bytes + size)

    def call(self) -> KernelCall:
        """Returns what the call runs."""
        program = self.program
        rows = program.rows
        itemsize = program.dtype.itemsize
        panel_bytes = _PANEL_BYTES[library.loaded().instruction_sets[self.level]]
        panel = panel_bytes // itemsize if rows > 1 else 1
        flops = 0
        partial_rows = 0
        unpacked = []  # one row reads a matrix as it is, if its columns are contiguous
        for product in program.products:
            width = -(-product.width // panel) * panel
            flops += 2 * rows * width * product.depth
            partial_rows += rows * (width > product.width)
            if rows == 1 and product.matrix.dims[1][1] == 1:
                unpacked.append(product)

        instructions = 0
        elements = Counter[str]()
        for o in itertools.chain(*program.stages):
            if o.matrix is None:
                instructions += 1
                partial_rows += rows * (o.kind in _REDUCTIONS)
                elements[_FUNCTIONS.get(o.kind, "elements")] += rows * _read_width(o)
        matrix_bytes = _matrix_bytes(program.products, program)
        return KernelCall(
            steps=program.parts.loop.length,
            words=itemsize / 4,
            flops=flops,
            matrix_bytes=matrix_bytes,
            packed_bytes=matrix_bytes - _matrix_bytes(unpacked, program),
            elements=elements["elements"],
            functions=elements["functions"],
            scalar_functions=elements["scalar functions"],
            stages=len(program.stages),
            instructions=instructions,
            partial_rows=partial_rows,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the products of a step."""
        return sum(2 * self.program.rows * o.width * o.depth for o in self.program.products)

    def describe(self) -> Description:
        return described(self.loop, str(self))

    def __str__(self) -> str:
        stages = len(self.program.stages)
        products = len(self.program.products)
        sets = library.loaded().instruction_sets[self.level]
        rows = self.program.rows
        shared = f"a batch of {rows} on up to {self.useful_threads()} threads"
        if rows == 1:
            shared = "one batch row, so one thread and products of a matrix and a vector"
        return f"one call of the kernel for CPUs ({sets}): {stages} stages and {products} products a step, {shared}"


def with_transposes(split_loop: SplitLoop) -> SplitLoop:
    """Returns a split whose transposed constants are back in the loop, where they cost nothing.

    The kernel packs a matrix either way.
    """
    residual = split_loop.residual
    transposes = transposed_matrices(split_loop.constant_eqns, residual)
    if not transposes:
        return split_loop
    read = [*residual.consts, *jaxprs.free_variables(transposes)]
    transposed = jaxprs.results(transposes)
    consts = tuple(dict.fromkeys(v for v in read if v not in transposed))
    residual = replace(residual, consts=consts, eqns=(*transposes, *residual.eqns))
    return replace(split_loop, residual=residual)


# Contractions over time ------------------------------------------------------------------------------


def contract(
    lhs: Array | list[Array],
    rhs: Array | list[Array],
    axes: ContractedAxes,
    precision: Any,
    preferred_element_type: Any,
) -> Array:
    """Contracts the leading axes of two stacked arrays by the kernel; other contractions are left to `dot_smaller_first`.

    XLA:CPU copies one of the arrays, transposed, before such a product, and reaches two thirds of the rate.
    A list of arrays stands for their concatenation along the last axis, the only one that is not contracted.
    """
    if isinstance(lhs, list):
        if isinstance(rhs, list):
            rhs = jnp.concatenate(rhs, -1)
        exchanged = precision[::-1] if isinstance(precision, tuple) else precision
        result = contract(rhs, lhs, axes[::-1], exchanged, preferred_element_type)
        return jnp.moveaxis(result, -1, 0)

    parts = rhs if isinstance(rhs, list) else [rhs]
    if len(parts) > 1 and parts[0].shape[-1] < _MIN_PART_COLUMNS:
        parts = [jnp.concatenate(parts, -1)]
    count = len(axes[0])
    rows = math.prod(lhs.shape[:count])
    lhs_columns = math.prod(lhs.shape[count:])
    part_columns = math.prod(parts[0].shape[count:])
    flops = 2 * rows * lhs_columns * part_columns * len(parts)
    leading = tuple(range(count))
    dtype = jnp.dtype(lhs.dtype)
    is_for_kernel = (
        tuple(axes[0]) == tuple(axes[1]) == leading
        and jnp.dtype(parts[0].dtype) == dtype
        and jnp.dtype(preferred_element_type or dtype) == dtype
        and dtype in (jnp.float32, jnp.float64)
        and min(lhs_columns, part_columns) >= _MIN_COLUMNS
        and flops >= _MIN_CONTRACTION_FLOPS
    )
    if not is_for_kernel:
        rhs = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)
        return dot_smaller_first(lhs, rhs, axes, precision, preferred_element_type)

    operands = [lhs.reshape(rows, lhs_columns)]
    operands += [part.reshape(rows, part_columns) for part in parts]
    shape = (lhs_columns, part_columns * len(parts))
    threads = np.int64(max(1, flops // _MIN_FLOPS))
    (product,) = library.call(library.SUM, operands, [(shape, dtype)], level=0, threads=threads)
    return product.reshape(*lhs.shape[count:], *parts[0].shape[count:-1], -1)


def _matrix_bytes(products: Iterable[Operation], program: KernelProgram) -> int:
    """Returns the bytes of the matrices of products, each once."""
    sizes = {(o.matrix.array, o.matrix.offset): o.width * o.depth for o in products}
    return sum(sizes.values()) * program.dtype.itemsize


def _read_width(o: Operation) -> int:
    """Returns the elements of a row that an operation computes, or reads if it reduces them."""
    read = o.operands[0]
    if o.is_elementwise or not isinstance(read, View):
        return o.width
    return elements_of(without(read.dims, read.row))
