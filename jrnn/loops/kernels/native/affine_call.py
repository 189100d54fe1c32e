"""An affine loop as one call of the kernel for CPUs, which runs it in blocks of steps.

The kernel also does the arithmetic before and after the affine part, for a tile of steps at once. What it cannot compute is
computed for all steps before or after the call.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var
from jrnn.jaxprs.jax_internals import mesh_axes_type
from jrnn.loops.ir import Loop, Results, Unsupported
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.affine_program import (
    OF_STEPS,
    Encoded,
    FirstOrder,
    Instruction,
    encoded,
    is_known,
    known_from_values,
)
from jrnn.loops.kernels.native.affine_step import AffineStep
from jrnn.loops.passes.sums import linear_region

# the steps of a block, and the most carries: affine.h has the same numbers
BLOCK = 16
_CARRIES = 8
_LARGEST = (
    64  # the most responses of a value to an input: their matrices stay in the first-level cache
)
_MOST = 200  # instructions


@dataclass(frozen=True, eq=False)
class AffineCall:
    """An affine step for the kernel.

    Attributes:
        step: the step.
        outs: what the kernel stores of each step.
        sums: what is summed over all steps.
        tile_eqns: what the kernel computes for a tile of steps at once.
        outer_eqns: what is computed for all steps before and after the call.
        encoded: the kernel's program.
        level: the place of the kernel's instructions in `library.loaded()`.
    """

    step: AffineStep
    outs: tuple[Var, ...]
    sums: Sums
    tile_eqns: tuple[Eqn, ...]
    outer_eqns: tuple[Eqn, ...]
    encoded: Encoded
    level: int = 0

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: int
    ) -> Results:
        """Computes what the kernel reads for all steps, calls it, and computes the rest.

        Invariant: the values of a step are those of the loop but for rounding, and so are sums, whose order is another one.
        """
        step = self.step
        loop = self.step.loop
        program = self.encoded
        sums = self.sums
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, [*program.stacks, *program.constants], env, stacked)
        carry = [jnp.asarray(init[i]) for i in step.carries]
        constants = [jnp.asarray(env[v]).astype(step.dtype) for v in program.constants]
        operands = [*constants, *carry, *(stacked[v].astype(step.dtype) for v in program.stacks)]
        # Inside `jax.shard_map`, types have the mesh axes over which a value varies. The results vary as the operands do.
        typed = functools.partial(
            jax.ShapeDtypeStruct, dtype=step.dtype, manual_axis_type=mesh_axes_type(*operands)
        )
        types = [
            *(typed(()) for _ in (*carry, *sums.inner)),
            *(typed((length,)) for _ in self.outs),
        ]
        call = jax.ffi.ffi_call(library.AFFINE, types)
        out = call(
            *operands,
            program=program.program,
            literals=program.literals,
            level=np.int64(self.level),
        )
        last = dict(zip(step.carries, out))
        totals = dict(zip(sums.inner, out[len(carry) :]))
        stacked.update(zip(self.outs, out[len(carry) + len(totals) :]))
        jaxprs.over_time(loop.eqns, jaxprs.variables([*loop.ys, *sums.outer]), env, stacked)
        totals |= {v: jnp.sum(jaxprs.stack(v, env, stacked, length), 0) for v in sums.outer}
        jaxprs.evaluate(sums.eqns, totals)
        for i, atoms in step.sums.items():
            added = (
                length * jaxprs.value({}, a) if jaxprs.is_literal(a) else totals[a] for a in atoms
            )
            last[i] = functools.reduce(add, added, init[i])
        return [last[i] for i in range(len(init))], [
            jaxprs.stack(a, env, stacked, length) for a in loop.ys
        ]


@dataclass(frozen=True)
class Sums:
    """What is summed over all steps.

    Attributes:
        inner: by the kernel.
        outer: after the call.
        eqns: linear equations from these sums to others.
    """

    inner: tuple[Var, ...]
    outer: tuple[Var, ...]
    eqns: tuple[Eqn, ...]

    @staticmethod
    def of(loop: Loop, added: Sequence[Var], numbers: Collection[Var]) -> Sums:
        """Returns the sums of values. Those of `numbers` are the kernel's, and so are those of arrays made of these."""
        producers = jaxprs.producers(loop.eqns)
        through = set[int]()
        sources = dict[Var, None]()
        for v in added:
            region = (
                None
                if v in numbers
                else linear_region(v, producers, numbers, ("add_any", "concatenate"))
            )
            eqns, ends = region or ((), [v])
            if not all(jaxprs.is_in(a, numbers) for a in ends):
                eqns = ()
                ends = [v]
            through.update(map(id, eqns))
            sources.update(dict.fromkeys(ends))
        inner, outer = (
            tuple(v for v in sources if (v in numbers) == is_inner) for is_inner in (True, False)
        )
        return Sums(inner, outer, tuple(e for e in loop.eqns if id(e) in through))


def affine_call(step: AffineStep) -> AffineCall:
    """Returns the call for a step. Raises `Unsupported` with the reason if there is none."""
    if library.loaded().reason:
        raise Unsupported(f"the kernel for CPUs is not there: {library.loaded().reason}")
    if len(step.carries) > _CARRIES:
        raise Unsupported(
            f"{len(step.carries)} carries read each other, more than the {_CARRIES} of the kernel"
        )
    if len(step.inputs) * len(step.values) > _LARGEST and len(step.carries) > 1:
        raise Unsupported(
            f"{len(step.values)} values of {len(step.inputs)} inputs, more than the kernel computes at once"
        )
    loop = step.loop
    known = known_from_values(step)
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    affine = [Instruction.of(e) for e in step.eqns if is_known(e, step.dtype, OF_STEPS)]
    first_order = FirstOrder(step) if len(step.carries) == 1 else None
    recurrence = first_order.instructions if first_order else []
    core = (first_order.coefficient, first_order.offset) if first_order else ()
    read = [
        k
        for k in (*step.inputs, *core, *(k for i in recurrence for k in i.operands))
        if isinstance(k, Var)
    ]
    before, _ = jaxprs.needed(known, read, ())
    there = {*step.values, *(e.outvars[0] for e in before)}
    numbers = {v for v in (*there, *(e.outvars[0] for e in known)) if v.aval.dtype == step.dtype}
    sums = Sums.of(
        loop, jaxprs.variables(a for atoms in step.sums.values() for a in atoms), numbers
    )
    ends = [*jaxprs.variables(loop.ys), *sums.outer]
    outer, read = jaxprs.needed(loop.eqns, ends, {*loop.consts, *loop.xs, *numbers})
    outs = tuple(dict.fromkeys(v for v in read if v in numbers))
    after, _ = jaxprs.needed(known, [v for v in (*outs, *sums.inner) if v not in there], there)
    products = _only_summed(after, sums.inner, outs)
    after = [e for e in after if e.outvars[0] not in products]
    tiles = [[*map(Instruction.of, before), *recurrence], [*map(Instruction.of, after)]]
    if sum(map(len, tiles)) + len(affine) > _MOST:
        raise Unsupported(f"the step has more than {_MOST} operations")
    summands = [Instruction.of(products[v]).operands if v in products else (v,) for v in sums.inner]
    program = encoded(step, tiles[0], affine, tiles[1], first_order, summands, outs)
    outer = [*jaxprs.needed(loop.eqns, program.stacks, {*loop.consts, *loop.xs})[0], *outer]
    return AffineCall(
        step,
        outs,
        sums,
        (*before, *after),
        tuple(e for e in outer if e.outvars[0] in varying),
        program,
    )


def _only_summed(eqns: Sequence[Eqn], sums: Sequence[Var], outs: Sequence[Var]) -> dict[Var, Eqn]:
    """Returns the products that nothing reads but a sum, by their results."""
    read = {*outs, *(v for e in eqns for v in jaxprs.inputs(e))}
    return {
        e.outvars[0]: e
        for e in eqns
        if e.primitive.name == "mul" and e.outvars[0] in sums and e.outvars[0] not in read
    }
