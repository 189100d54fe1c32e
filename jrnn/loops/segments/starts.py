"""The segment of a device as a function, the stages of a loop, and the starts of all segments with their tangents.

Shapes: D devices, T steps of a segment, K the axis of S that the step contracts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env
from jrnn.jaxprs.mesh_axes import like
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import CarrySchedule, CarryStage, Group, Kind, part_of
from jrnn.loops.affine.reader import read_step
from jrnn.loops.ir import Loop, Tree, Unsupported, observers
from jrnn.loops.segments.shard import TimeShard, Values

MIN_RUNS = 4  # this number of runs of a basis is worth it for any number of devices

# `(step, carry, xs, length, linear=, elementwise=) -> (carry, ys)`
RunScan = Callable[..., tuple[Tree, Tree]]
# The tangents of carries, by position.
Tangents = dict[int, Array]
# What sums up the affine carries of a stage: A of each group.
Matrices = list[Array]


@dataclass(frozen=True)
class Segment:
    """The loop of one device, as a function of its constants.

    Attributes:
        loop: the loop.
        run: `(step, carry, xs, length, linear=, elementwise=) -> (carry, ys)`, `scan` with the caller's options. `linear`
            is True for the loop that makes A, and `elementwise` if that loop is elementwise, as the step is.
    """

    loop: Loop
    run: RunScan

    def whole(
        self,
        consts: Values,
        start: Values,
        xs: Values,
    ) -> tuple[Values, Values]:
        """Returns the last carry and the outputs."""
        return self._of(range(len(start)), self.loop.ys, consts, start, xs)

    def end(
        self,
        stage: CarryStage,
        consts: Values,
        start: Values,
        xs: Values,
    ) -> Values:
        """Returns the last carries of a stage."""
        last, _ = self._of(stage.reads, (), consts, start, xs)
        ends = dict(zip(stage.reads, last))
        return jaxprs.take(ends, stage.carry)

    def _of(
        self,
        carry: Sequence[int],
        ys: Sequence[Atom],
        consts: Values,
        start: Values,
        xs: Values,
    ) -> tuple[Values, Values]:
        """Runs the part of the loop that makes some of the carries and outputs."""
        step, inputs = self._part(carry, ys, consts, start, xs)
        return self.run(step, jaxprs.take(start, carry), inputs, self.loop.length)

    def _part(
        self,
        carry: Sequence[int],
        ys: Sequence[Atom],
        consts: Values,
        start: Values,
        xs: Values,
    ) -> tuple[Callable[[Values, Values], tuple[Values, Values]], Values]:
        """Returns the step of some of the carries and outputs, and the inputs that it reads."""
        loop = self.loop
        inputs = dict(zip(loop.xs, xs))
        known = dict(zip(loop.consts, consts))
        known.update(zip(loop.carry, start))  # a checkpoint may read carries in vain
        part = part_of(loop, carry, ys, known, inputs)
        fixed = jaxprs.take(known, part.consts)

        def step(old, x):
            outs = part.step(*fixed, *old, *x)
            return list(map(like, outs, old)), outs[len(old) :]

        return step, jaxprs.take(inputs, part.xs)

    def matrices(
        self,
        stage: CarryStage,
        consts: Values,
        start: Values,
        xs: Values,
    ) -> Matrices:
        """Returns A of each group of carries of a stage."""
        return [self._matrix(stage, form, consts, start, xs) for form in stage.forms]

    def _matrix(
        self,
        stage: CarryStage,
        transition: Blocks,
        consts: Values,
        start: Values,
        xs: Values,
    ) -> Array:
        """Returns A of a group of carries: the linear part of the step, applied to a basis at every step.

        The linear part is a derivative here, whatever the kind of the step: A covers all steps of the segment. A loop
        applies it to the basis, and a matrix step applies its terms without computing their matrix.
        """
        group = transition.carries
        count = len(group)
        others = [i for i in stage.reads if i not in stage.carry]
        states = jaxprs.take(start, group)
        part, inputs = self._part([*group, *others], (), consts, start, xs)

        def step(carried, x):
            rest, columns = carried
            zeros = list(map(jnp.zeros_like, states))

            def new(state):
                carry, _ = part([*state, *rest], x)
                return carry

            def linear(column):
                _, tangents = jax.jvp(lambda state: new(state)[:count], (zeros,), (column,))
                return tangents

            return (new(zeros)[count:], list(map(linear, columns))), None

        basis = []
        for run in range(transition.runs):
            basis.append(list(map(like, transition.basis(run, states), states)))
        (_, columns), _ = self.run(
            step,
            (jaxprs.take(start, others), basis),
            inputs,
            self.loop.length,
            linear=True,
            elementwise=transition.block == count and not others,
        )
        return transition.matrix(list(map(jnp.stack, zip(*columns))))


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
        """Whether a summary may overflow where the carries do not, so that it is checked."""
        return any(stage.kind == "affine" for stage in self.stages)

    def starts(
        self,
        consts: Values,
        init: Values,
        xs: Values,
    ) -> tuple[Values, list[Matrices], Array | bool]:
        """Returns this device's start, A of each stage, and whether all of it is finite."""
        start = list(init)
        matrices = []
        checked = []
        for stage in self.stages:
            a = self.segment.matrices(stage, consts, start, xs)
            matrices.append(a)

            def end(values, stage=stage, start=start):
                start = jaxprs.replaced(start, stage.carry, values)
                return self.segment.end(stage, consts, start, xs)

            first = jaxprs.take(init, stage.carry)
            starts = self._stage(stage, stage.carry, a, first, end, checked, self.alone)
            start = jaxprs.replaced(start, stage.carry, starts)
        if not self.is_guarded:
            return start, matrices, True
        finite = rounds.all_finite(list(map(lax.stop_gradient, checked)))
        is_finite = self.shard.everywhere(finite)

        def whole_end(start):
            last, _ = self.segment.whole(consts, start, xs)
            return last

        def in_stages(start, init):
            return start

        def one_after_another(start, init):
            return self.shard.one_after_another(init, whole_end, self.alone)

        start = lax.cond(is_finite, in_stages, one_after_another, start, init)
        return start, matrices, is_finite

    def tangents(
        self,
        init: Tangents,
        matrices: list[Matrices],
        is_finite: Array | bool,
        push: Callable[[Tangents], Tangents],
    ) -> Tangents:
        """Returns the tangents of the start, by position; only carries of floating-point numbers have one.

        Args:
            init: the tangents of the first start.
            matrices, is_finite: what `starts` returned.
            push: from the tangents of this device's start to its last carry's, for the tangents of the inputs.
        """

        def in_stages(init):
            start = {i: jnp.zeros_like(v) for i, v in init.items()}
            for stage, a in zip(self.stages, matrices):
                carry = [i for i in stage.carry if i in init]
                if not carry:
                    continue

                def end(values, carry=carry, start=start):
                    ends = push({**start, **dict(zip(carry, values))})
                    return jaxprs.take(ends, carry)

                first = jaxprs.take(init, carry)
                starts = self._stage(stage, carry, a, first, end, [], alone=False)
                start = {**start, **dict(zip(carry, starts))}
            return start

        def one_after_another(init):
            def end(values):
                return list(push(dict(zip(init, values))).values())

            starts = self.shard.one_after_another(list(init.values()), end, alone=False)
            return dict(zip(init, starts))

        if not self.is_guarded:
            return in_stages(init)
        return lax.cond(is_finite, in_stages, one_after_another, init)

    def _stage(
        self,
        stage: CarryStage,
        carry: Sequence[int],
        matrices: Matrices,
        first: Values,
        end: Callable[[Values], Values],
        checked: Values,
        alone: bool,
    ) -> Values:
        """Returns the starts of the carries of a stage, and adds what must be finite to `checked`."""
        shard = self.shard
        if stage.kind == "overwritten":
            return shard.at(0, first, shard.sent_to_next(end(first)))
        if stage.kind == "opaque":
            return shard.one_after_another(first, end, alone)

        def apply(matrices, start, b):
            return end_of_stage(stage, matrices, start, b, carry)

        b = end(list(map(jnp.zeros_like, first)))
        start = shard.affine_starts(first, matrices, b, apply)
        checked += [*jax.tree.leaves(matrices), *b, *start, *apply(matrices, start, b)]
        return start


# The stages of a loop, and how A of affine carries is laid out -----------------------------------------------------------


def end_of_stage(
    stage: CarryStage,
    matrices: Sequence[Array],
    start: Values,
    b: Values,
    carry: Sequence[int] = (),
) -> Values:
    """Returns `A start + b` for the carries at these positions, by default all of a stage; b if they are overwritten."""
    carry = carry or stage.carry
    new = dict(zip(carry, b))
    for blocks, a in zip(stage.forms, matrices):
        before = [start[carry.index(i)] for i in blocks.carries]
        for i, v in zip(blocks.carries, blocks.applied(a, before)):
            new[i] = v.astype(new[i].dtype) + new[i]
    return jaxprs.take(new, carry)


def stages(
    loop: Loop,
    constants: Env,
    count: int,
) -> list[CarryStage]:
    """Returns the stages of a loop, each after the stages that it reads.

    Args:
        loop: the loop of one device, with calls and checkpoints inlined.
        constants: values of variables that are known now.
        count: D.
    """
    schedule = CarrySchedule(loop)
    while schedule.groups:
        # All groups that can be computed now, of the kind that takes the least: the others wait for them.
        kinds: dict[Kind, dict[Group, Blocks | str | None]] = {
            "overwritten": {},
            "affine": {},
            "opaque": {},
        }
        for group in schedule.ready:
            kind, how = _kind(loop, group, schedule, constants, count)
            kinds[kind][group] = how
        kind = next(filter(kinds.__getitem__, kinds))
        groups = kinds[kind]
        forms = tuple(groups.values()) if kind == "affine" else ()
        why = "; ".join(dict.fromkeys(groups.values())) if kind == "opaque" else ""
        schedule.add(kind, sorted(itertools.chain.from_iterable(groups)), forms, why)
    return schedule.stages


def _kind(
    loop: Loop,
    group: Group,
    schedule: CarrySchedule,
    constants: Env,
    count: int,
) -> tuple[Kind, Blocks | str | None]:
    """Returns the kind of a group of carries, and its transition or the reason why it is opaque."""
    if schedule.is_overwritten(group):
        return "overwritten", None
    try:
        transition = read_step(loop, group, schedule, constants).blocks
    except Unsupported as why:
        return "opaque", why.explained()
    except Exception as error:
        return "opaque", observers.report_unexpected(error)
    if transition.runs > max(MIN_RUNS, count):
        why = f"its transition takes {transition.runs} runs of the loop, and there are {count} devices"
        return "opaque", why
    return "affine", transition
