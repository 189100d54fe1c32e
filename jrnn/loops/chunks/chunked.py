"""Runs a loop whose matrix carries are computed in chunks.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Var, primitives
from jrnn.loops.affine.carries import (
    CarrySchedule,
    CarryStage,
    Group,
    part_of,
)
from jrnn.loops.affine.matrix import AffineForm, is_evaluable, matrix_form
from jrnn.loops.chunks import estimate
from jrnn.loops.chunks.batched import AllChunks
from jrnn.loops.chunks.labeled import variables
from jrnn.loops.chunks.program import ChunkBody
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.ir import CARRY, Loop, Results, Unsupported, scan_in_chunks, tag
from jrnn.loops.ir.description import Description, contractions

_BOUNDARY = (
    64  # steps of a chunk that runs step by step; 32 and 128 took 1.1 times the time for Mamba-1
)

# The most steps of a chunk. On a CPU layers of every kind took 1.1 to 1.4 times as long with 64 as with 32. On an H200, with
# all chunks prepared at once, 64 took 0.78 (gated delta rule, Mamba-2) and 1.06 (gated linear attention) of the time of 32.
_LONGEST = 32
_LONGEST_BATCHED = 64
# The same on a CPU for decays that differ along rows or columns, whose blocks are one more level for twice as many steps.
# With 16, gradients of gated linear attention and of KDA took 0.87 to 0.96 of the time with 32, and compile sooner.
_LONGEST_OF_LEVELS = 16


def chunk_length(length: int, batched: bool = False) -> int:
    """Returns C, a power of two.

    Args:
        length: T.
        batched: all chunks are prepared at once.
    """
    return max(2, min(_LONGEST_BATCHED if batched else _LONGEST, 1 << (length - 1).bit_length()))


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
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        loop = self.loop
        if not self.stages:
            return _checkpointed(loop, consts, init, xs, length)
        env = dict(zip(loop.consts, consts))
        stacked = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, _projections(loop), env, stacked)
        last: dict[int, Any] = {}
        for number, stage in enumerate(self.stages):
            first = [init[i] for i in stage.carry]
            if stage.forms:
                later = self.stages[number + 1 :]
                outs = (
                    [v for form in stage.forms for v in form.readouts]
                    if later
                    else jaxprs.variables(loop.ys)
                )
                final, stacks = _in_chunks(
                    loop, stage, outs, first, env, stacked, length, self.size, self.batched
                )
                stacked.update(zip(outs, stacks))
            elif stage.kind == "overwritten":
                (i,), (value,) = stage.carry, first
                (stack,) = jaxprs.stacks(loop.eqns, [loop.carry_out[i]], env, stacked, length)
                stacked[loop.carry[i]] = jaxprs.shifted(
                    stack, jnp.asarray(value, stack.dtype), loop.reverse
                )
                final = [stack[0 if loop.reverse else -1]]
            else:
                carry = [loop.carry[i] for i in stage.carry]
                part = part_of(
                    loop, stage.carry, carry, env, stacked
                )  # its outputs are the carries before each step
                with (
                    tag.tagged(tag.Tag()) if self.batched else nullcontext()
                ):  # few kernels for its steps, too
                    inputs = [env[v] for v in part.consts], first, [stacked[v] for v in part.xs]
                    final, before = part.run(*inputs, length)
                stacked.update(zip(carry, before))
            last.update(zip(stage.carry, final))
        return [last[i] for i in range(len(init))], jaxprs.stacks(
            loop.eqns, loop.ys, env, stacked, length
        )


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
    loop: Loop, constants: dict[Var, Any], names: Sequence[str] = (), batched: bool = False
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
    schedule = CarrySchedule(loop)
    reasons = list[str]()  # why carries do not run in chunks
    solved_forms = dict[Group, AffineForm]()
    plain: set[Group] = set()  # groups without an affine form
    diagonal: list[Var] = []  # states of which each element has a decay of its own, as in Mamba-1
    while schedule.groups:
        ready = schedule.ready
        forms = {}
        form_of = functools.partial(_form, loop, schedule.known, constants)
        for g in (g for g in ready if g not in plain):
            try:
                forms[g] = form_of(g)
            except Unsupported as reason:
                joined = _joined(loop, g, schedule, form_of)
                if joined is not None:
                    forms[joined.positions] = joined
                    continue
                plain.add(g)
                if any(loop.carry[j].aval.ndim > 1 for j in g):
                    reasons.append(reason.explained([names[j] for j in g if names]))
        solved = {j for positions in forms for j in positions}
        others = [g for g in ready if not solved.issuperset(g)]
        if others:
            for g in others:
                schedule.add("overwritten" if schedule.is_overwritten(g) else "opaque", g)
        elif max(form.width for form in forms.values()) < 4:
            plain.update(ready)  # a vector, such as a normalizer, is not worth chunks of its own
            diagonal += [
                loop.carry[j]
                for positions in forms
                for j in positions
                if loop.carry[j].aval.ndim > 1
            ]
            continue
        else:
            schedule.add("affine", [*itertools.chain(*forms)], tuple(forms.values()))
            solved_forms.update(forms)
    size = chunk_length(loop.length, batched)
    if not batched and any(form.decays_along_k or form.columns for form in solved_forms.values()):
        size = min(size, _LONGEST_OF_LEVELS)
    count = -(-loop.length // size)
    notes = [f"not in chunks: {reason}" for reason in reasons]
    for positions, form in solved_forms.items():
        text = form.description([names[j] for j in positions if names])
        notes.append(f"solved in chunks of {size}: {text}, stored at {count} boundaries")
    if not any(stage.forms for stage in schedule.stages) and diagonal and loop.length > _BOUNDARY:
        count = -(-loop.length // _BOUNDARY)
        shapes = ", ".join(v.aval.str_short() for v in diagonal)
        return Chunkwise(
            loop, (), (f"{shapes} stored at {count} boundaries of chunks of {_BOUNDARY}",), size
        )
    if not any(stage.forms for stage in schedule.stages):
        raise Unsupported("; ".join(reasons) or "no carry is a matrix")
    return Chunkwise(loop, tuple(schedule.stages), tuple(notes), size, batched=batched)


def _form(
    loop: Loop, known: Collection[Var], constants: dict[Var, Any], group: Group
) -> AffineForm:
    """Returns the form of a group of carries; raises Unsupported if there is none, or if it has nothing to gain."""
    others = [out for j, out in enumerate(loop.carry_out) if j not in group]
    form = matrix_form(loop, group, known, [*loop.ys, *others], constants)
    if not form.known and not form.updates:
        raise Unsupported(
            f"nothing is written to {CARRY}",
            remedy="let the step close over a matrix that never changes",
        )
    axes = [l for l in form.forms.axes if l is not None and l != form.forms.contracted]
    if len(axes) > 1 and not form.free:
        raise Unsupported("transitions differ along every axis")
    return form


def _joined(
    loop: Loop, group: Group, schedule: CarrySchedule, form_of: Callable[..., AffineForm]
) -> AffineForm | None:
    """Returns the form of a group with pending groups that read its states as wholes, or None."""
    shape = loop.carry[group[0]].aval.shape
    ready = schedule.ready
    alike = [
        h
        for h in schedule.groups
        if h not in ready and all(loop.carry[j].aval.shape == shape for j in h)
    ]
    tried = [*((*group, *h) for h in alike), (*group, *itertools.chain(*alike))] if alike else []
    for several in filter(schedule.can_follow, dict.fromkeys(tried)):
        with suppress(Unsupported):
            return form_of(several)
    return None


def _projections(loop: Loop) -> list[Var]:
    """Returns products of inputs with constant matrices, which are computed for all steps before the loop."""
    moving = jaxprs.depends(loop.eqns, loop.carry)
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    projected = []
    for eqn in loop.eqns:
        operands = [jaxprs.is_in(a, varying) for a in eqn.invars]
        if (
            eqn.primitive.name == "dot_general"
            and sum(operands) == 1
            and eqn.params["dimension_numbers"][0][0]
        ):
            projected += [v for v in eqn.outvars if v not in moving]
    return projected


def _checkpointed(
    loop: Loop, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: int
) -> Results:
    """Runs all steps one by one. The reverse pass keeps the carries at chunk boundaries, and runs each chunk again."""

    def run_chunk(carry: Any, xs: Any, steps: Any) -> Results:
        with tag.tagged(tag.Tag()):  # the passes of other loops apply
            carry, ys = loop.run(consts, carry, xs, steps)
        return list(carry), list(ys)

    init = [jnp.asarray(c, v.aval.dtype) for c, v in zip(init, loop.carry)]
    wrap = functools.partial(jax.checkpoint, prevent_cse=False)
    return scan_in_chunks(run_chunk, init, list(xs), length, _BOUNDARY, loop.reverse, wrap)


def _in_chunks(
    loop: Loop,
    stage: CarryStage,
    outs: Sequence[Atom],
    first: Sequence[Any],
    env: Env,
    stacked: Env,
    length: int,
    size: int,
    batched: bool,
) -> Results:
    """Runs carries in chunks of `size` steps. Returns the last ones, and the outputs."""
    # A form may read the operands of a product that is computed before the loop.
    operands = [v for form in stage.forms for v in variables(form.terms)]
    body = ChunkBody(
        stage.forms, part_of(loop, stage.carry, outs, env, stacked, operands), size, batched
    )
    carry = body.loop.carry
    count = -(-length // size)
    extra = count * size - length

    def cut(x: Any) -> Any:
        if extra:
            fill = jnp.broadcast_to(x[:1] if loop.reverse else x[-1:], (extra, *x.shape[1:]))
            x = jnp.concatenate([fill, x] if loop.reverse else [x, fill])
        return x.reshape(count, size, *x.shape[1:])

    valid = jnp.arange(count * size) < length
    valid = (valid[::-1] if loop.reverse else valid).reshape(count, size) if extra else None
    chunk_xs = [cut(stacked[v]) for v in body.loop.xs]
    fixed = [env[v] for v in body.loop.consts]
    wide = [
        jnp.asarray(s, jaxprs.promoted_type(v.aval.dtype, jnp.float32))
        for s, v in zip(first, carry)
    ]
    if batched:
        flip = (lambda x: x[::-1, ::-1]) if loop.reverse else (lambda x: x)
        chunk_xs = [flip(x) for x in chunk_xs]
        valid = None if valid is None else flip(valid)
        last, stacks = AllChunks(body, count).run(wide, fixed, chunk_xs, valid)
        stacks = [flip(s) for s in stacks]
    else:

        def chunk(
            states: Sequence[Any], args: tuple[Any, Sequence[Any]]
        ) -> tuple[list[Any], list[Any]]:
            results = body.run(states, fixed, args[1], args[0])
            return results[: len(states)], results[len(states) :]

        rows = [x.reshape(count, -1) for x in chunk_xs]
        last, stacks = jax.lax.scan(
            chunk, [s.reshape(-1) for s in wide], (valid, rows), reverse=loop.reverse
        )
        last = [s.reshape(v.aval.shape) for s, v in zip(last, carry)]
    stacks = [s.reshape(count * size, *a.aval.shape) for s, a in zip(stacks, body.loop.ys)]
    stacks = [s[extra:] if loop.reverse else s[:length] for s in stacks]
    return [s.astype(v.aval.dtype) for s, v in zip(last, carry)], stacks
