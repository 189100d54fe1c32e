"""Steps that are affine in the carry with coefficients that no input changes.

Filters, moving averages, exponential smoothing, linear plants and discounted returns have such steps, and so have the
reverse loops of their gradients. Carries are single numbers in float32. What is added to them, and what the step computes
from them for its outputs, may be anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.ir import Loop
from jrnn.loops.passes.sums import added_to_carries


@dataclass(frozen=True)
class AffineStep:
    """A step with new carries `A s + b`, where A is the same at all steps.

    Attributes:
        loop: the loop.
        carries: the positions of the carries s.
        sums: the positions of carries that only add, and that nothing else reads, with the values that they add.
        values: affine values, from which the rest of the step is computed without s.
        before_affine: the equations of the new carries and of `values` that do not depend on s.
        affine: those that do.
        after_affine: the equations of the outputs and of the sums, from inputs and `values`.
        reads: for the carries, then for the values: the places in `carries` that they read, now or after some steps.
    """

    loop: Loop
    carries: tuple[int, ...]
    sums: Mapping[int, Sequence[Atom]]
    values: tuple[Var, ...]
    before_affine: tuple[Eqn, ...]
    affine: tuple[Eqn, ...]
    after_affine: tuple[Eqn, ...]
    reads: tuple[frozenset[int], ...]

    @property
    def carry(self) -> list[Var]:
        return [self.loop.carry[i] for i in self.carries]

    @property
    def new(self) -> list[Atom]:
        return [self.loop.carry_out[i] for i in self.carries]


def affine_step(loop: Loop) -> AffineStep:
    """Returns the affine form of a step; raises NotAffine, with the reason, if it has none."""
    sums = _sums(loop)
    carries = tuple(i for i in range(len(loop.carry)) if i not in sums)
    carry, new = [loop.carry[i] for i in carries], [loop.carry_out[i] for i in carries]
    for v in carry:
        if not _is_number(v):
            raise NotAffine(f"a carry is {v.aval.str_short()}, not one number in float32")
    if not carry:
        raise NotAffine("nothing is carried but sums")
    moving = jaxprs.depends(loop.eqns, carry)
    affine_values = _affine_values(loop, carry, moving)
    known = {*carry, *affine_values, *loop.inputs, *(v for e in loop.eqns for v in e.outvars if v not in moving)}
    for atom in new:
        if not jaxprs.is_literal(atom) and atom not in known:
            why = "a carry is not affine with coefficients that are the same at all steps"
            raise NotAffine(why, jaxprs.needed(loop.eqns, [atom], known)[0][0])
    targets = dict.fromkeys(jaxprs.variables([*loop.ys, *(v for values in sums.values() for v in values)]))
    step_inputs = {*loop.consts, *loop.xs}
    # What changes a sign is computed from what it changes.
    named = {v for v, eqn in affine_values.items() if not _is_sign(eqn) or v in targets}
    after_affine, read = jaxprs.needed(loop.eqns, targets, {*step_inputs, *carry, *named})
    values = [v for v in read if v in named or v in carry]
    path, _ = jaxprs.needed(loop.eqns, [*new, *values], {*step_inputs, *carry})
    before_affine, affine = ([e for e in path if (e.outvars[0] in moving) == moves] for moves in (False, True))
    reads = _reads(affine, carry, new, values)
    return AffineStep(loop, carries, sums, *map(tuple, (values, before_affine, affine, after_affine)), reads)


class StepParts(NamedTuple):
    """What carries and values are affine in, next to the carry.

    Attributes:
        inputs: u, which a step computes without the carry.
        before: the equations of u.
        affine: those of the new carries and of the values, from the carry, u and constants.
    """

    inputs: tuple[Var, ...]
    before: tuple[Eqn, ...]
    affine: tuple[Eqn, ...]


def step_parts(step: AffineStep) -> StepParts:
    """Returns the inputs of a step: what is added to the products with the carry, or what that is computed from."""
    loop, results = step.loop, [*step.new, *step.values]
    moving, varying = (jaxprs.depends(loop.eqns, of) for of in (step.carry, (*loop.carry, *loop.xs)))
    affine_results = [e.outvars[0] for e in loop.eqns if _is_affine(e, varying)]
    options = []
    for affine in (affine_results, [v for v in affine_results if v in moving]):
        varying_inputs = varying.difference(affine, step.carry)
        needed, free = jaxprs.needed(loop.eqns, results, {*loop.consts, *step.carry, *varying_inputs})
        options.append((tuple(v for v in free if v in varying_inputs), tuple(needed)))
    inputs, eqns = min(options, key=lambda option: len(option[0]))
    before, _ = jaxprs.needed(loop.eqns, inputs, {*loop.consts, *loop.xs})
    return StepParts(inputs, tuple(before), eqns)


def _is_number(v: Var) -> bool:
    return v.aval.dtype == jnp.float32 and not v.aval.shape


def _sums(loop: Loop) -> dict[int, Sequence[Atom]]:
    """Returns the carries that only add what other carries determine, or that are no numbers, and their values."""
    added = {i: values for i, values in added_to_carries(loop).items() if not _is_read(loop, i)}
    moving = jaxprs.depends(loop.eqns, [v for i, v in enumerate(loop.carry) if i not in added])
    moves = {i: any(jaxprs.is_in(v, moving) for v in values) for i, values in added.items()}
    return {i: values for i, values in added.items() if moves[i] or not _is_number(loop.carry[i])}


def _is_read(loop: Loop, i: int) -> bool:
    """Returns True if a step reads a carry that only adds for anything but its own sum."""
    reached = jaxprs.depends(loop.eqns, [loop.carry[i]])
    return any(jaxprs.is_in(a, reached) for j, a in enumerate(loop.outputs) if j != i)


def _affine_values(loop: Loop, carry: Collection[Var], moving: Collection[Var]) -> dict[Var, Eqn]:
    """Returns the equations of values that are affine in the carry and read it, by their results."""
    varying, affine_values = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs)), dict[Var, Eqn]()
    for eqn in loop.eqns:
        reads = [v for v in jaxprs.inputs(eqn) if v in moving]
        if reads and _is_affine(eqn, varying) and all(v in affine_values or v in carry for v in reads):
            affine_values[eqn.outvars[0]] = eqn
    return affine_values


def _is_affine(eqn: Eqn, varying: Collection[Var]) -> bool:
    """Returns True if an equation on single numbers is affine in the operands that vary."""
    name, outs = eqn.primitive.name, eqn.outvars
    if len(outs) != 1 or not _is_number(outs[0]) or any(a.aval.shape for a in eqn.invars):
        return False
    if primitives.is_sum(eqn) or primitives.is_retyping(eqn):
        return True
    varies = [jaxprs.is_in(a, varying) for a in eqn.invars]
    fixed = {"mul": not all(varies), "div": not varies[-1], "select_n": not varies[0]}
    return fixed.get(name, False)


def _is_sign(eqn: Eqn) -> bool:
    """Returns True if an equation changes no more than the sign or the weak type of a number."""
    return primitives.is_retyping(eqn) or (primitives.is_sum(eqn) and len(eqn.invars) == 1)


def _reads(
    eqns: Sequence[Eqn], carry: Sequence[Var], new: Sequence[Atom], values: Sequence[Var]
) -> tuple[frozenset[int], ...]:
    _, reach = jaxprs.carry_groups(eqns, carry, new)
    after = [jaxprs.depends(eqns, [v]) for v in carry]
    direct = [[k for k, reached in enumerate(after) if v in reached] for v in values]
    return (*map(frozenset, reach), *(frozenset(q for k in of for q in reach[k]) for of in direct))
