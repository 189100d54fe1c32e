"""How the starts of segments are computed: the stages of a loop, and how A of affine carries is laid out.

Shapes: D devices, K the axis of S that the step contracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import Group, Kind, NotAffine, Pending, Stage, check_diagonal, is_kept
from jrnn.loops.affine.matrix import matrix_form
from jrnn.loops.loop import Loop, strict_passes
from jrnn.loops.segments.place import Values

_RUNS = 4  # runs of a basis that are worth it for any number of devices


def applied(stage: Stage, matrices: Sequence[Any], start: Values, b: Values, carry: Sequence[int] = ()) -> Values:
    """Returns `A start + b` for the carries at these positions, by default all of a stage; b if they are kept."""
    carry = carry or stage.carry
    new = dict(zip(carry, b))
    for blocks, a in zip(stage.forms, matrices):
        before = [start[carry.index(i)] for i in blocks.carries]
        new.update((i, v.astype(new[i].dtype) + new[i]) for i, v in zip(blocks.carries, blocks.applied(a, before)))
    return [new[i] for i in carry]


def stages(loop: Loop, constants: dict[Any, Any], count: int) -> list[Stage]:
    """Returns the stages of a loop, each after those that it reads.

    Args:
        loop: the loop of one device, with calls and checkpoints opened.
        constants: values of variables that are known now.
        count: D.
    """
    pending = Pending(loop)
    while pending.groups:
        kinds: dict[Kind, dict[Group, Any]] = {"kept": {}, "affine": {}, "opaque": {}}
        for g in pending.ready:
            kind, how = _kind(loop, g, pending, constants, count)
            kinds[kind][g] = how
        kind, chosen = next((kind, chosen) for kind, chosen in kinds.items() if chosen)
        forms = chosen.values() if kind == "affine" else ()
        why = "; ".join(dict.fromkeys(chosen.values())) if kind == "opaque" else ""
        pending.take(kind, sorted(i for g in chosen for i in g), tuple(forms), why)
    return pending.stages


def _kind(loop: Loop, group: Group, pending: Pending, constants: dict[Any, Any], count: int) -> tuple[Kind, Any]:
    """Returns the kind of a group of carries, and its transition or the reason why it is opaque."""
    if is_kept(loop, group):
        return "kept", None
    try:
        transition = _transition(loop, group, pending, constants)
    except NotAffine as why:
        return "opaque", why.explained()
    except Exception as error:
        if strict_passes.value:
            raise
        return "opaque", f"{type(error).__name__} (please report it): {error}"
    if transition.runs > max(_RUNS, count):
        return "opaque", f"its transition takes {transition.runs} runs of the loop, and there are {count} devices"
    return "affine", transition


def _transition(loop: Loop, group: Group, pending: Pending, constants: dict[Any, Any]) -> Blocks:
    """Returns how A of a group is laid out: one number for each element, or a matrix along the axis that is contracted."""
    shape = loop.carry[group[0]].aval.shape
    axes = tuple(range(len(shape)))
    try:
        check_diagonal(loop, group)
        return Blocks(group, (shape,) * len(group), axes)
    except NotAffine:
        if len(group) > 1 or len(shape) < 2:
            raise
    form = matrix_form(loop, group, pending.known, [], constants)
    same = tuple(axis for axis in form.free if axis not in form.columns)
    return Blocks(group, (shape,), tuple(d for d in axes if d != form.forms.contracted and d not in same), same)
