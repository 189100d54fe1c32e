"""The stages in which the starts of segments are computed, read off the step.

Shapes: D devices, K the axis of S that the step contracts, R runs of a basis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.loops import chunks
from jrnn.loops.loop import Loop, strict_passes
from jrnn.loops.passes import associative
from jrnn.loops.segments.place import Values, like

Kind = Literal["kept", "affine", "handed"]
_RUNS = 4  # runs of a basis that are worth it for any number of devices


@dataclass(frozen=True)
class Transition:
    """How A of an affine group of carries is computed, kept and applied.

    Attributes:
        carry: the positions of the carries. If there are several, the step is elementwise in them.
        k: the axis that the step contracts, or None if it is elementwise.
        free: the axes along which A is the same, for a matrix state.
        shape: of the carries.
    """

    carry: tuple[int, ...]
    shape: tuple[int, ...]
    k: int | None = None
    free: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        """R."""
        if self.k is None:
            return len(self.carry)
        return -(-self.shape[self.k] // math.prod(self.shape[d] for d in self.free))

    def basis(self, run: int, states: Values) -> Values:
        """Returns states of which the step makes columns of A."""
        if self.k is None:
            return [jnp.full_like(v, i == run) for i, v in enumerate(states)]
        number = jnp.full(self.shape, run, jnp.int32)
        for axis in self.free:
            number = number * self.shape[axis] + lax.broadcasted_iota(jnp.int32, self.shape, axis)
        (state,) = states
        here = number == lax.broadcasted_iota(jnp.int32, self.shape, self.k)
        return [like(here.astype(state.dtype), state)]

    def matrix(self, columns: Sequence[Values]) -> Any:
        """Returns A from what the step makes of the basis: rows of arrays, or an array with K twice at the end."""
        if self.k is None:
            return [list(row) for row in zip(*columns)]
        lead = [d for d in range(len(self.shape)) if d != self.k and d not in self.free]
        flat = [jnp.transpose(c, (*lead, self.k, *self.free)) for (c,) in columns]
        flat = [c.reshape(*c.shape[: len(lead) + 1], -1) for c in flat]
        return jnp.concatenate(flat, -1)[..., : self.shape[self.k]]

    def applied(self, a: Any, start: Values, b: Values) -> Values:
        """Returns `A start + b`."""
        if self.k is None:
            return [sum((x * s for x, s in zip(row, start)), rest) for row, rest in zip(a, b)]
        axes = list(range(len(self.shape)))
        new = len(axes)
        lead = [d for d in axes if d != self.k and d not in self.free]
        out = [new if d == self.k else d for d in axes]
        made = jnp.einsum(a, [*lead, new, self.k], start[0], axes, out, precision="highest")
        return [made.astype(start[0].dtype) + b[0]]

    def __str__(self) -> str:
        if self.k is None:
            return "elementwise" if len(self.carry) == 1 else f"elementwise in {len(self.carry)} carries"
        return f"a matrix of {self.shape[self.k]} x {self.shape[self.k]}"


@dataclass(frozen=True)
class Stage:
    """Carries whose starts are computed together.

    Attributes:
        carry: their positions.
        reads: the positions of the carries that they read, with their own.
        kind: kept, affine or handed.
        transitions: of affine carries.
        why: why they are handed.
    """

    carry: tuple[int, ...]
    reads: tuple[int, ...]
    kind: Kind
    transitions: tuple[Transition, ...] = ()
    why: str = ""

    def applied(self, matrices: Sequence[Any], start: Values, b: Values, carry: Sequence[int] = ()) -> Values:
        """Returns `A start + b` for the carries at these positions, by default all of the stage; b if they are kept."""
        carry = carry or self.carry
        new = dict(zip(carry, b))
        for t, a in zip(self.transitions, matrices):
            places = [carry.index(i) for i in t.carry]
            new.update(zip(t.carry, t.applied(a, [start[p] for p in places], [b[p] for p in places])))
        return [new[i] for i in carry]


def stages(loop: Loop, constants: dict[Any, Any], count: int) -> list[Stage]:
    """Returns the stages of a loop, each after those that it reads.

    Args:
        loop: the loop of one device, with calls and checkpoints opened.
        constants: values of variables that are known now.
        count: D.
    """
    pending, reads = jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out)
    done: set[int] = set()
    found: list[Stage] = []
    while pending:
        ready = [g for g in pending if all(j in done or j in g for i in g for j in reads[i])]
        kinds: dict[Kind, dict[tuple[int, ...], Any]] = {"kept": {}, "affine": {}, "handed": {}}
        for g in ready:
            kind, how = _kind(loop, g, done, constants, count)
            kinds[kind][g] = how
        kind = next(k for k in kinds if kinds[k])
        chosen = kinds[kind]
        carry = tuple(sorted(i for g in chosen for i in g))
        used = tuple(sorted({j for i in carry for j in reads[i]} | {*carry}))
        transitions = tuple(chosen.values()) if kind == "affine" else ()
        why = "; ".join(dict.fromkeys(chosen.values())) if kind == "handed" else ""
        found.append(Stage(carry, used, kind, transitions, why))
        done.update(carry)
        pending = [g for g in pending if g not in chosen]
    return found


def _kind(
    loop: Loop, group: tuple[int, ...], done: set[int], constants: dict[Any, Any], count: int
) -> tuple[Kind, Any]:
    """Returns the kind of a group of carries, and its transition or the reason why it is handed."""
    first = loop.carry[group[0]]
    if len(group) == 1 and not jaxprs.is_in(loop.carry_out[group[0]], jaxprs.depends(loop.eqns, [first])):
        return "kept", None
    try:
        made = _transition(loop, group, done, constants)
    except (chunks.NotAffine, associative.NotAffine) as why:
        return "handed", chunks.why(why) if isinstance(why, chunks.NotAffine) else str(why)
    except Exception as error:
        if strict_passes.value:
            raise
        return "handed", f"{type(error).__name__} (please report it): {error}"
    if made.runs > max(_RUNS, count):
        return "handed", f"its transition takes {made.runs} runs of the loop, and there are {count} devices"
    return "affine", made


def _transition(loop: Loop, group: tuple[int, ...], done: set[int], constants: dict[Any, Any]) -> Transition:
    shape = loop.carry[group[0]].aval.shape
    try:
        associative.check_group(loop, group)
        return Transition(group, shape)
    except associative.NotAffine:
        if len(group) > 1 or len(shape) < 2:
            raise
    (i,) = group
    moving = jaxprs.depends(loop.eqns, [v for j, v in enumerate(loop.carry) if j not in done])
    known = {*loop.inputs, *(v for e in loop.eqns for v in e.outvars)} - moving
    form = chunks.affine(loop, (i,), known, [], constants)
    same = tuple(axis for axis in form.free if axis not in form.columns)
    return Transition(group, shape, form.forms.contracted, same)
