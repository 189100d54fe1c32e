"""A loop over lanes as one call of the kernel for CPUs, whose carries are each affine in themselves.

The kernel computes all that is elementwise, for a tile of steps at once. What it cannot compute is computed for all steps
before or after the call.

Shapes: T time, M lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var
from jrnn.loops.ir import Loop, Results, Unsupported
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.affine_call import (
    MAX_INSTRUCTIONS,
    SummedCarries,
    results_after_call,
)
from jrnn.loops.kernels.native.affine_program import (
    Encoded,
    Instruction,
    Key,
    key_of,
    numbered,
    operands_of,
)
from jrnn.loops.kernels.native.affine_step import Equations, Variables
from jrnn.loops.kernels.native.encoder import OPCODES
from jrnn.loops.kernels.native.lane_step import OLD, LaneStep, Recurrence, lane_step


@dataclass(frozen=True, eq=False)
class LaneCall:
    """A loop over lanes for the kernel.

    Attributes:
        step: the step.
        outs: what the kernel stores of each step.
        sums: what it sums over steps for each lane.
        sum_eqns: linear equations from these sums to others.
        outer_sums: what is summed after the call.
        tile_eqns: what the kernel computes for a tile of steps.
        outer_eqns: what is computed for all steps before and after the call.
        encoded: the kernel's program.
        level: the place of the kernel's instructions in `library.loaded()`.
    """

    step: LaneStep
    outs: Variables
    sums: Variables
    sum_eqns: Equations
    outer_sums: Variables
    tile_eqns: Equations
    outer_eqns: Equations
    encoded: Encoded
    level: int = 0

    @property
    def loop(self) -> Loop:
        return self.step.loop

    def run(
        self,
        consts: Sequence[Array],
        init: Sequence[Array],
        xs: Sequence[Array],
        length: int,
    ) -> Results:
        """Computes what the kernel reads for all steps, calls it, and computes the rest."""
        step = self.step
        loop = step.loop
        program = self.encoded
        lanes = jaxprs.elements(step.shape)
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        constants = dict.fromkeys(program.constants)
        for eqn in self.sum_eqns:
            constants.update(dict.fromkeys(v for v in jaxprs.inputs(eqn) if v not in loop.varying))
        jaxprs.over_time(loop.eqns, [*program.stacks, *constants], env, stacked)

        operands = [env[v].reshape(-1) for v in program.constants]
        operands += [jnp.asarray(init[r.position]).reshape(lanes) for r in step.recurrences]
        operands += [jnp.zeros(lanes, step.dtype)] * len(self.sums)
        operands += [self._rows(stacked[v], length) for v in program.stacks]
        n_carries = len(step.recurrences) + len(self.sums)
        shapes = [(lanes,)] * n_carries + [(length, lanes)] * len(self.outs)
        out = library.call(
            library.LANES,
            [v.astype(step.dtype) for v in operands],
            [(shape, step.dtype) for shape in shapes],
            level=self.level,
            program=program.program,
            literals=program.literals,
        )

        last = {}
        for r, value in zip(step.recurrences, out):
            last[r.position] = value.reshape(step.shape)
        totals = dict(env)
        for v, total in zip(self.sums, out[len(step.recurrences) :]):
            totals[v] = total.reshape(step.shape)
        for v, rows in zip(self.outs, out[n_carries:]):
            stacked[v] = rows.reshape(length, *step.shape)
        return results_after_call(
            loop,
            SummedCarries(step.sums, self.outer_sums, self.sum_eqns, totals),
            init=init,
            last=last,
            length=length,
            env=env,
            stacked=stacked,
        )

    def _rows(self, stack: Array, length: int) -> Array:
        """Returns the values of all steps, [T, M]; numbers of steps are the same for all lanes."""
        shape = self.step.shape
        if stack.ndim == 1:
            stack = stack.reshape(length, *[1] * len(shape))
        return jnp.broadcast_to(stack, (length, *shape)).reshape(length, -1)


class _Part(NamedTuple):
    """A recurrence, with the instructions of a tile before it, and the keys of the carry before and after each step."""

    recurrence: Recurrence
    before_it: Sequence[Instruction]
    before: Key
    after: Key


class _Parts(NamedTuple):
    recurrences: list[_Part]
    after: list[Instruction]


def lane_call(loop: Loop) -> LaneCall:
    """Returns the call for a loop. Raises `Unsupported` with the reason if there is none."""
    library.require()
    step = lane_step(loop)
    sums, sum_eqns, outer_sums = step.sums_by_lane()

    # Equations before each recurrence, and what the rest of the step reads.
    tile_eqns: list[Eqn] = []
    parts = []
    computed = set[Var]()
    for r in step.recurrences:
        carry = loop.carry[r.position]
        new = loop.carry_out[r.position]
        read = [key for key in r.read() if isinstance(key, Var)]
        before, _ = jaxprs.needed(step.known, read, {*computed, *loop.carry})
        computed.update(jaxprs.results(before))
        tile_eqns += before
        parts.append(_Part(r, [*map(Instruction.of, before), *r.negations], carry, key_of(new)))
        if r.shifted is None:
            computed.add(new)

    numbers = step.numbers
    targets = [*jaxprs.variables(loop.ys), *outer_sums]
    given = {*loop.consts, *loop.xs}
    eqns_after, read = jaxprs.needed(loop.eqns, targets, given.union(numbers))
    outs = tuple(dict.fromkeys(filter(numbers.__contains__, read)))
    after, _ = jaxprs.needed(step.known, [*outs, *sums], {*computed, *loop.carry})
    tile_eqns += after
    instructions_after = list(map(Instruction.of, after))
    for v in sums:
        parts.append(_Part(Recurrence(-1, added=v), instructions_after, object(), object()))
        instructions_after = []
    program = _encoded(step, _Parts(parts, instructions_after), outs)

    varying = loop.varying
    eqns_before, _ = jaxprs.needed(loop.eqns, program.stacks, given)
    outer = [e for e in (*eqns_before, *eqns_after) if e.outvars[0] in varying]
    return LaneCall(
        step=step,
        outs=outs,
        sums=sums,
        sum_eqns=sum_eqns,
        outer_sums=outer_sums,
        tile_eqns=tuple(tile_eqns),
        outer_eqns=tuple(outer),
        encoded=program,
    )


def _register(registers: Mapping[Key, int], key: Key) -> int:
    """Returns the register of a key, -1 if there is none, and -2 for the old carry."""
    if key is OLD:
        return -2
    return -1 if key is None else registers[key]


def _of_constants(instructions: Sequence[Instruction], step: LaneStep) -> list[Instruction]:
    """Returns the instructions whose results are the same at all steps."""
    varying = {*step.loop.varying, *(i.out for i in instructions)}
    once = []
    for i in instructions:
        if varying.isdisjoint(i.operands):
            varying.remove(i.out)
            once.append(i)
    return once


def _encoded(step: LaneStep, parts: _Parts, outs: Variables) -> Encoded:
    """Returns the program of a loop over lanes, which `src/entry.cpp` reads."""
    instructions: list[Instruction] = []
    results = dict[Key, None]()
    read = dict[Key, None]()
    for part in parts.recurrences:
        instructions += part.before_it
        results[part.before] = None
        read.update(dict.fromkeys(part.recurrence.read()))
        if part.recurrence.shifted is None:
            results[part.after] = None
    instructions += parts.after
    if len(instructions) > MAX_INSTRUCTIONS:
        raise Unsupported(f"the step has more than {MAX_INSTRUCTIONS} operations")
    once = _of_constants(instructions, step)
    results_once = [i.out for i in once]
    instructions = [*once, *(i for i in instructions if i not in once)]
    results.update(dict.fromkeys(i.out for i in instructions))
    read.update(dict.fromkeys([*operands_of(instructions), *outs]))

    constants = []
    literals = []
    stacks = []
    for key in read:
        if key in results:
            continue
        if isinstance(key, str):
            literals.append(key)
        elif key in step.loop.varying:
            stacks.append(key)
        else:
            constants.append(key)
    others = filter(lambda key: key not in results_once, results)
    registers = numbered(*constants, *literals, *results_once, *stacks, *others)

    itemsize = jnp.dtype(step.dtype).itemsize
    program = [itemsize, step.loop.length, step.loop.reverse, jaxprs.elements(step.shape)]
    program += map(len, (constants, stacks, parts.recurrences, outs, registers, instructions, once))
    for part in parts.recurrences:
        r = part.recurrence
        program += [sum(i not in once for i in part.before_it), r.shifted is not None]
        reset, reset_where, fresh = r.reset or (None, False, None)
        choice, choice_where, chosen = r.choice or (None, False, None)
        program += [_register(registers, r.added), _register(registers, reset), reset_where]
        program += [_register(registers, k) for k in (fresh, r.coefficient, r.offset, choice)]
        program += [choice_where, _register(registers, chosen)]
        program += [registers[part.before], registers[part.after]]
        program += [part.before in read, part.after in read]
    for i in instructions:
        operands = jaxprs.take(registers, i.operands)
        unused = [0] * (3 - len(operands))
        program += [OPCODES[i.operation], registers[i.out], *operands, *unused]
    program += jaxprs.take(registers, outs)
    return Encoded(
        constants=tuple(constants),
        stacks=tuple(stacks),
        program=np.array(program, np.int64),
        literals=np.array(list(map(float, literals)), np.float64),
    )
