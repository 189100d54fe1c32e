"""What the kernel computes of an affine loop for a tile of steps at once, before and after the affine part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.kernels.native.affine_step import AffineStep
from jrnn.loops.kernels.native.encoder import OPCODES
from jrnn.loops.kernels.native.steps import ELEMENTWISE, OF_BOOLEANS, SWAPPED

# keys of numbers are what `repr` prints: NaN is not equal to itself, and -0.0 is to 0.0
_ZERO = "0.0"
_ONE = "1.0"
OF_STEPS = (
    "copy",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "select",
)  # what the kernel computes step by step
_STORED = {"none": 0, "before": 1, "after": 2}
# Operations with a number at a place, and the place of the operand that is the result.
_IDENTITIES = {("mul", 0, _ONE): 1, ("mul", 1, _ONE): 0, ("div", 1, _ONE): 0}
_IDENTITIES |= {("add", 0, _ZERO): 1, ("add", 1, _ZERO): 0, ("sub", 1, _ZERO): 0}
_ZEROS = {
    ("mul", 0),
    ("mul", 1),
    ("div", 0),
    ("neg", 0),
}  # operations and the places whose 0 makes 0 of the result


class Instruction(NamedTuple):
    """An operation on registers, whose keys are variables, what is printed of numbers, and objects."""

    operation: str
    out: Any
    operands: tuple[Any, ...]

    @staticmethod
    def of(eqn: Eqn) -> Instruction:
        known = operation_of(eqn)
        assert known is not None
        name, turn = known
        return Instruction(name, eqn.outvars[0], tuple(map(key_of, eqn.invars[::turn])))


def key_of(atom: Atom) -> Any:
    return repr(float(atom.val)) if jaxprs.is_literal(atom) else atom


def operation_of(eqn: Eqn) -> tuple[str, int] | None:
    """Returns the kernel's name of an operation, and the direction in which it reads the operands; or None."""
    name = eqn.primitive.name
    reads_booleans = eqn.invars[:1] and eqn.invars[0].aval.dtype == jnp.bool_
    if primitives.is_retyping(eqn) or (name == "convert_element_type" and reads_booleans):
        return "copy", 1
    if name == "integer_pow":
        return ("square", 1) if eqn.params["y"] == 2 else None
    if name in OF_BOOLEANS:
        return (OF_BOOLEANS[name], 1) if reads_booleans else None
    if name == "select_n" and (len(eqn.invars) != 3 or not reads_booleans):
        return None
    return (
        (SWAPPED[name], -1)
        if name in SWAPPED
        else (ELEMENTWISE[name], 1)
        if name in ELEMENTWISE
        else None
    )


def is_known(eqn: Eqn, dtype: Any, names: Collection[str] = OPCODES) -> bool:
    """Returns True for one of some operations on single numbers of a type, and on booleans, which are 0 and 1."""
    operation = operation_of(eqn)
    values = (*eqn.invars, *eqn.outvars)
    is_one = operation is not None and operation[0] in names
    return is_one and all(not v.aval.shape and v.aval.dtype in (dtype, jnp.bool_) for v in values)


def known_from_values(step: AffineStep) -> list[Eqn]:
    """Returns the equations of a step that the kernel can compute for a tile of steps once it has the values."""
    moving = jaxprs.depends(step.loop.eqns, step.loop.carry)
    results = {*step.values}
    eqns = list[Eqn]()
    for eqn in step.loop.eqns:
        is_there = all(v in results for v in jaxprs.inputs(eqn) if v in moving)
        if is_there and eqn.outvars[0] not in results and is_known(eqn, step.dtype):
            results.add(eqn.outvars[0])
            eqns.append(eqn)
    return eqns


@dataclass
class FirstOrder:
    """The coefficient of the only carry, and what is added to it, with the instructions that compute them from inputs."""

    step: AffineStep
    instructions: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        (carry,), (new,) = self.step.carry, map(key_of, self.step.new)
        pairs = {carry: (_ONE, _ZERO)}  # of values that depend on the carry
        moving = jaxprs.depends(self.step.eqns, [carry])
        for name, out, operands in map(
            Instruction.of, (e for e in self.step.eqns if e.outvars[0] in moving)
        ):
            known = [pairs.get(key) for key in operands]
            start = name == "select"
            if name in ("mul", "div"):  # by a number that does not depend on the carry
                parts = [pair or (key, key) for pair, key in zip(known, operands)]
            else:
                parts = [pair or (_ZERO, key) for pair, key in zip(known, operands)]
            both = zip(*parts[start:])
            coefficient, offset = (self._apply(name, *operands[:start], *of_one) for of_one in both)
            pairs[out] = coefficient, offset
        self.coefficient, self.offset = pairs.get(new, (_ZERO, new))

    def _apply(self, name: str, *operands: Any) -> Any:
        """Returns the key of a result, which may be that of an operand or a number."""
        if name == "copy":
            return operands[0]
        for place, operand in enumerate(operands):
            if (same := _IDENTITIES.get((name, place, operand))) is not None:
                return operands[same]
            if operand == _ZERO and (name, place) in _ZEROS:
                return _ZERO
        self.instructions.append(Instruction(name, out := object(), operands))
        return out


class Encoded(NamedTuple):
    """The program of an affine loop, which `src/entry.cpp` reads, with the variables that it reads, sums and stores."""

    constants: tuple[Var, ...]
    stacks: tuple[Var, ...]
    program: np.ndarray
    literals: np.ndarray


def encoded(
    step: AffineStep,
    before: Sequence[Instruction],
    affine: Sequence[Instruction],
    after: Sequence[Instruction],
    first_order: FirstOrder | None,
    sums: Sequence[Any],
    outs: Sequence[Var],
) -> Encoded:
    """Returns the program of an affine loop.

    Args:
        step: the loop's step.
        before, after: what is computed for a tile of steps before and after the affine part.
        affine: the affine part, of one step.
        first_order: the coefficient of the only carry, or None if there are others.
        sums: for each sum its summands, or two factors of them.
        outs: what is stored for all steps.
    """
    core = () if first_order is None else (first_order.coefficient, first_order.offset)
    in_tile = dict.fromkeys(
        [*_operands((*before, *after)), *step.inputs, *core, *(k for keys in sums for k in keys)]
    )
    in_steps = dict.fromkeys([*_operands(affine), *map(key_of, (*step.new, *step.values))])
    keys = {**in_steps, **in_tile}
    results = [[i.out for i in part] for part in (before, affine, after)]
    of_tile = {*step.values, *results[0], *results[2]}
    of_step = {*step.carry, *step.inputs, *results[1]}
    varying = jaxprs.depends(step.loop.eqns, (*step.loop.carry, *step.loop.xs))
    variables = [k for k in keys if isinstance(k, Var)]
    # What a tile computes of constants is a constant in the affine part.
    needed = {
        v
        for v in variables
        if (v in in_steps and v not in of_step) or (v in in_tile and v not in of_tile)
    }
    constants = tuple(v for v in variables if v in needed and v not in varying)
    stacks = tuple(v for v in variables if v in needed and v in in_tile and v in varying)
    literals = tuple(k for k in keys if isinstance(k, str))
    tile = _numbered(*constants, *literals, *stacks, *results[0], *step.values, *results[2])
    numbers = _numbered(*constants, *literals, *step.carry, *step.inputs, *results[1])

    counts = map(len, (step.carries, step.inputs, step.values, constants, stacks, sums, outs))
    program = [
        jnp.dtype(step.dtype).itemsize,
        step.loop.length,
        step.loop.reverse,
        _STORED[step.stored],
        *counts,
    ]
    program += (
        [-1, -1, 0]
        if first_order is None
        else [*(tile[k] for k in core), len(first_order.instructions)]
    )
    program += map(len, results)
    for part, registers in ((before, tile), (affine, numbers), (after, tile)):
        for i in part:
            read = [registers[k] for k in i.operands]
            program += [OPCODES[i.operation], registers[i.out], *read, *[0] * (3 - len(read))]
    program += [tile[v] for v in step.inputs] + [
        numbers[key_of(a)] for a in (*step.new, *step.values)
    ]
    for summands in sums:
        program += [*(tile[k] for k in summands), -1][:2]
    program += [tile[v] for v in outs]
    return Encoded(
        constants,
        stacks,
        np.array(program, np.int64),
        np.array([*map(float, literals)], np.float64),
    )


def _operands(instructions: Iterable[Instruction]) -> list[Any]:
    return [key for i in instructions for key in i.operands]


def _numbered(*keys: Any) -> dict[Any, int]:
    return {key: i for i, key in enumerate(keys)}
