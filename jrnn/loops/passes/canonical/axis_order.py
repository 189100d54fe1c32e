"""The stage that lays out the values of a step: axes of size 1 leave the loop, rows come first and are merged.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values
from jrnn.loops.passes.canonical.layouts import LayoutChange, StepValue
from jrnn.loops.passes.canonical.rows import RowAxes
from jrnn.loops.passes.canonical.rules import evaluated
from jrnn.loops.passes.sums import added_to_carries


@dataclass(frozen=True)
class AxisOrder:
    """How a loop lays out the arrays of the loop that it was made from.

    Attributes:
        consts, carry, xs, ys: the layout of each.
        transposed_bytes: of inputs and outputs that are transposed, a step.
    """

    consts: tuple[LayoutChange, ...]
    carry: tuple[LayoutChange, ...]
    xs: tuple[LayoutChange, ...]
    ys: tuple[LayoutChange, ...]
    transposed_bytes: int = 0

    def adapt(
        self, run: RunLoop, consts: Values, init: Values, xs: Values, length: Length
    ) -> Results:
        last, ys = run(
            [change.inward(value) for change, value in zip(self.consts, consts)],
            [change.inward(value) for change, value in zip(self.carry, init)],
            [change.inward(x, stacked=True) for change, x in zip(self.xs, xs)],
            length,
        )
        last = [change.outward(value) for change, value in zip(self.carry, last)]
        return last, [change.outward(y, stacked=True) for change, y in zip(self.ys, ys)]


def normalize_axes(loop: Loop, merge: bool) -> tuple[Loop, AxisOrder | None]:
    """Returns the loop with its values laid out in one way, and how; None if what goes in and out stays as it is.

    Invariant: every value is unchanged.

    Args:
        loop: the loop.
        merge: whether several axes of rows become one.
    """
    if any(is_explicit(v.aval) for v in loop.inputs):
        return loop, None
    rows = RowAxes(loop, merge)

    def changes(atoms: Sequence[Atom]) -> tuple[LayoutChange, ...]:
        return tuple(LayoutChange(atom.aval.shape, rows.groups(atom)) for atom in atoms)

    form = AxisOrder(
        consts=changes(loop.consts),
        carry=changes(loop.carry),
        xs=changes(loop.xs),
        ys=changes(loop.ys),
    )
    # A loop is not rewritten for what it only adds up, or for its constants.
    added = added_to_carries(loop)
    read = [change for i, change in enumerate(form.carry) if i not in added]
    if _is_same((*read, *form.xs, *form.ys)) and not rows.has_transposed_rows:
        return loop, None

    input_changes = (*form.consts, *form.carry, *form.xs)

    def step(*args: Array) -> list[Array]:
        env: Env = {}
        for v, change, x in zip(loop.inputs, input_changes, args):
            env[v] = StepValue(x, v.aval.shape, change.groups)
        for eqn in loop.eqns:
            operands = [_value(env, a) for a in eqn.invars]
            with jaxprs.in_scope(eqn):
                env.update(zip(eqn.outvars, evaluated(eqn, operands, rows.groups)))
        outs = zip(loop.outputs, (*form.carry, *form.ys))
        return [_output(a, env).in_layout(change.groups).array for a, change in outs]

    avals = [change.aval(v.aval) for v, change in zip(loop.inputs, input_changes)]
    rewritten = loop.traced(step, avals, len(loop.carry))
    if _is_same((*input_changes, *form.ys)):
        return rewritten, None
    transposed_bytes = 0
    for change, atom in zip((*form.xs, *form.ys), (*loop.xs, *loop.ys)):
        if change.is_transposed:
            transposed_bytes += jaxprs.nbytes(atom)
    return rewritten, replace(form, transposed_bytes=transposed_bytes)


def _is_same(changes: Sequence[LayoutChange]) -> bool:
    """Whether all arrays stay as they are."""
    return all(change.is_same for change in changes)


def _value(env: Env, atom: Atom) -> StepValue:
    """An operand; a literal stays a Python number, which has no axes."""
    return StepValue(atom.val, atom.aval.shape, ()) if jaxprs.is_literal(atom) else env[atom]


def _output(atom: Atom, env: Env) -> StepValue:
    """An output of the step; a literal becomes an array."""
    return StepValue.of(jaxprs.value(env, atom)) if jaxprs.is_literal(atom) else env[atom]
