"""The reader of affine steps: is a new carry `a * old + b`, and what are a and b?

A step is *affine* in some carries if their new values are sums of two parts: products of old values with coefficients, and
offsets. Neither a coefficient nor an offset may depend on the old values; both may depend on all else, such as this step's
inputs, constants, and carries that are computed before. Steps of this form compose to steps of this form,

    a2 (a1 h + b1) + b2  =  (a2 a1) h + (a2 b1 + b2)

so that a loop can be solved for all steps at once (`associative.py`), in chunks (`chunkwise/`), on all devices at the same
time (`segments/`), or by a kernel in blocks (`kernels/native/affine_call.py`). What differs is what a is:

    kind        new carries                                 read by
    diagonal    h'[i] = a[i] h[i] + b[i] for each element   `read_diagonal`; K carries that read each other elementwise
                                                            have K x K coefficients for each element, and K offsets
    matrix      S' = decay S + sum of p (q^T S) + B         `matrix_form`; a has a matrix along the axis that is
                                                            contracted, which is never computed: it stays a sum of terms

A step whose value needs several old values of one sequence (order k) carries k values, so it is diagonal with K = k.

**Which operations.** `jrnn.jaxprs.primitives.is_affine` answers for elementwise ones: sums of anything, a product where one
operand depends on the carry, a quotient where the divisor does not, a selection where the condition does not. Nothing else
is affine at every point: `max(h, 0)` is where h does not change its sign, which a compiler does not know. `stop_gradient` is
affine, but its derivative is not its coefficient, so it is left out. Matrices have contractions and views, too, whose axes
must be followed (`equations.py`).

**How coefficients are read.** The equations are not evaluated. Every value that depends on K carries has K coefficients and
an offset. An equation that makes such a value is written K + 1 times: with the k-th coefficients of its operands, and with
their offsets. In each of these, an operand that does not depend on the carry stays what it is if it multiplies, divides or
selects, and in a coefficient it is 0 if it is added:

                        h' = f * h + (1 - f) * x          coefficient        offset
    mul  f h                                              f * 1 = f          f * 0 = 0
    mul  (1 - f) x      does not depend on h              0                  (1 - f) * x
    add                                                   f + 0 = f          0 + (1 - f) * x

Products with 1 and sums with 0 are not written at all. What remains are equations like the step's
(`AffineStep.eqns`), which `values` computes with JAX and which the kernel for CPUs encodes. The derivative of the step would
do for numbers: `jax.jvp` at 0 along each carry. But it multiplies by arrays of 1 and 0, `inf * 0` is NaN, and it is nothing
that another kernel can run.

**Refusals.** An operation that is not affine raises `Unsupported` with the name of its primitive; the remedies that several
files name are in `carries.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, jax_internals, primitives
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import DECAYS_ALONE, ON_INPUTS, CarrySchedule, Group, Values
from jrnn.loops.affine.matrix import matrix_form
from jrnn.loops.affine.terms import without
from jrnn.loops.ir import Loop, Unsupported

MOST_TOGETHER = 4  # two steps of K carries compose with K^3 products


@dataclass(frozen=True, eq=False)
class AffineStep:
    """The new carries of a group as `a * old + b`.

    Attributes:
        kind: "diagonal", or "matrix".
        a: of a diagonal step, for each new carry its K coefficients; of a matrix, the terms of S and of its rows.
        b: of a diagonal step, the offset of each new carry; of a matrix, the terms without S.
        blocks: the shape of the Jacobian.
        eqns: of a diagonal step, what computes a and b.
    """

    kind: Literal["diagonal", "matrix"]
    a: Values
    b: Values
    blocks: Blocks
    eqns: Sequence[Eqn] = ()

    def values(self, env: Env, like: Array) -> tuple[list[Values], Values]:
        """Returns the values of a and b of a diagonal step.

        Args:
            env: the values of what the step reads, without the old carries. Gets the results of equations.
            like: an old carry, whose shape coefficients that are numbers get.
        """

        def full(number: np.ndarray) -> Array:
            return jnp.full_like(like, number, number.dtype)

        def array_of(atom: Atom) -> Array:
            if jaxprs.is_literal(atom):
                return full(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        jaxprs.evaluate(self.eqns, env, lift=full)
        rows = [list(map(array_of, row)) for row in self.a]
        return rows, list(map(array_of, self.b))


def read_step(
    loop: Loop,
    group: Group,
    schedule: CarrySchedule,
    constants: Env,
) -> AffineStep:
    """Returns the affine step of a group of carries, of the simplest kind.

    Args:
        loop: the loop.
        group: the positions of the carries.
        schedule: the groups of the loop, and what is known before this one.
        constants: values of variables that are known now.

    Raises:
        Unsupported: with the reason why it is not affine.
    """
    shape = loop.carry[group[0]].aval.shape
    try:
        eqns, _ = schedule.between.of(group)
        return read_diagonal(loop, group, eqns)
    except Unsupported:
        if len(group) > 1 or len(shape) < 2:
            raise
    form = matrix_form(loop, group, schedule.known, [], constants)
    same = without(form.free, form.columns)
    aligned = set(range(len(shape))).difference(same, [form.forms.contracted])
    return AffineStep(
        kind="matrix",
        a=(*form.decay, *form.updates),
        b=(*form.known, *form.matrices),
        blocks=Blocks(group, (shape,), tuple(sorted(aligned)), same),
    )


def read_diagonal(
    loop: Loop,
    group: Group,
    eqns: Iterable[Eqn],
) -> AffineStep:
    """Returns the affine step of carries whose Jacobian is diagonal, or a small matrix for each element.

    Args:
        loop: the loop.
        group: the positions of the carries. What the others are does not matter.
        eqns: the equations between the old carries and the new ones, as `Between` has them.

    Raises:
        Unsupported: with the reason why the step has no such Jacobian.
    """
    if len(group) > MOST_TOGETHER:
        raise Unsupported(f"more than {MOST_TOGETHER} carries read each other", remedy=DECAYS_ALONE)
    carry = jaxprs.take(loop.carry, group)
    for v in carry:
        if not is_smooth(v.aval):
            raise Unsupported(f"a carry is {v.aval.dtype}")
    reader = _Reader(carry)
    for eqn in eqns:
        reader.read(eqn)
    a = []
    b = []
    for new in jaxprs.take(loop.carry_out, group):
        *coefficients, offset = reader.sum_of(new)
        a.append(coefficients)
        b.append(offset)
    shape = carry[0].aval.shape
    return AffineStep(
        kind="diagonal",
        a=a,
        b=b,
        blocks=Blocks(group, (shape,) * len(group), tuple(range(len(shape)))),
        eqns=reader.eqns,
    )


class _Reader:
    """Reads equations in their order: each value that depends on the carry gets K coefficients and an offset."""

    def __init__(self, carry: Sequence[Var]):
        self.eqns: list[Eqn] = []
        self._dtype = carry[0].aval.dtype
        zero, one = np.arange(2).astype(self._dtype)
        self._numbers = {repr(zero.item()): 0, repr(one.item()): 1}
        self._zeros = [jax_internals.Literal(zero, jax.typeof(zero))] * len(carry)
        self._sums: dict[Var, list[Atom]] = {}
        for k, v in enumerate(carry):
            self._sums[v] = [*self._zeros, self._zeros[0]]
            self._sums[v][k] = jax_internals.Literal(one, jax.typeof(one))

    def sum_of(self, atom: Atom) -> list[Atom]:
        """Returns the coefficients of a value, and its offset."""
        if jaxprs.is_in(atom, self._sums):
            return self._sums[atom]
        return [*self._zeros, atom]

    def read(self, eqn: Eqn) -> None:
        moves = [jaxprs.is_in(atom, self._sums) for atom in eqn.invars]
        if not any(moves):
            return
        _check(eqn, moves)
        columns = []
        for place, atom in enumerate(eqn.invars):
            is_factor = eqn.primitive.name in ("mul", "div") and not moves[place]
            is_condition = eqn.primitive.name == "select_n" and place == 0
            if is_factor or is_condition:
                columns.append([atom] * (len(self._zeros) + 1))
            else:
                columns.append(self.sum_of(atom))
        self._sums[eqn.outvars[0]] = [self._result(eqn, operands) for operands in zip(*columns)]

    def _result(self, eqn: Eqn, operands: Sequence[Atom]) -> Atom:
        """Returns what an equation makes of other operands: one of them, or the result of a new equation."""
        row = primitives.row_of(eqn)
        name = eqn.primitive.name
        numbers = list(map(self._number, operands))
        is_zero = numbers[0] == 0 and name in ("mul", "div", "neg")
        if row.copies or primitives.is_retyping(eqn) or is_zero:
            return operands[0]
        if row.neutral is not None and numbers[1] == row.neutral:
            return operands[0]
        is_zero = numbers[-1] == 0 and name == "mul"
        if is_zero or (row.commutes and numbers[0] == row.neutral):
            return operands[1]
        out = Var(eqn.outvars[0].aval)
        self.eqns.append(eqn.replace(invars=list(operands), outvars=[out]))
        return out

    def _number(self, atom: Atom) -> int | None:
        """Returns 0 or 1 for a literal that is this number; -0.0 is not 0, because -0.0 + 0 is 0."""
        if not jaxprs.is_literal(atom):
            return None
        return self._numbers.get(repr(np.asarray(atom.val, self._dtype).item()))


def _check(eqn: Eqn, moves: Sequence[bool]) -> None:
    """Raises Unsupported if an equation is not affine, element by element, in the operands that depend on the carry."""
    name = eqn.primitive.name
    shape = eqn.outvars[0].aval.shape
    if not primitives.is_affine(eqn, moves):
        reason = f"{name} of the carry is not affine with a diagonal Jacobian"
        raise Unsupported(reason, remedy=ON_INPUTS)
    if any(m and a.aval.shape != shape for a, m in zip(eqn.invars, moves)):
        raise Unsupported(f"{name} of the carry changes its shape")
