"""A loop as one call of the kernel for CPUs.

Shapes: N rows, T time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import mesh_axes_type
from jrnn.loops.costs import estimates
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Results, Unsupported
from jrnn.loops.ir.description import Description, described
from jrnn.loops.kernels.native import estimate as costs
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.program import KernelProgram, program_of, transposed_matrices
from jrnn.loops.kernels.native.sums import contract
from jrnn.loops.passes.split_loop import SplitLoop, over_time
from jrnn.loops.passes.sums import Contract

_ROWS = 2  # the fewest rows of a thread
_WORK = 3e6  # the fewest floating-point operations of a thread, about 50 microseconds


@dataclass(frozen=True)
class Native:
    """Runs a loop by the kernel. `level` is the place of its instructions in `library.loaded()`; `threads` bounds them."""

    program: KernelProgram
    level: int = 0
    threads: int | None = None

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        program = self.program
        loop = self.program.loop
        core = self.program.core
        assert length == loop.length
        env = jaxprs.evaluate(program.constant_eqns, dict(zip(loop.consts, consts)))
        stacked = dict(zip(loop.xs, xs))
        computed = {v for e in program.hoisted_eqns for v in e.outvars}
        over_time(program.hoisted_eqns, [*computed], env, stacked)
        operands = [
            *(env[v] for v in program.constants),
            *(jnp.asarray(v).astype(program.dtype) for v in init),
            *(stacked[v] for v in core.xs),
        ]
        # Inside `jax.shard_map`, types have the mesh axes over which a value varies. The results vary as the operands do.
        axes = mesh_axes_type(*operands)
        typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=axes)
        types = [typed(v.aval.shape, program.dtype) for v in core.carry]
        types += [typed((length, *y.aval.shape), y.aval.dtype) for y in core.ys]
        out = jax.ffi.ffi_call(library.TARGET, types)(
            *operands,
            program=program.encoded,
            literals=program.literals,
            level=np.int64(self.level),
            threads=np.int64(self.threads or self.useful_threads()),
        )
        last = [value.astype(v.aval.dtype) for value, v in zip(out, core.carry)]
        stacked.update(
            (y, value) for y, value in zip(core.ys, out[len(last) :]) if not jaxprs.is_literal(y)
        )
        over_time(
            program.sunk_eqns, [v for e in program.sunk_eqns for v in e.outvars], env, stacked
        )
        return last, [jaxprs.stack(y, env, stacked, length) for y in loop.ys]

    def useful_threads(self) -> int:
        return max(
            1, min(self.program.rows // _ROWS, int(self.flops * self.program.loop.length / _WORK))
        )

    def is_worth_a_call(self, machine: Machine) -> bool:
        """Returns False for one row and small matrices: XLA computes such products in the kernel of the loop."""
        return (
            self.program.rows > 1 or costs.matrix_bytes(self.program) > machine.core_cache_bytes / 8
        )

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns the estimate of the loop.

        The memory is that of arrays of all steps that the call reads or writes only because the kernel cannot compute
        something. Packed matrices and the values of one step are not counted.
        """
        program = self.program
        loop = self.program.loop
        machine = estimator.machine
        inside = estimator.part(
            [e for e in loop.eqns if not estimator.moving.isdisjoint(e.outvars)], loop.outputs
        )
        stacks_seconds = {"stacks": estimator.trips(loop, inside)["stacks"]}
        others = {*loop.xs, *jaxprs.variables(loop.ys)}
        hoisted = [v for v in program.core.xs if v not in others]
        sunk = [v for v in jaxprs.variables(loop.ys) if v not in program.core.ys]
        bulk = [
            estimator.part(e, outs, all_steps=True)
            for e, outs in ((program.hoisted_eqns, hoisted), (program.sunk_eqns, sunk))
        ]
        stacks = estimator.sizes({*hoisted, *jaxprs.variables(program.core.ys)} - others)
        size = loop.length * (stacks + max(part.peak_bytes for part in bulk))
        moved = machine.writing(loop.length * stacks, size) + machine.reading(
            loop.length * stacks, size
        )
        terms = [part.terms(machine, loop.length, size, 1) for part in bulk]
        kernel_terms = {
            **costs.terms(program, machine, library.loaded().instruction_sets[self.level]),
            "stacks": moved,
        }
        return estimates.estimate(
            estimates.total(stacks_seconds, kernel_terms, *terms), inside.peak_bytes + size
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the products of a step."""
        products = (o for stage in self.program.stages for o in stage if o.matrix is not None)
        return sum(2 * self.program.rows * o.width * o.matrix.dims[0][0] for o in products)

    def describe(self) -> Description:
        return described(self.program.loop, str(self))

    def __str__(self) -> str:
        products = sum(o.kind == "product" for stage in self.program.stages for o in stage)
        sets = library.loaded().instruction_sets[self.level]
        rows = self.program.rows
        shared = f"{rows} batch rows on up to {self.useful_threads()} threads"
        if rows == 1:
            shared = "one batch row, so one thread and products of a matrix and a vector"
        return (
            f"one call of the kernel for CPUs ({sets}): {len(self.program.stages)} stages and {products} products a step, "
            f"{shared}"
        )


def native_node(loop: Loop) -> Native:
    """Returns the runner of a loop. Raises `Unsupported` with the reason if there is none."""
    kernel = library.loaded()
    if kernel.reason:
        raise Unsupported(f"the kernel for CPUs is not there: {kernel.reason}")
    return Native(program_of(loop))


def split_for_kernel(split: Callable[[Contract], SplitLoop]) -> tuple[SplitLoop, Native]:
    """Returns a loop in parts whose sums over time are the kernel's too, and the runner of the core."""
    split_loop = split(contract)
    core = split_loop.residual
    transposes = transposed_matrices(
        split_loop.constant_eqns, core
    )  # in the loop, where they cost nothing
    transposed = {e.outvars[0] for e in transposes}
    consts = tuple(
        dict.fromkeys(
            v for v in (*core.consts, *(e.invars[0] for e in transposes)) if v not in transposed
        )
    )
    split_loop = replace(
        split_loop, residual=replace(core, consts=consts, eqns=(*transposes, *core.eqns))
    )
    return split_loop, native_node(split_loop.residual)
