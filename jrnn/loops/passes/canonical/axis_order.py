"""The stage that lays out the values of a step: axes of size 1 leave the loop, rows come first and are merged.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

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

    def __call__(
        self,
        run: RunLoop,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        last, ys = run(
            [*map(LayoutChange.inward, self.consts, consts)],
            [*map(LayoutChange.inward, self.carry, init)],
            [*map(LayoutChange.inward, self.xs, xs, repeat(True))],
            length,
        )
        last = [*map(LayoutChange.outward, self.carry, last)]
        return last, [*map(LayoutChange.outward, self.ys, ys, repeat(True))]


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
        return tuple([LayoutChange(atom.aval.shape, rows.groups(atom)) for atom in atoms])

    form = AxisOrder(
        consts=changes(loop.consts),
        carry=changes(loop.carry),
        xs=changes(loop.xs),
        ys=changes(loop.ys),
    )
    # A loop is not rewritten for what it only adds up, or for its constants.
    added = added_to_carries(loop)
    read = [*form.xs, *form.ys]
    for i, change in enumerate(form.carry):
        if i not in added:
            read.append(change)
    if _is_same(read) and not rows.has_transposed_rows:
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
        outs = []
        for atom, change in zip(loop.outputs, (*form.carry, *form.ys)):
            value = env[atom] if jaxprs.is_in(atom, env) else StepValue.of(jaxprs.value(env, atom))
            outs.append(value.in_layout(change.groups).array)
        return outs

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
