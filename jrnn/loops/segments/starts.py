"""The segment of a device as a function, the stages of a loop, and the starts of all segments with their tangents.

Shapes: D devices, T steps of a segment, K the axis of S that the step contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs.mesh_axes import like
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import (
    CarrySchedule,
    CarryStage,
    Group,
    Kind,
    check_diagonal,
    part_of,
)
from jrnn.loops.affine.matrix import matrix_form
from jrnn.loops.ir import Loop, Unsupported, observers
from jrnn.loops.segments.shard import TimeShard, Values

_RUNS = 4  # runs of a basis that are worth it for any number of devices


@dataclass(frozen=True)
class Segment:
    """The loop of one device, as a function of its constants.

    Attributes:
        loop: the loop.
        run: `(step, carry, xs, length, linear=, elementwise=) -> (carry, ys)`, `scan` with the caller's options. `linear`
            is True for the loop that makes A, and `elementwise` if that loop is elementwise, as the step is.
    """

    loop: Loop
    run: Callable[..., Any]

    def whole(self, consts: Values, start: Values, xs: Values) -> tuple[Values, Values]:
        """Returns the last carry and the outputs."""
        return self._of(range(len(start)), self.loop.ys, consts, start, xs)

    def end(self, stage: CarryStage, consts: Values, start: Values, xs: Values) -> Values:
        """Returns the last carries of a stage."""
        ends = dict(zip(stage.reads, self._of(stage.reads, (), consts, start, xs)[0]))
        return [ends[i] for i in stage.carry]

    def _of(
        self, carry: Sequence[int], ys: Sequence[Any], consts: Values, start: Values, xs: Values
    ) -> Any:
        step, stacks = self._part(carry, ys, consts, start, xs)
        return self.run(step, [start[i] for i in carry], stacks, self.loop.length)

    def _part(
        self, carry: Sequence[int], ys: Sequence[Any], consts: Values, start: Values, xs: Values
    ) -> tuple[Callable[[Values, Values], tuple[Values, Values]], Values]:
        """Returns the step of some of the carries and outputs, and the inputs that it reads."""
        loop = self.loop
        stacks = dict(zip(self.loop.xs, xs))
        known = dict(
            zip((*loop.consts, *loop.carry), (*consts, *start))
        )  # a checkpoint may read carries in vain
        part = part_of(loop, carry, ys, known, stacks)
        fixed = [known[v] for v in part.consts]

        def step(old: Values, x: Values) -> tuple[Values, Values]:
            outs = part.step(*fixed, *old, *x)
            return [like(new, v) for new, v in zip(outs, old)], outs[len(old) :]

        return step, [stacks[v] for v in part.xs]

    def matrix(
        self, stage: CarryStage, transition: Blocks, consts: Values, start: Values, xs: Values
    ) -> Any:
        """Returns A of a group of carries."""
        mine = transition.carries
        count = len(transition.carries)
        others = [i for i in stage.reads if i not in stage.carry]
        states = [start[i] for i in mine]
        part, stacks = self._part([*mine, *others], (), consts, start, xs)

        def step(old: Any, x: Values) -> tuple[Any, None]:
            rest, columns = old
            zeros = list(map(jnp.zeros_like, states))

            def linear(column: Values) -> Values:
                return jax.jvp(
                    lambda state: part([*state, *rest], x)[0][:count], (zeros,), (column,)
                )[1]

            return (part([*zeros, *rest], x)[0][count:], [linear(c) for c in columns]), None

        units = [transition.basis(run, states) for run in range(transition.runs)]
        basis = [[like(unit, v) for unit, v in zip(column, states)] for column in units]
        elementwise = transition.block == len(mine) and not others
        first = [start[i] for i in others], basis
        (_, columns), _ = self.run(
            step, first, stacks, self.loop.length, linear=True, elementwise=elementwise
        )
        return transition.matrix([jnp.stack(each) for each in zip(*columns)])


@dataclass(frozen=True)
class Solver:
    """Computes the starts of segments, and their tangents.

    Attributes:
        shard: where this device's segment stands.
        segment: its loop.
        stages: the stages.
        alone: whether one device may compute while others wait; not if the step communicates.
    """

    shard: TimeShard
    segment: Segment
    stages: tuple[CarryStage, ...]
    alone: bool

    @property
    def is_guarded(self) -> bool:
        return any(stage.kind == "affine" for stage in self.stages)

    def starts(self, consts: Values, init: Values, xs: Values) -> tuple[Values, list[Any], Any]:
        """Returns this device's start, A of each stage, and whether all of it is finite."""
        start = list(init)
        matrices = []
        checked = []
        for stage in self.stages:
            a = [self.segment.matrix(stage, t, consts, start, xs) for t in stage.forms]
            matrices.append(a)

            def end(values: Values, stage: CarryStage = stage, start: Values = start) -> Values:
                return self.segment.end(
                    stage, consts, jaxprs.replaced(start, stage.carry, values), xs
                )

            first = [init[i] for i in stage.carry]
            starts = self._stage(stage, stage.carry, a, first, end, checked, self.alone)
            start = jaxprs.replaced(start, stage.carry, starts)
        if not self.is_guarded:
            return start, matrices, True
        finite = rounds.all_finite([lax.stop_gradient(v) for v in checked])
        good = self.shard.everywhere(finite)

        def one_after_another(init: Values) -> Values:
            return self.shard.one_after_another(
                init, lambda start: self.segment.whole(consts, start, xs)[0], self.alone
            )

        return (
            lax.cond(
                good, lambda start, _: start, lambda _, init: one_after_another(init), start, init
            ),
            matrices,
            good,
        )

    def tangents(
        self, init: dict[int, Any], matrices: list[Any], good: Any, push: Callable
    ) -> dict[int, Any]:
        """Returns the tangents of the start, by position; only carries of floating-point numbers have one.

        Args:
            init: the tangents of the first start.
            matrices, good: what `starts` returned.
            push: from the tangents of this device's start to those of its last carry, for the tangents of the inputs.
        """

        def in_stages(init: dict[int, Any]) -> dict[int, Any]:
            start = {i: jnp.zeros_like(v) for i, v in init.items()}
            for stage, a in zip(self.stages, matrices):
                carry = [i for i in stage.carry if i in init]

                def end(values: Values, carry: Values = carry, start: Any = start) -> Values:
                    ends = push({**start, **dict(zip(carry, values))})
                    return [ends[i] for i in carry]

                if carry:
                    starts = self._stage(
                        stage, carry, a, [init[i] for i in carry], end, [], alone=False
                    )
                    start = {**start, **dict(zip(carry, starts))}
            return start

        def one_after_another(init: dict[int, Any]) -> dict[int, Any]:
            def end(values: Values) -> Values:
                return list(push(dict(zip(init, values))).values())

            return dict(
                zip(init, self.shard.one_after_another(list(init.values()), end, alone=False))
            )

        return (
            lax.cond(good, in_stages, one_after_another, init)
            if self.is_guarded
            else in_stages(init)
        )

    def _stage(
        self,
        stage: CarryStage,
        carry: Sequence[int],
        matrices: Any,
        first: Values,
        end: Callable,
        checked: Values,
        alone: bool,
    ) -> Values:
        """Returns the starts of the carries of a stage, and adds what must be finite to `checked`."""
        shard = self.shard
        if stage.kind == "overwritten":
            return shard.at(0, first, shard.sent_to_next(end(first)))
        if stage.kind == "opaque":
            return shard.one_after_another(first, end, alone)

        def apply(matrices: Any, start: Values, b: Values) -> Values:
            return end_of_stage(stage, matrices, start, b, carry)

        b = end(list(map(jnp.zeros_like, first)))
        start = shard.affine_starts(first, matrices, b, apply)
        checked += [*jax.tree.leaves(matrices), *b, *start, *apply(matrices, start, b)]
        return start


# The stages of a loop, and how A of affine carries is laid out -----------------------------------------------------------


def end_of_stage(
    stage: CarryStage, matrices: Sequence[Any], start: Values, b: Values, carry: Sequence[int] = ()
) -> Values:
    """Returns `A start + b` for the carries at these positions, by default all of a stage; b if they are overwritten."""
    carry = carry or stage.carry
    new = dict(zip(carry, b))
    for blocks, a in zip(stage.forms, matrices):
        before = [start[carry.index(i)] for i in blocks.carries]
        new.update(
            (i, v.astype(new[i].dtype) + new[i])
            for i, v in zip(blocks.carries, blocks.applied(a, before))
        )
    return [new[i] for i in carry]


def stages(loop: Loop, constants: dict[Any, Any], count: int) -> list[CarryStage]:
    """Returns the stages of a loop, each after those that it reads.

    Args:
        loop: the loop of one device, with calls and checkpoints inlined.
        constants: values of variables that are known now.
        count: D.
    """
    schedule = CarrySchedule(loop)
    while schedule.groups:
        kinds: dict[Kind, dict[Group, Any]] = {"overwritten": {}, "affine": {}, "opaque": {}}
        for g in schedule.ready:
            kind, how = _kind(loop, g, schedule, constants, count)
            kinds[kind][g] = how
        kind, chosen = next((kind, chosen) for kind, chosen in kinds.items() if chosen)
        forms = chosen.values() if kind == "affine" else ()
        why = "; ".join(dict.fromkeys(chosen.values())) if kind == "opaque" else ""
        schedule.add(kind, sorted(i for g in chosen for i in g), tuple(forms), why)
    return schedule.stages


def _kind(
    loop: Loop, group: Group, schedule: CarrySchedule, constants: dict[Any, Any], count: int
) -> tuple[Kind, Any]:
    """Returns the kind of a group of carries, and its transition or the reason why it is opaque."""
    if schedule.is_overwritten(group):
        return "overwritten", None
    try:
        transition = _transition(loop, group, schedule, constants)
    except Unsupported as why:
        return "opaque", why.explained()
    except Exception as error:
        return "opaque", observers.report_unexpected(error)
    if transition.runs > max(_RUNS, count):
        return (
            "opaque",
            f"its transition takes {transition.runs} runs of the loop, and there are {count} devices",
        )
    return "affine", transition


def _transition(
    loop: Loop, group: Group, schedule: CarrySchedule, constants: dict[Any, Any]
) -> Blocks:
    """Returns how A of a group is laid out: one number for each element, or a matrix along the axis that is contracted."""
    shape = loop.carry[group[0]].aval.shape
    axes = tuple(range(len(shape)))
    try:
        check_diagonal(loop, group, schedule.between)
        return Blocks(group, (shape,) * len(group), axes)
    except Unsupported:
        if len(group) > 1 or len(shape) < 2:
            raise
    form = matrix_form(loop, group, schedule.known, [], constants)
    same = tuple(axis for axis in form.free if axis not in form.columns)
    return Blocks(
        group,
        (shape,),
        tuple(d for d in axes if d != form.forms.contracted and d not in same),
        same,
    )
