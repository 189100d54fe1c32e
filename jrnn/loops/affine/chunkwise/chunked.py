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

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Var, primitives
from jrnn.loops.affine.carries import CarrySchedule, CarryStage, Group, part_of
from jrnn.loops.affine.chunkwise.batched import AllChunks
from jrnn.loops.affine.chunkwise.chunk_body import ChunkBody, ChunkInputs
from jrnn.loops.affine.chunkwise.guarded import Arrays, Pair
from jrnn.loops.affine.chunkwise.labeled import variables, without
from jrnn.loops.affine.matrix import AffineForm, is_evaluable, matrix_form
from jrnn.loops.costs.chunk_costs import ChunkedCarry, with_checkpoints, with_products
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import CARRY, Loop, Results, Unsupported, recomputed, scan_in_chunks, tag
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
        forms = itertools.chain(*[stage.forms for stage in self.stages])
        carries = list(map(_chunked_carry, forms))
        if carries:
            return with_products(estimator, carries, self.size, self.batched)
        return with_checkpoints(estimator, self.stored, self.size)

    def describe(self) -> Description:
        return Description(
            contractions=contractions(self.loop.eqns),
            remarks=self.notes,
            counts_contractions=False,
        )

    def run(
        self,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
        length: int,
    ) -> Results:
        loop = self.loop
        if not self.stages:
            return self._run_checkpointed(consts, init, xs, length)
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, _projections(loop), env, stacked)
        last: dict[int, Array] = {}
        for stage in self.stages:
            first = jaxprs.take(init, stage.carry)
            if stage.forms:
                final = self._run_in_chunks(stage, first, env, stacked, length)
            elif stage.kind == "overwritten":
                final = self._run_overwritten(stage, first, env, stacked, length)
            else:
                final = self._run_by_steps(stage, first, env, stacked, length)
            last.update(zip(stage.carry, final))
        ys = jaxprs.stacks(loop.eqns, loop.ys, env, stacked, length)
        return jaxprs.take(last, range(len(init))), ys

    # Each returns the last values of the carries of a stage, and adds what later stages read to `stacked`.

    def _run_overwritten(
        self,
        stage: CarryStage,
        first: Arrays,
        env: Env,
        stacked: Env,
        length: int,
    ) -> Arrays:
        """Runs a carry that is overwritten: its values come from the steps before."""
        loop = self.loop
        (i,) = stage.carry
        new = [loop.carry_out[i]]
        (stack,) = jaxprs.stacks(loop.eqns, new, env, stacked, length)
        value = jnp.asarray(first[0], stack.dtype)
        stacked[loop.carry[i]] = jaxprs.shifted(stack, value, loop.reverse)
        return [stack[0 if loop.reverse else -1]]

    def _run_by_steps(
        self,
        stage: CarryStage,
        first: Arrays,
        env: Env,
        stacked: Env,
        length: int,
    ) -> Arrays:
        """Runs opaque carries step by step."""
        carry = jaxprs.take(self.loop.carry, stage.carry)
        part = part_of(self.loop, stage.carry, carry, env, stacked)
        consts = jaxprs.take(env, part.consts)
        xs = jaxprs.take(stacked, part.xs)
        # On an accelerator there are few kernels for its steps, too.
        with tag.tagged(tag.Tag()) if self.batched else nullcontext():
            final, before = part.run(consts, first, xs, length)
        stacked.update(zip(carry, before))
        return final

    def _run_in_chunks(
        self,
        stage: CarryStage,
        first: Arrays,
        env: Env,
        stacked: Env,
        length: int,
    ) -> Arrays:
        """Runs affine carries in chunks. The last stage computes the outputs, too."""
        outs: list[Var] = []
        operands: list[Var] = []
        for form in stage.forms:
            outs += form.readouts
            # A form may read the operands of a product that is computed before the loop.
            operands += variables(form.terms)
        if stage is self.stages[-1]:
            outs = jaxprs.variables(self.loop.ys)
        part = part_of(self.loop, stage.carry, outs, env, stacked, operands)
        reverse = part.reverse
        count = -(-length // self.size)
        steps = count * self.size

        def cut(x: Array) -> Array:
            """Returns inputs in chunks. Copies of the last step fill the last chunk."""
            if steps > length:
                last = x[:1] if reverse else x[-1:]
                fill = jnp.broadcast_to(last, (steps - length, *x.shape[1:]))
                x = jnp.concatenate([fill, x] if reverse else [x, fill])
            return x.reshape(count, self.size, *x.shape[1:])

        valid = None  # steps after the end change nothing
        if steps > length:
            is_valid = jnp.arange(steps) < length
            valid = (is_valid[::-1] if reverse else is_valid).reshape(count, self.size)
        states = []
        for state, v in zip(first, part.carry):
            dtype = jaxprs.promoted_type(v.aval.dtype, jnp.float32)
            states.append(jnp.asarray(state, dtype))
        body = ChunkBody(stage.forms, part, self.size, self.batched)
        run = _run_at_once if self.batched else _run_loop
        consts = jaxprs.take(env, part.consts)
        xs = list(map(cut, jaxprs.take(stacked, part.xs)))
        inputs = ChunkInputs(states, consts, xs, valid)
        last, stacks = run(body, inputs, count)
        for v, stack in zip(outs, stacks):
            y = stack.reshape(steps, *v.aval.shape)
            stacked[v] = y[steps - length :] if reverse else y[:length]
        return [s.astype(v.aval.dtype) for s, v in zip(last, part.carry)]

    def _run_checkpointed(
        self,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
        length: int,
    ) -> Results:
        """Runs all steps one by one. The reverse pass keeps the carries at chunk boundaries, and runs each chunk again."""
        loop = self.loop

        def run_chunk(carry: Arrays, xs: Arrays, steps: int) -> Results:
            with tag.tagged(tag.Tag()):  # the passes of other loops apply
                carry, ys = loop.run(consts, carry, xs, steps)
            return list(carry), list(ys)

        return scan_in_chunks(
            recomputed(run_chunk),
            carry=[jnp.asarray(c, v.aval.dtype) for c, v in zip(init, loop.carry)],
            xs=list(xs),
            steps=length,
            size=STEPS.by_steps,
            reverse=loop.reverse,
        )


def _chunked_carry(form: AffineForm) -> ChunkedCarry:
    """Returns the numbers of a form that its cost depends on."""
    states = form.forms.states
    aval = states[0].aval
    k = form.forms.size[form.forms.contracted or 0]
    queries = 0
    for row in form.rows:
        queries += any(term.operand in states for term in row.terms)
    return ChunkedCarry(
        batch=len(states) * jaxprs.elements(aval.shape) // (k * form.width),
        k=k,
        v=form.width,
        itemsize=aval.dtype.itemsize,
        queries=queries,
        known=len(form.known),
        solved=len(form.solved),
        decays_along_k=form.decays_along_k,
    )


def _run_at_once(body: ChunkBody, inputs: ChunkInputs, count: int) -> Results:
    """Runs all chunks, which are prepared at once, in the order in which they run."""

    def flipped(x: Array) -> Array:
        return x[::-1, ::-1] if body.loop.reverse else x

    xs, valid = jax.tree.map(flipped, (inputs.xs, inputs.valid))
    inputs = inputs._replace(xs=xs, valid=valid)
    last, stacks = AllChunks(body, count).run(inputs)
    return last, list(map(flipped, stacks))


def _run_loop(body: ChunkBody, inputs: ChunkInputs, count: int) -> Results:
    """Runs a loop over chunks, whose arrays have one axis (`ChunkBody.run`).

    Flipping the inputs of a reverse loop in front of it took 1.14 times the time of flipping each chunk.
    """
    states, consts, xs, valid = inputs
    n = len(states)

    def chunk(states: Arrays, inputs: Any) -> Pair:
        valid_steps, rows = inputs
        results = body.run(ChunkInputs(states, consts, rows, valid_steps))
        return results[:n], results[n:]

    rows = [x.reshape(count, -1) for x in xs]
    flat = [s.reshape(-1) for s in states]
    stacked = (valid, rows)
    last, stacks = jax.lax.scan(chunk, flat, stacked, reverse=body.loop.reverse)
    last = [s.reshape(state.shape) for s, state in zip(last, states)]
    return last, stacks


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
        diagonal: states where each element has a decay of its own, as in Mamba-1.
        reasons: why carries do not run in chunks.
    """

    def __init__(
        self,
        loop: Loop,
        constants: Env,
        names: Sequence[str],
    ):
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
        axes = without(form.forms.axes, (None, form.forms.contracted))
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
        tried = dict.fromkeys([*alike, tuple(itertools.chain(*alike))])
        for others in tried:
            several = (*group, *others)
            if schedule.can_follow(several):
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
