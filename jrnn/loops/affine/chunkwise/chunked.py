"""The node of a loop whose matrix carries are computed in chunks, and how it is planned and run.

A step may have several carries: the matrix S of a linear attention, its normalizer, the last token of a token shift, and an
opaque carry such as a counter. `chunkwise` divides them into stages, each after the stages that it reads:

- *overwritten*: the new value does not read the old one; it is computed for all steps at once.
- *affine*: matrices with an affine form (`affine/matrix.py`), in chunks. Inside a chunk there are products of matrices
  (`chunk.py`), and a loop over chunks carries S.
- *opaque*: all others, step by step.

Where no matrix has products to gain, as in Mamba-1, whose states have a decay for each element, all steps run one by one,
and the reverse pass stores the carries at chunk boundaries alone.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Var, primitives
from jrnn.loops.affine.carries import (
    CarrySchedule,
    CarryStage,
    Group,
    part_of,
)
from jrnn.loops.affine.chunkwise import estimate
from jrnn.loops.affine.chunkwise.batched import AllChunks
from jrnn.loops.affine.chunkwise.labeled import variables
from jrnn.loops.affine.chunkwise.program import ChunkBody
from jrnn.loops.affine.matrix import AffineForm, is_evaluable, matrix_form
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.ir import CARRY, Loop, Results, Unsupported, scan_in_chunks, tag
from jrnn.loops.ir.description import Description, contractions


class Steps(NamedTuple):
    """The most steps of a chunk.

    Attributes:
        by_steps: of chunks that run step by step; 32 and 128 took 1.1 times the time for Mamba-1.
        on_cpu: with 64, layers of every kind took 1.1 to 1.4 times the time with 32.
        of_levels: on a CPU, for decays that differ along rows or columns, whose blocks are one more level for twice as many
            steps. With 16, gradients of gated linear attention and of KDA took 0.87 to 0.96 of the time with 32, and compile
            sooner.
        batched: all chunks are prepared at once. On an H200, 64 took 0.78 (gated delta rule, Mamba-2) and 1.06 (gated linear
            attention) of the time of 32.
    """

    by_steps: int = 64
    on_cpu: int = 32
    of_levels: int = 16
    batched: int = 64


STEPS = Steps()


def chunk_length(length: int, batched: bool = False) -> int:
    """Returns C, a power of two.

    Args:
        length: T.
        batched: all chunks are prepared at once.
    """
    most = STEPS.batched if batched else STEPS.on_cpu
    return max(2, min(most, 1 << (length - 1).bit_length()))


@dataclass(frozen=True)
class Chunkwise:
    """The node of a loop whose carries are computed in stages, some of them in chunks.

    Attributes:
        loop: the loop.
        stages: in order; none if all steps run one by one, with the states of chunk boundaries stored.
        notes: what runs in chunks, and why other carries do not.
        size: C.
        stored: the bytes a step of states that JAX's derivative of the loop would store.
        batched: all chunks are prepared at once, which is for accelerators (`batched.py`).
    """

    loop: Loop
    stages: tuple[CarryStage, ...]
    notes: tuple[str, ...]
    size: int
    stored: int = 0
    batched: bool = False

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns what a train step costs."""
        forms = [form for stage in self.stages for form in stage.forms]
        if forms:
            return estimate.with_products(estimator, forms, self.size, self.batched)
        return estimate.with_checkpoints(estimator, self.stored, self.size)

    def describe(self) -> Description:
        return Description(
            contractions=contractions(self.loop.eqns),
            remarks=self.notes,
            counts_contractions=False,
        )

    def run(
        self, consts: Sequence[Array], init: Sequence[Array], xs: Sequence[Array], length: int
    ) -> Results:
        loop = self.loop
        if not self.stages:
            return _checkpointed(loop, consts, init, xs, length)
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, _projections(loop), env, stacked)
        last: dict[int, Array] = {}
        for stage in self.stages:
            first = [init[i] for i in stage.carry]
            if stage.forms:
                outs = jaxprs.variables(loop.ys)
                if stage is not self.stages[-1]:
                    outs = list(itertools.chain(*(form.readouts for form in stage.forms)))
                final, stacks = _in_chunks(self, stage, outs, first, env, stacked, length)
                stacked.update(zip(outs, stacks))
            elif stage.kind == "overwritten":
                final = self._run_overwritten(stage, first[0], env, stacked, length)
            else:
                final = self._run_by_steps(stage, first, env, stacked, length)
            last.update(zip(stage.carry, final))
        ys = jaxprs.stacks(loop.eqns, loop.ys, env, stacked, length)
        return [last[i] for i in range(len(init))], ys

    def _run_overwritten(
        self, stage: CarryStage, first: Array, env: Env, stacked: Env, length: int
    ) -> list[Array]:
        """Returns the last value of a carry that is overwritten. Adds the value before each step to `stacked`."""
        loop = self.loop
        (i,) = stage.carry
        (stack,) = jaxprs.stacks(loop.eqns, [loop.carry_out[i]], env, stacked, length)
        value = jnp.asarray(first, stack.dtype)
        stacked[loop.carry[i]] = jaxprs.shifted(stack, value, loop.reverse)
        return [stack[0 if loop.reverse else -1]]

    def _run_by_steps(
        self, stage: CarryStage, first: Sequence[Array], env: Env, stacked: Env, length: int
    ) -> list[Array]:
        """Returns the last values of opaque carries. Adds their values before each step to `stacked`."""
        carry = [self.loop.carry[i] for i in stage.carry]
        part = part_of(self.loop, stage.carry, carry, env, stacked)
        consts = [env[v] for v in part.consts]
        xs = [stacked[v] for v in part.xs]
        # On an accelerator there are few kernels for its steps, too.
        with tag.tagged(tag.Tag()) if self.batched else nullcontext():
            final, before = part.run(consts, first, xs, length)
        stacked.update(zip(carry, before))
        return final


def check(loop: Loop) -> None:
    """Raises Unsupported if an equation of a loop cannot be evaluated for all steps of a chunk."""
    stuck = next((e for e in loop.eqns if not is_evaluable(e)), None)
    if stuck is not None:
        raise Unsupported(
            f"{stuck.primitive.name} stays in the loop: {primitives.why_immovable(stuck)}",
            stuck,
            remedy="compute it before the loop, and pass its values as xs",
        )


def chunkwise(
    loop: Loop, constants: Env, names: Sequence[str] = (), batched: bool = False
) -> Chunkwise:
    """Returns the loop in chunks.

    Args:
        loop: the loop.
        constants: values of variables that are known now.
        names: what the user calls the carries, or nothing.
        batched: prepares all chunks at once.

    Raises:
        Unsupported: if no carry runs in chunks, with the reasons.
    """
    check(loop)
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))
    loop = replace(loop, eqns=tuple(eqns))
    planned = _Planned(loop, constants, names)
    planned.plan()
    stages = planned.schedule.stages
    size = chunk_length(loop.length, batched)
    if any(stage.forms for stage in stages):
        forms = planned.forms.values()
        if not batched and any(form.decays_along_k or form.columns for form in forms):
            size = min(size, STEPS.of_levels)
        notes = planned.notes(size)
        return Chunkwise(loop, tuple(stages), tuple(notes), size, batched=batched)
    if planned.diagonal and loop.length > STEPS.by_steps:
        count = -(-loop.length // STEPS.by_steps)
        shapes = ", ".join(v.aval.str_short() for v in planned.diagonal)
        note = f"{shapes} stored at {count} boundaries of chunks of {STEPS.by_steps}"
        return Chunkwise(loop, (), (note,), size)
    raise Unsupported("; ".join(planned.reasons) or "no carry is a matrix")


class _Planned:
    """The stages of a loop, as they are found.

    Attributes:
        loop: the loop.
        constants: values of variables that are known now.
        names: what the user calls the carries, or nothing.
        schedule: the stages, and the groups of carries that have none yet.
        forms: the forms of carries that run in chunks.
        diagonal: states of which each element has a decay of its own, as in Mamba-1.
        reasons: why carries do not run in chunks.
    """

    def __init__(self, loop: Loop, constants: Env, names: Sequence[str]):
        self.loop = loop
        self.constants = constants
        self.names = names
        self.schedule = CarrySchedule(loop)
        self.forms: dict[Group, AffineForm] = {}
        self.diagonal: list[Var] = []
        self.reasons: list[str] = []
        self._without_form: set[Group] = set()

    def plan(self) -> None:
        """Finds all stages."""
        schedule = self.schedule
        while schedule.groups:
            ready = schedule.ready
            forms = self._forms_of(ready)
            solved = set(itertools.chain(*forms))
            others = [group for group in ready if not solved.issuperset(group)]
            if others:
                for group in others:
                    is_overwritten = schedule.is_overwritten(group)
                    schedule.add("overwritten" if is_overwritten else "opaque", group)
            elif max(form.width for form in forms.values()) < 4:
                # A vector, such as a normalizer, is not worth chunks of its own.
                self._without_form.update(ready)
                self.diagonal += self._matrices_of(itertools.chain(*forms))
            else:
                schedule.add("affine", list(itertools.chain(*forms)), tuple(forms.values()))
                self.forms.update(forms)

    def notes(self, size: int) -> list[str]:
        """Returns what `explain` says: which carries run in chunks of this size, and why others do not."""
        count = -(-self.loop.length // size)
        notes = [f"not in chunks: {reason}" for reason in self.reasons]
        for group, form in self.forms.items():
            text = form.description(self._names_of(group))
            notes.append(f"solved in chunks of {size}: {text}, stored at {count} boundaries")
        return notes

    def _forms_of(self, ready: Sequence[Group]) -> dict[Group, AffineForm]:
        """Returns the forms of groups, or of these and others that read them as wholes."""
        forms: dict[Group, AffineForm] = {}
        for group in ready:
            if group in self._without_form:
                continue
            try:
                forms[group] = self._form(group)
            except Unsupported as reason:
                joined = self._joined(group)
                if joined is not None:
                    forms[joined.positions] = joined
                    continue
                self._without_form.add(group)
                if self._matrices_of(group):
                    self.reasons.append(reason.explained(self._names_of(group)))
        return forms

    def _names_of(self, group: Group) -> list[str]:
        return [self.names[i] for i in group if self.names]

    def _matrices_of(self, carries: Iterable[int]) -> list[Var]:
        variables = [self.loop.carry[i] for i in carries]
        return [v for v in variables if v.aval.ndim > 1]

    def _form(self, group: Group) -> AffineForm:
        """Returns the form of a group of carries; raises Unsupported if there is none, or if it has nothing to gain."""
        loop = self.loop
        others = [out for i, out in enumerate(loop.carry_out) if i not in group]
        outs = [*loop.ys, *others]
        form = matrix_form(loop, group, self.schedule.known, outs, self.constants)
        if not form.known and not form.updates:
            remedy = "let the step close over a matrix that never changes"
            raise Unsupported(f"nothing is written to {CARRY}", remedy=remedy)
        axes = [l for l in form.forms.axes if l is not None and l != form.forms.contracted]
        if len(axes) > 1 and not form.free:
            raise Unsupported("transitions differ along every axis")
        return form

    def _joined(self, group: Group) -> AffineForm | None:
        """Returns the form of a group with pending groups that read its states as wholes, or None."""
        schedule = self.schedule
        ready = schedule.ready
        shape = self.loop.carry[group[0]].aval.shape
        alike = []
        for other in schedule.groups:
            shapes = {self.loop.carry[i].aval.shape for i in other}
            if other not in ready and shapes == {shape}:
                alike.append(other)
        if not alike:
            return None
        tried = [(*group, *other) for other in alike]
        tried.append((*group, *itertools.chain(*alike)))
        for several in filter(schedule.can_follow, dict.fromkeys(tried)):
            with suppress(Unsupported):
                return self._form(several)
        return None


def _projections(loop: Loop) -> list[Var]:
    """Returns products of inputs with constant matrices, which are computed for all steps before the loop."""
    projected = []
    for eqn in loop.eqns:
        if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][0][0]:
            continue
        if sum(jaxprs.is_in(a, loop.varying) for a in eqn.invars) == 1:
            projected += [v for v in eqn.outvars if v not in loop.on_carry]
    return projected


def _checkpointed(
    loop: Loop, consts: Sequence[Array], init: Sequence[Array], xs: Sequence[Array], length: int
) -> Results:
    """Runs all steps one by one. The reverse pass keeps the carries at chunk boundaries, and runs each chunk again."""

    def run_chunk(carry: Sequence[Array], xs: Sequence[Array], steps: int) -> Results:
        with tag.tagged(tag.Tag()):  # the passes of other loops apply
            carry, ys = loop.run(consts, carry, xs, steps)
        return list(carry), list(ys)

    first = [jnp.asarray(c, v.aval.dtype) for c, v in zip(init, loop.carry)]
    wrap = functools.partial(jax.checkpoint, prevent_cse=False)
    return scan_in_chunks(run_chunk, first, list(xs), length, STEPS.by_steps, loop.reverse, wrap)


def _in_chunks(
    node: Chunkwise,
    stage: CarryStage,
    outs: Sequence[Atom],
    first: Sequence[Array],
    env: Env,
    stacked: Env,
    length: int,
) -> Results:
    """Runs carries in chunks. Returns the last ones, and the outputs."""
    loop = node.loop
    size = node.size
    # A form may read the operands of a product that is computed before the loop.
    operands: list[Var] = []
    for form in stage.forms:
        operands += variables(form.terms)
    part = part_of(loop, stage.carry, outs, env, stacked, operands)
    body = ChunkBody(stage.forms, part, size, node.batched)
    carry = part.carry
    count = -(-length // size)
    extra = count * size - length

    # Inputs are cut into chunks. The last one is filled up with copies of the last step, which change nothing.
    def cut(x: Array) -> Array:
        if extra:
            fill = jnp.broadcast_to(x[:1] if loop.reverse else x[-1:], (extra, *x.shape[1:]))
            x = jnp.concatenate([fill, x] if loop.reverse else [x, fill])
        return x.reshape(count, size, *x.shape[1:])

    valid = None
    is_valid = jnp.arange(count * size) < length
    if extra:
        valid = (is_valid[::-1] if loop.reverse else is_valid).reshape(count, size)
    chunk_xs = [cut(stacked[v]) for v in part.xs]
    consts = [env[v] for v in part.consts]
    states = []
    for state, v in zip(first, carry):
        states.append(jnp.asarray(state, jaxprs.promoted_type(v.aval.dtype, jnp.float32)))

    if node.batched:
        # All chunks are prepared at once, in the order in which they run.
        def flip(x: Array) -> Array:
            return x[::-1, ::-1] if loop.reverse else x

        in_order = None if valid is None else flip(valid)
        last, stacks = AllChunks(body, count).run(
            states, consts, list(map(flip, chunk_xs)), in_order
        )
        stacks = list(map(flip, stacks))
    else:
        # A loop over chunks, whose arrays have one axis (`ChunkBody.run`).
        def chunk(states: Sequence[Array], args: Any) -> tuple[list[Array], list[Array]]:
            results = body.run(states, consts, args[1], args[0])
            return results[: len(states)], results[len(states) :]

        rows = [x.reshape(count, -1) for x in chunk_xs]
        flat = [s.reshape(-1) for s in states]
        last, stacks = jax.lax.scan(chunk, flat, (valid, rows), reverse=loop.reverse)
        last = [s.reshape(v.aval.shape) for s, v in zip(last, carry)]

    ys = []
    for stack, atom in zip(stacks, part.ys):
        y = stack.reshape(count * size, *atom.aval.shape)
        ys.append(y[extra:] if loop.reverse else y[:length])
    return [s.astype(v.aval.dtype) for s, v in zip(last, carry)], ys
