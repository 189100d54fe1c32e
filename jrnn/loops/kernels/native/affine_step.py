"""Steps that are affine in the carry: with coefficients that no input changes, or of one carry with any coefficient.

Filters, moving averages, exponential smoothing, linear plants, returns and advantages have such steps, and so have the
reverse loops of their gradients. Carries are single numbers of one type, float32 or float64. What is added to them, and what
the step computes from them for its outputs, may be anything.

`jrnn.loops.affine.reader` has the question whether an operation is affine, and reads the coefficients of a single carry.
Those of several carries are numbers for all steps, which the kernel computes: it runs the operations on a basis.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.passes.sums import added_to_carries

Variables = tuple[Var, ...]
Equations = tuple[Eqn, ...]
Added = dict[int, tuple[Atom, ...]]  # what is added to carries, by position


@dataclass(frozen=True)
class ScalarStep:
    """A step with new carries `A s + B u + b` and values `C s + D u + d`, with the same A, B, b, C, D and d at all steps.

    Of a single carry the inputs may be coefficients, too: `a(u) s + b(u)`.

    Attributes:
        loop: the loop.
        carries: the positions of the carries s.
        sums: the positions of carries that only add, and that nothing else reads, with the values that they add.
        inputs: u, which a step computes without the carry.
        values: from these and the inputs the rest of the step is computed without s.
        eqns: the equations of new carries and values, from carries, inputs and constants.
        dtype: of carries and values.
    """

    loop: Loop
    carries: tuple[int, ...]
    sums: Added
    inputs: Variables
    values: Variables
    eqns: Equations
    dtype: Any

    @property
    def carry(self) -> list[Var]:
        return jaxprs.take(self.loop.carry, self.carries)

    @property
    def new(self) -> list[Atom]:
        return jaxprs.take(self.loop.carry_out, self.carries)

    @property
    def stored(self) -> str:
        """Which carries the values are: those "before" a step, those "after" it, or "none"."""
        if self.values == tuple(self.carry):
            return "before"
        return "after" if self.values == tuple(self.new) else "none"


def affine_step(loop: Loop) -> ScalarStep:
    """Returns the affine form of a step; raises Unsupported, with the reason, if it has none."""
    sums = _sums(loop)
    carries = tuple(i for i in range(len(loop.carry)) if i not in sums)
    carry = jaxprs.take(loop.carry, carries)
    new = jaxprs.take(loop.carry_out, carries)
    dtypes = set()
    for v in carry:
        if not _is_number(v):
            shape = v.aval.str_short()
            raise Unsupported(f"a carry is {shape}, not one number in float32 or float64")
        dtypes.add(v.aval.dtype)
    if not carry:
        raise Unsupported("nothing is carried but sums")
    if len(dtypes) > 1:
        raise Unsupported("carries are of two types")

    # With one carry, inputs may be coefficients: then only what depends on the carry must be affine.
    on_carry = jaxprs.depends(loop.eqns, carry)
    varying = loop.varying
    affine_in = on_carry if len(carry) == 1 else varying
    affine_values = _affine_values(loop, carry, on_carry, affine_in)
    known = {*loop.inputs, *jaxprs.results(loop.eqns)}
    known = known.difference(on_carry).union(carry, affine_values)
    for atom in new:
        if not jaxprs.is_literal(atom) and atom not in known:
            why = "carries are not affine with coefficients of all steps"
            if len(carry) == 1:
                why = "a carry is not affine"
            raise Unsupported(why, jaxprs.needed(loop.eqns, [atom], known)[0][0])

    values = _values(loop, sums, carry, affine_values)
    if not any(map(jaxprs.is_literal, new)) and {*values} == {*new}:
        values = new
    elif len(carry) <= max(len(values), 1):  # from which the values are computed
        values = carry

    # The inputs are what is added to the carry, or what that is computed from: whatever are fewer.
    affine_results = [e.outvars[0] for e in loop.eqns if _is_affine(e, affine_in)]
    results = [*new, *values]
    affine_on_carry = on_carry.intersection(affine_results)
    inputs, eqns = _inputs(loop, carry, results, varying.difference(affine_on_carry))
    if len(carry) > 1:
        others, other_eqns = _inputs(loop, carry, results, varying.difference(affine_results))
        if len(others) <= len(inputs):
            inputs = others
            eqns = other_eqns
    return ScalarStep(
        loop=loop,
        carries=carries,
        sums=sums,
        inputs=tuple(inputs),
        values=tuple(values),
        eqns=tuple(eqns),
        dtype=carry[0].aval.dtype,
    )


def _values(
    loop: Loop,
    sums: Added,
    carry: Sequence[Var],
    affine: Mapping[Var, Eqn],
) -> list[Var]:
    """Returns the fewest steps from outputs and sums: affine values, and carries, that they are computed from."""
    targets = jaxprs.variables([*loop.ys, *itertools.chain.from_iterable(sums.values())])
    # What changes a sign is computed from what it changes.
    named = {*carry}
    for v, eqn in affine.items():
        if v in targets or not _is_sign(eqn):
            named.add(v)
    _, read = jaxprs.needed(loop.eqns, targets, {*loop.consts, *loop.xs, *named})
    return list(filter(named.__contains__, read))


def _inputs(
    loop: Loop,
    carry: Sequence[Var],
    results: Sequence[Atom],
    varying: Collection[Var],
) -> tuple[Sequence[Var], Sequence[Eqn]]:
    """Returns which of some varying values the results are computed from, and the equations that do so."""
    inputs = {*varying}.difference(carry)
    needed, free = jaxprs.needed(loop.eqns, results, {*loop.consts, *carry, *inputs})
    return list(filter(inputs.__contains__, free)), needed


def _is_number(v: Var) -> bool:
    return v.aval.dtype in (jnp.float32, jnp.float64) and not v.aval.shape


def _sums(loop: Loop) -> Added:
    """Returns the carries that only add what other carries determine, or that are no numbers, and their values."""
    added = {}
    for i, values in added_to_carries(loop).items():
        if not is_read(loop, i):
            added[i] = values
    others = [v for i, v in enumerate(loop.carry) if i not in added]
    on_others = jaxprs.depends(loop.eqns, others)
    for i, values in list(added.items()):
        if _is_number(loop.carry[i]) and on_others.isdisjoint(jaxprs.variables(values)):
            del added[i]
    return added


def is_read(loop: Loop, i: int) -> bool:
    """Returns True if a step reads a carry that only adds for anything but its own sum."""
    reached = jaxprs.depends(loop.eqns, [loop.carry[i]])
    others = [*loop.outputs[:i], *loop.outputs[i + 1 :]]
    return not reached.isdisjoint(jaxprs.variables(others))


def _affine_values(
    loop: Loop,
    carry: Collection[Var],
    on_carry: set[Var],
    varying: Collection[Var],
) -> dict[Var, Eqn]:
    """Returns the equations of values that are affine in what varies and read the carry, by their results."""
    affine_values: dict[Var, Eqn] = {}
    affine = set(carry)
    for eqn in loop.eqns:
        reads = on_carry.intersection(jaxprs.inputs(eqn))
        if reads and _is_affine(eqn, varying) and reads <= affine:
            affine_values[eqn.outvars[0]] = eqn
            affine.add(eqn.outvars[0])
    return affine_values


def _is_affine(eqn: Eqn, varying: Collection[Var]) -> bool:
    """Returns True if an equation on single numbers is affine in the operands that vary."""
    outs = eqn.outvars
    if len(outs) != 1 or not _is_number(outs[0]) or any(a.aval.shape for a in eqn.invars):
        return False
    return primitives.is_affine(eqn, [jaxprs.is_in(a, varying) for a in eqn.invars])


def _is_sign(eqn: Eqn) -> bool:
    """Returns True if an equation changes no more than the sign or the weak type of a number."""
    return primitives.is_retyping(eqn) or (primitives.is_sum(eqn) and len(eqn.invars) == 1)
