"""The stage that lays out the values of a step: axes of size 1 leave the loop, rows come first and are merged.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Loop, Results, RunLoop
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
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        inside = [
            [p.inward(v) for p, v in zip(of, values)]
            for of, values in ((self.consts, consts), (self.carry, init))
        ]
        last, ys = run(*inside, [p.inward(x, stacked=True) for p, x in zip(self.xs, xs)], length)
        last = [p.outward(v) for p, v in zip(self.carry, last)]
        return last, [p.outward(y, stacked=True) for p, y in zip(self.ys, ys)]


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

    def placement(atom: Atom) -> LayoutChange:
        return LayoutChange(atom.aval.shape, rows.groups(atom))

    form = AxisOrder(
        *(tuple(map(placement, of)) for of in (loop.consts, loop.carry, loop.xs, loop.ys))
    )
    # A loop is not rewritten for what it only adds up, or for its constants.
    added = added_to_carries(loop)
    read = [p for i, p in enumerate(form.carry) if i not in added]
    same = all(p.is_same for p in (*read, *form.xs, *form.ys))
    if same and not rows.has_transposed_rows:
        return loop, None
    inputs = list(zip(loop.inputs, (*form.consts, *form.carry, *form.xs)))

    def step(*args: Any) -> list[Any]:
        env: Env = {v: StepValue(x, v.aval.shape, p.groups) for (v, p), x in zip(inputs, args)}
        for eqn in loop.eqns:
            operands = [_value(env, a) for a in eqn.invars]
            with jaxprs.in_scope(eqn):
                env.update(zip(eqn.outvars, evaluated(eqn, operands, rows.groups)))
        outs = zip(loop.outputs, (*form.carry, *form.ys))
        return [_output(a, env).in_layout(p.groups).array for a, p in outs]

    avals = [p.aval(v.aval) for v, p in inputs]
    stacks = zip((*form.xs, *form.ys), (*loop.xs, *loop.ys))
    form = replace(
        form, transposed_bytes=sum(jaxprs.nbytes(a) for p, a in stacks if p.is_transposed)
    )
    every = (*form.consts, *form.carry, *form.xs, *form.ys)
    return loop.traced(step, avals, len(loop.carry)), None if all(
        p.is_same for p in every
    ) else form


def _value(env: Env, atom: Atom) -> StepValue:
    return StepValue(atom.val, atom.aval.shape, ()) if jaxprs.is_literal(atom) else env[atom]


def _output(atom: Atom, env: Env) -> StepValue:
    return StepValue.of(jaxprs.value(env, atom)) if jaxprs.is_literal(atom) else env[atom]
