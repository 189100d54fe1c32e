"""An affine loop as one call of the kernel for CPUs, which runs it in blocks of steps.

The kernel also does the arithmetic before and after the affine part, for a tile of steps at once. What it cannot compute is
computed for all steps before or after the call.

Shapes: T time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var
from jrnn.loops.ir import Loop, Results, Unsupported, Values
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.affine_program import (
    OF_STEPS,
    Encoded,
    Instruction,
    Instructions,
    encoded,
    is_known,
    key_of,
    known_from_values,
    operands_of,
)
from jrnn.loops.kernels.native.affine_step import Equations, ScalarStep, Variables
from jrnn.loops.passes.sums import linear_region

# affine.h has the same numbers
BLOCK = 16  # steps
_MAX_CARRIES = 8
_MAX_RESPONSES = 64  # of a value to an input: their matrices stay in the first-level cache
MAX_INSTRUCTIONS = 200


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
        block_steps: the steps of a block.
    """

    step: ScalarStep
    outs: Variables
    sums: Sums
    tile_eqns: Equations
    outer_eqns: Equations
    encoded: Encoded
    level: int = 0
    block_steps: ClassVar[int] = BLOCK

    def run(
        self,
        consts: Sequence[Array],
        init: Sequence[Array],
        xs: Sequence[Array],
        length: int,
    ) -> Results:
        """Computes what the kernel reads for all steps, calls it, and computes the rest.

        Invariant: the values of a step equal the loop's up to rounding. Sums do too, in another order.
        """
        step = self.step
        loop = step.loop
        program = self.encoded
        sums = self.sums
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, [*program.stacks, *program.constants], env, stacked)

        carry = list(map(jnp.asarray, jaxprs.take(init, step.carries)))
        read = [*jaxprs.take(env, program.constants), *carry]
        read += jaxprs.take(stacked, program.stacks)
        operands = [jnp.asarray(v).astype(step.dtype) for v in read]
        n_numbers = len(carry) + len(sums.inner)
        shapes = [()] * n_numbers + [(length,)] * len(self.outs)
        out = library.call(
            library.AFFINE,
            operands,
            [(shape, step.dtype) for shape in shapes],
            level=self.level,
            program=program.program,
            literals=program.literals,
        )

        last = dict(zip(step.carries, out))
        totals = dict(zip(sums.inner, out[len(carry) :]))
        stacked.update(zip(self.outs, out[n_numbers:]))
        return results_after_call(
            loop,
            SummedCarries(step.sums, sums.outer, sums.eqns, totals),
            init=init,
            last=last,
            length=length,
            env=env,
            stacked=stacked,
        )


class SummedCarries(NamedTuple):
    """Carries that only add.

    Attributes:
        added: the values that are added to each, by its position.
        outer: the values that are summed after the call.
        eqns: linear equations from sums to others.
        totals: the sums of the kernel; gets the others.
    """

    added: Mapping[int, Sequence[Atom]]
    outer: Sequence[Var]
    eqns: Sequence[Eqn]
    totals: Env


def results_after_call(
    loop: Loop,
    sums: SummedCarries,
    *,
    init: Values,
    last: dict[int, Array],
    length: int,
    env: Env,
    stacked: Env,
) -> Results:
    """Returns the results of a loop after a call of the kernel: computes the rest of all steps, and what carries add up.

    Args:
        loop: the loop.
        sums: its carries that only add.
        init: the first carries.
        last: the last carries that the kernel computes, by their positions.
        length: the number of steps.
        env: the values of constants.
        stacked: the values of all steps, of inputs and of the kernel.
    """
    targets = jaxprs.variables([*loop.ys, *sums.outer])
    jaxprs.over_time(loop.eqns, targets, env, stacked)
    for v in sums.outer:
        sums.totals[v] = jnp.sum(jaxprs.stack(v, env, stacked, length), 0)
    jaxprs.evaluate(sums.eqns, sums.totals)
    for i, atoms in sums.added.items():
        last[i] = init[i]
        for atom in atoms:
            if jaxprs.is_literal(atom):
                last[i] = last[i] + length * jaxprs.value({}, atom)
            else:
                last[i] = last[i] + sums.totals[atom]
    ys = [jaxprs.stack(a, env, stacked, length) for a in loop.ys]
    return jaxprs.take(last, range(len(init))), ys


@dataclass(frozen=True)
class Sums:
    """What is summed over all steps.

    Attributes:
        inner: by the kernel.
        outer: after the call.
        eqns: linear equations from these sums to others.
    """

    inner: Variables
    outer: Variables
    eqns: Equations

    @staticmethod
    def of(
        loop: Loop,
        added: Sequence[Var],
        numbers: Collection[Var],
    ) -> Sums:
        """Returns the sums of values. The kernel sums `numbers`, and so what arrays are made of that are made of these."""
        producers = jaxprs.producers(loop.eqns)
        through = set[int]()
        sources = dict[Var, None]()
        for v in added:
            region = None
            if v not in numbers:
                region = linear_region(v, producers, numbers, ("add_any", "concatenate"))
            if region is not None and all(jaxprs.is_in(a, numbers) for a in region[1]):
                through.update(map(id, region[0]))
                sources.update(dict.fromkeys(region[1]))
            else:
                sources[v] = None
        return Sums(
            inner=tuple(filter(numbers.__contains__, sources)),
            outer=tuple(v for v in sources if v not in numbers),
            eqns=tuple(eqn for eqn in loop.eqns if id(eqn) in through),
        )


def affine_call(
    step: ScalarStep,
    ends: Sequence[Atom] = (),
    recurrence: Sequence[Eqn] = (),
) -> AffineCall:
    """Returns the call for a step. Raises `Unsupported` with the reason if there is none.

    Args:
        step: the step.
        ends: of a single carry, its coefficient and its offset, as `jrnn.loops.affine.reader` reads them.
        recurrence: the equations that compute these.
    """
    _check(step)
    loop = step.loop
    coefficients = list(map(key_of, ends))
    of_recurrence = list(map(Instruction.of, recurrence))

    # Before the affine part, the kernel computes what that part reads and values determine.
    known = known_from_values(step)
    read = [*step.inputs, *coefficients, *operands_of(of_recurrence)]
    before, _ = jaxprs.needed(known, [k for k in read if isinstance(k, Var)], ())
    there = {*step.values, *jaxprs.results(before)}
    computed = there.union(jaxprs.results(known))
    numbers = {v for v in computed if v.aval.dtype == step.dtype}

    # After it, what sums and the rest of the step read, which is computed for all steps after the call.
    added = jaxprs.variables(itertools.chain.from_iterable(step.sums.values()))
    sums = Sums.of(loop, added, numbers)
    targets = [*jaxprs.variables(loop.ys), *sums.outer]
    given = {*loop.consts, *loop.xs}
    eqns_after, read = jaxprs.needed(loop.eqns, targets, given.union(numbers))
    outs = tuple(dict.fromkeys(filter(numbers.__contains__, read)))
    after, _ = jaxprs.needed(known, [*outs, *sums.inner], there)
    products = _only_summed(after, sums.inner, outs)
    after = [e for e in after if e.outvars[0] not in products]

    summands = []
    for v in sums.inner:
        if v in products:
            summands.append(Instruction.of(products[v]).operands)
        else:
            summands.append((v,))
    instructions = Instructions(
        before=[*map(Instruction.of, before), *of_recurrence],
        affine=[Instruction.of(e) for e in step.eqns if is_known(e, step.dtype, OF_STEPS)],
        after=list(map(Instruction.of, after)),
        recurrence=len(recurrence),
    )
    if sum(map(len, instructions[:3])) > MAX_INSTRUCTIONS:
        raise Unsupported(f"the step has more than {MAX_INSTRUCTIONS} operations")
    program = encoded(step, instructions, coefficients, summands, outs)

    varying = loop.varying
    eqns_before, _ = jaxprs.needed(loop.eqns, program.stacks, given)
    outer = [e for e in (*eqns_before, *eqns_after) if e.outvars[0] in varying]
    return AffineCall(
        step=step,
        outs=outs,
        sums=sums,
        tile_eqns=(*before, *after),
        outer_eqns=tuple(outer),
        encoded=program,
    )


def _check(step: ScalarStep) -> None:
    """Raises `Unsupported` if the kernel is not there, or cannot run a step of this size."""
    library.require()
    carries = len(step.carries)
    inputs = len(step.inputs)
    values = len(step.values)
    if carries > _MAX_CARRIES:
        raise Unsupported(
            f"{carries} carries read each other, more than the {_MAX_CARRIES} of the kernel"
        )
    if inputs * values > _MAX_RESPONSES and carries > 1:
        raise Unsupported(
            f"{values} values of {inputs} inputs, more than the kernel computes at once"
        )


def _only_summed(
    eqns: Sequence[Eqn],
    sums: Sequence[Var],
    outs: Sequence[Var],
) -> dict[Var, Eqn]:
    """Returns the products that nothing reads but a sum, by their results."""
    read = set(outs)
    for eqn in eqns:
        read.update(jaxprs.inputs(eqn))
    products = {}
    for eqn in eqns:
        v = eqn.outvars[0]
        if eqn.primitive.name == "mul" and v in sums and v not in read:
            products[v] = eqn
    return products
