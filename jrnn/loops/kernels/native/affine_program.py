"""What the kernel computes of an affine loop for a tile of steps at once, before and after the affine part."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.kernels.native.affine_step import ScalarStep, Variables
from jrnn.loops.kernels.native.encoder import OPCODES
from jrnn.loops.kernels.native.steps import ELEMENTWISE, OF_BOOLEANS, SWAPPED

# Of a register: a variable, or what `repr` prints of a number: NaN is not equal to itself, and -0.0 is to 0.0.
Key = Any

OF_STEPS = ("copy", "add", "sub", "mul", "div", "neg", "select")  # computed step by step
_STORED = {"none": 0, "before": 1, "after": 2}


class Instruction(NamedTuple):
    """An operation on registers, whose keys are variables, what is printed of numbers, and objects."""

    operation: str
    out: Key
    operands: tuple[Key, ...]

    @staticmethod
    def of(eqn: Eqn) -> Instruction:
        known = operation_of(eqn)
        assert known is not None
        name, direction = known
        return Instruction(name, eqn.outvars[0], tuple(map(key_of, eqn.invars[::direction])))


class Instructions(NamedTuple):
    """The instructions of an affine loop.

    Attributes:
        before: of a tile of steps; the last ones compute the coefficients of the only carry.
        affine: of one step.
        after: of a tile again.
        recurrence: how many instructions compute coefficients.
    """

    before: Sequence[Instruction]
    affine: Sequence[Instruction]
    after: Sequence[Instruction]
    recurrence: int


def key_of(atom: Atom) -> Key:
    if jaxprs.is_literal(atom):
        return repr(float(atom.val))
    return atom


def operation_of(eqn: Eqn) -> tuple[str, int] | None:
    """Returns the kernel's name of an operation, and the direction in which it reads the operands; or None."""
    name = eqn.primitive.name
    reads_booleans = bool(eqn.invars) and eqn.invars[0].aval.dtype == jnp.bool_
    if primitives.is_retyping(eqn) or (name == "convert_element_type" and reads_booleans):
        return "copy", 1
    if name == "integer_pow":
        if eqn.params["y"] == 2:
            return "square", 1
        return None
    if name in OF_BOOLEANS:
        if reads_booleans:
            return OF_BOOLEANS[name], 1
        return None
    if name == "select_n" and (len(eqn.invars) != 3 or not reads_booleans):
        return None
    if name in SWAPPED:
        return SWAPPED[name], -1
    if name in ELEMENTWISE:
        return ELEMENTWISE[name], 1
    return None


def is_known(
    eqn: Eqn,
    dtype: Any,
    names: Collection[str] = OPCODES,
) -> bool:
    """Returns True for one of some operations on single numbers of a type, and on booleans, which are 0 and 1."""
    operation = operation_of(eqn)
    if operation is None or operation[0] not in names:
        return False
    for v in (*eqn.invars, *eqn.outvars):
        if v.aval.shape or v.aval.dtype not in (dtype, jnp.bool_):
            return False
    return True


def known_from_values(step: ScalarStep) -> list[Eqn]:
    """Returns the equations of a step that the kernel can compute for a tile of steps once it has the values."""
    results = {*step.values}
    eqns = list[Eqn]()
    for eqn in step.loop.eqns:
        is_there = all(v in results for v in jaxprs.inputs(eqn) if v in step.loop.on_carry)
        if is_there and eqn.outvars[0] not in results and is_known(eqn, step.dtype):
            results.add(eqn.outvars[0])
            eqns.append(eqn)
    return eqns


class Encoded(NamedTuple):
    """The program of an affine loop, which `src/entry.cpp` reads, with the variables that it reads, sums and stores."""

    constants: Variables
    stacks: Variables
    program: np.ndarray
    literals: np.ndarray


def encoded(
    step: ScalarStep,
    instructions: Instructions,
    coefficients: Sequence[Key],
    sums: Sequence[Sequence[Key]],
    outs: Sequence[Var],
) -> Encoded:
    """Returns the program of an affine loop.

    Args:
        step: the loop's step.
        instructions: what is computed before, in and after the affine part.
        coefficients: of the only carry, a and b; or none if there are others.
        sums: for each sum its summands, or two factors of them.
        outs: what is stored for all steps.
    """
    before, affine, after, recurrence = instructions
    in_tile = dict.fromkeys([*operands_of((*before, *after)), *step.inputs, *coefficients])
    in_tile.update(dict.fromkeys(itertools.chain.from_iterable(sums)))
    ends = list(map(key_of, (*step.new, *step.values)))
    in_steps = dict.fromkeys([*operands_of(affine), *ends])
    keys = {**in_steps, **in_tile}

    # What a tile computes of constants is a constant in the affine part.
    results_before, results_affine, results_after = map(_results_of, (before, affine, after))
    of_tile = {*step.values, *results_before, *results_after}
    of_step = {*step.carry, *step.inputs, *results_affine}
    varying = step.loop.varying
    constants = []
    stacks = []
    for v in keys:
        is_outside_step = v in in_steps and v not in of_step
        is_outside_tile = v in in_tile and v not in of_tile
        if isinstance(v, Var) and (is_outside_step or is_outside_tile):
            if v not in varying:
                constants.append(v)
            elif v in in_tile:
                stacks.append(v)
    literals = [k for k in keys if isinstance(k, str)]

    # The registers of a tile, and of one step.
    shared = (*constants, *literals)
    tile = numbered(*shared, *stacks, *results_before, *step.values, *results_after)
    numbers = numbered(*shared, *step.carry, *step.inputs, *results_affine)

    program = [jnp.dtype(step.dtype).itemsize, step.loop.length, step.loop.reverse]
    program.append(_STORED[step.stored])
    program += map(len, (step.carries, step.inputs, step.values, constants, stacks, sums, outs))
    program += jaxprs.take(tile, coefficients) or [-1, -1]
    program.append(recurrence)
    program += map(len, (before, affine, after))
    for part, registers in ((before, tile), (affine, numbers), (after, tile)):
        for i in part:
            read = jaxprs.take(registers, i.operands)
            unused = [0] * (3 - len(read))
            program += [OPCODES[i.operation], registers[i.out], *read, *unused]
    program += [*jaxprs.take(tile, step.inputs), *jaxprs.take(numbers, ends)]
    for summands in sums:
        program += [*jaxprs.take(tile, summands), -1][:2]
    program += jaxprs.take(tile, outs)
    return Encoded(
        constants=tuple(constants),
        stacks=tuple(stacks),
        program=np.array(program, np.int64),
        literals=np.array(list(map(float, literals)), np.float64),
    )


def operands_of(instructions: Iterable[Instruction]) -> list[Key]:
    return list(itertools.chain.from_iterable(i.operands for i in instructions))


def _results_of(instructions: Iterable[Instruction]) -> list[Key]:
    return [i.out for i in instructions]


def numbered(*keys: Key) -> dict[Key, int]:
    return {key: i for i, key in enumerate(keys)}
