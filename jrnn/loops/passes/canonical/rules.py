"""An equation evaluated on values in any layout: one rule a primitive.

Views cost nothing: a transposition only renames the axes of an array. An equation without a rule gets its operands as
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, axes, primitives
from jrnn.loops.passes.canonical.layouts import Groups, StepValue, is_unit, natural, sizes

Preferred = Callable[[Var], Groups]  # the layout of a value that the canonical form has


def evaluated(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    """Returns the results of an equation for operands in any layout."""
    rule = primitives.rule_of(eqn, _RULES)
    if (
        rule is not None
        and eqn.params.get("out_sharding") is None
        and eqn.params.get("sharding") is None
    ):
        results = rule(eqn, operands, preferred)
        if results is not None:
            return [_with_one_row(result, preferred(v)) for result, v in zip(results, eqn.outvars)]
    whole = jaxprs.bind(eqn, *(operand.to_array() for operand in operands))
    return [
        StepValue.of(array, v.aval.shape).in_layout(preferred(v))
        for array, v in zip(whole, eqn.outvars)
    ]


def _with_one_row(x: StepValue, groups: Groups) -> StepValue:
    """Returns the value with the axis of size 1 that its layout has."""
    unit = [g for g in groups if all(is_unit(x.shape[a]) for a in g)]
    return x.in_layout((*unit, *x.squeezed().groups))


def _elementwise(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    out = eqn.outvars[0]
    full = [o for o in operands if {*o.axes} == {a for (a,) in natural(out.aval.shape)}]
    layouts = {o.groups for o in full}
    groups = layouts.pop() if len(layouts) == 1 else preferred(out)
    arrays = [o.aligned(groups) if o.shape else o.array for o in operands]
    return [StepValue(array, out.aval.shape, groups) for array in jaxprs.bind(eqn, *arrays)]


def _each(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    """The rule of primitives that return each operand."""
    arrays = jaxprs.bind(eqn, *(o.array for o in operands))
    return [StepValue(array, o.shape, o.groups) for array, o in zip(arrays, operands)]


def _transpose(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    (x,), order = operands, list(eqn.params["permutation"])
    groups = tuple(tuple(order.index(a) for a in group) for group in x.groups)
    return [StepValue(x.array, eqn.outvars[0].aval.shape, groups)]


def _reshape(
    eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred
) -> list[StepValue] | None:
    if len(operands) != 1 or (
        eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape"
    ):
        return None
    (x,), shape = operands, eqn.outvars[0].aval.shape
    if not all(map(jaxprs.is_known, (*x.shape, *shape))) or 0 in shape:
        return None
    to: dict[int, int] = {}  # axes that stay as they are
    others: list[tuple[list[int], list[int]]] = []  # axes that become others
    for old, new in axes.blocks(x.shape, shape):
        old, new = ([a for a in part if n[a] != 1] for part, n in ((old, x.shape), (new, shape)))
        if len(old) == len(new) == 1:
            to[old[0]] = new[0]
        elif old or new:
            others.append((old, new))
    x = x.squeezed().unmerge([a for old, _ in others for a in old])
    first = {old[0]: new for old, new in others}
    merged_axes = {a for old, _ in others for a in old[1:]}
    order = [
        g for group in x.groups if group[0] not in merged_axes for g in _with_block(group, others)
    ]
    x = x.in_layout(tuple(order))
    groups = [
        g
        for group in x.groups
        if group[0] not in merged_axes
        for g in (
            [(a,) for a in first[group[0]]] if group[0] in first else [tuple(to[a] for a in group)]
        )
    ]
    size = sizes(shape, tuple(groups))
    array = x.array if size == np.shape(x.array) else jax.lax.reshape(x.array, size)
    return [StepValue(array, shape, tuple(groups))]


def _with_block(
    group: tuple[int, ...], others: Iterable[tuple[list[int], list[int]]]
) -> list[tuple[int, ...]]:
    block = next((old for old, _ in others if old[0] == group[0]), None)
    return [group] if block is None else [(a,) for a in block]


def _broadcast(
    eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred
) -> list[StepValue] | None:
    shape = eqn.outvars[0].aval.shape
    to = eqn.params["broadcast_dimensions"]
    if len(operands) != 1:  # symbolic dimensions
        return None
    x = operands[0].squeezed()
    moved = StepValue(x.array, shape, tuple(tuple(to[a] for a in group) for group in x.groups))
    if {*moved.axes} == {a for (a,) in natural(shape)}:
        return [moved]
    groups = preferred(eqn.outvars[0])
    moved = moved.in_layout(tuple(g for group in groups for g in _present(group, moved)))
    apart = tuple(
        g for group in groups for g in ([group] if group in moved.groups else [(a,) for a in group])
    )
    places = [apart.index(group) for group in moved.groups]
    if apart != groups and not places:  # nothing of it is there
        apart = groups
    array = jax.lax.broadcast_in_dim(moved.array, sizes(shape, apart), places)
    return [StepValue(array, shape, apart).in_layout(groups)]


def _present(group: tuple[int, ...], x: StepValue) -> list[tuple[int, ...]]:
    """Returns the parts of a group that a value has."""
    return [group] if group in x.groups else [(a,) for a in group if a in x.axes]


def _reduce(
    eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred
) -> list[StepValue] | None:
    if eqn.primitive.name in ("argmax", "argmin"):  # a place along an axis, which must be there
        return None
    over, (x,) = {*eqn.params["axes"]}, operands
    x = x.squeezed().unmerge(
        [a for group in x.groups if not over.issuperset(group) for a in over.intersection(group)]
    )
    remaining = [a for a in range(len(x.shape)) if a not in over]
    places = tuple(i for i, group in enumerate(x.groups) if over.issuperset(group))
    array = jaxprs.bind(eqn, x.array, axes=places)[0] if places else x.array
    groups = tuple(
        tuple(remaining.index(a) for a in g) for i, g in enumerate(x.groups) if i not in places
    )
    return [StepValue(array, eqn.outvars[0].aval.shape, groups)]


def _product(
    eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred
) -> list[StepValue] | None:
    (contracted, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0]
    sums, batches = (
        [p for p in zip(*pairs) if not is_unit(operands[0].shape[p[0]])]
        for pairs in (contracted, batch)
    )
    if contracted[0] and not sums:
        return None  # a product of axes of size 1
    operands = [
        _without_units(o, (*summed, *shared))
        for o, summed, shared in zip(operands, contracted, batch)
    ]
    pairs = _groups_of(operands, [sums, batches])
    if pairs is None:  # merged axes of which a part is summed
        operands = [o.unmerge() for o in operands]
        pairs = _groups_of(operands, [sums, batches])
    assert pairs is not None
    # What the axes of the operands are in the result.
    labels = [dict[int, int](), dict[int, int]()]
    at = 0
    for i, j in zip(*batch):
        labels[0][i] = labels[1][j] = at
        at += 1
    for side, (o, summed, shared) in enumerate(zip(operands, contracted, batch)):
        for a in range(len(o.shape)):
            if a not in (*summed, *shared):
                labels[side][a], at = at, at + 1
    rows = preferred(out)[:1]
    free = [
        [
            tuple(labels[side][a] for a in g)
            for g in o.groups
            if g not in [p[side] for of in pairs for p in of]
        ]
        for side, o in enumerate(operands)
    ]
    swap = any(r in free[1] for r in rows) and not pairs[1]
    sides = (1, 0) if swap else (0, 1)
    numbers = tuple(
        tuple(tuple(operands[s].groups.index(p[s]) for p in of) for s in sides) for of in pairs
    )
    precision = eqn.params["precision"]
    precision = precision[::-1] if swap and isinstance(precision, tuple) else precision
    arrays = [operands[s].array for s in sides]
    (array,) = jaxprs.bind(eqn, *arrays, dimension_numbers=numbers, precision=precision)
    groups = [tuple(labels[0][a] for a in p[0]) for p in pairs[1]]
    return [StepValue(array, out.aval.shape, (*groups, *(g for s in sides for g in free[s])))]


def _without_units(x: StepValue, axes: Iterable[int]) -> StepValue:
    return x.squeezed() if any((a,) in x.groups and is_unit(x.shape[a]) for a in axes) else x


Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _groups_of(
    operands: Sequence[StepValue], kinds: Sequence[Sequence[tuple[int, int]]]
) -> list[list[Pair]] | None:
    """Returns the groups of two operands that pairs of axes join, of each kind; None if a group is joined in part."""
    result = []
    for pairs in kinds:
        other = dict(pairs)
        joined = []
        for group in operands[0].groups:
            met = [a for a in group if a in other]
            if met and len(met) < len(group):
                return None
            if met:
                joined.append((group, tuple(other[a] for a in group)))
        if any(pair[1] not in operands[1].groups for pair in joined):
            return None
        result.append(joined)
    return result


def _concatenate(
    eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred, axis: int | None = None
) -> list[StepValue]:
    out = eqn.outvars[0]
    axis = eqn.params["dimension"] if axis is None else axis
    layouts = [o.groups for o in operands if o.array_axis(axis) is not None]
    whole = {a for (a,) in natural(out.aval.shape)}
    groups = (
        layouts[0] if layouts and {a for g in layouts[0] for a in g} == whole else preferred(out)
    )
    groups = tuple(
        g for group in groups for g in ([(a,) for a in group] if axis in group else [group])
    )
    arrays = [o.unmerge([axis]).aligned(groups) for o in operands]
    return [StepValue(jax.lax.concatenate(arrays, groups.index((axis,))), out.aval.shape, groups)]


def _stack(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    axis = eqn.params["axis"]
    shape = operands[0].shape
    moved = [
        _renamed(o, (*shape[:axis], 1, *shape[axis:]), lambda a: a + (a >= axis)) for o in operands
    ]
    return _concatenate(eqn, moved, preferred, axis) if len(moved) > 1 else moved


def _renamed(x: StepValue, shape: Sequence[Any], name: Callable[[int], int]) -> StepValue:
    return StepValue(x.array, tuple(shape), tuple(tuple(map(name, group)) for group in x.groups))


def _cut(x: StepValue, cuts: dict[int, tuple[int, int, int]], shape: Sequence[Any]) -> StepValue:
    """Returns the value `x[start:end:step]` along each of some axes. Axes of the result that have size 1 are in no array."""
    x = x.unmerge([a for a in cuts if a in x.axes])
    starts = [0] * len(x.groups)
    ends = list(np.shape(x.array))
    steps = [1] * len(x.groups)
    for a, (start, end, step) in cuts.items():
        place = x.array_axis(a)
        if place is not None:
            starts[place], ends[place], steps[place] = start, end, step
    array = jax.lax.slice(x.array, starts, ends, None if set(steps) <= {1} else steps)
    removed = [place for a in cuts if is_unit(shape[a]) and (place := x.array_axis(a)) is not None]
    array = jax.lax.squeeze(array, removed) if removed else array
    return StepValue(
        array, tuple(shape), tuple(g for i, g in enumerate(x.groups) if i not in removed)
    )


def _slice(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    (x,), p = operands, eqn.params
    shape = eqn.outvars[0].aval.shape
    strides = p["strides"] or (1,) * len(shape)
    slices = enumerate(zip(p["start_indices"], p["limit_indices"], strides))
    cuts = {a: cut for a, cut in slices if cut != (0, x.shape[a], 1)}
    return [_cut(x, cuts, shape)]


def _split(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue] | None:
    (x,), axis, counts = operands, eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    if is_unit(x.shape[axis]):
        return None
    x = x.unmerge([axis])
    parts = jaxprs.bind(eqn, x.array, axis=x.array_axis(axis))
    groups = tuple(g for g in x.groups if g != (axis,))
    results = []
    for part, n, v in zip(parts, counts, eqn.outvars):
        array = jax.lax.squeeze(part, [x.array_axis(axis)]) if n == 1 else part
        results.append(StepValue(array, v.aval.shape, groups if n == 1 else x.groups))
    return results


def _unstack(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    (x,), axis = operands, eqn.params["axis"]
    if is_unit(x.shape[axis]):
        return [_renamed(x.squeezed(), eqn.outvars[0].aval.shape, lambda a: a - (a > axis))]
    x = x.unmerge([axis])
    parts = [
        _cut(x, {axis: (i, i + 1, 1)}, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
        for i in range(x.shape[axis])
    ]
    return [
        _renamed(part.squeezed(), v.aval.shape, lambda a: a - (a > axis))
        for part, v in zip(parts, eqn.outvars)
    ]


def _pad(eqn: Eqn, operands: Sequence[StepValue], preferred: Preferred) -> list[StepValue]:
    (x, fill), config, shape = operands, eqn.params["padding_config"], eqn.outvars[0].aval.shape
    padded = [a for a, of_axis in enumerate(config) if tuple(of_axis) != (0, 0, 0)]
    groups = [*x.unmerge([a for a in padded if a in x.axes]).groups]
    groups += [(a,) for a in padded if (a,) not in groups]
    array = x.unmerge(padded).aligned(tuple(groups))
    padding = [tuple(map(int, config[g[0]])) if g[0] in padded else (0, 0, 0) for g in groups]
    array = jax.lax.pad(array, fill.array, padding)
    units = [i for i, g in enumerate(groups) if all(is_unit(shape[a]) for a in g)]
    array = jax.lax.squeeze(array, units) if units else array
    return [StepValue(array, shape, tuple(g for i, g in enumerate(groups) if i not in units))]


_RULES: dict[str, Callable[..., list[StepValue] | None]] = {  # by primitive or kind
    **dict.fromkeys(("elementwise", "special"), _elementwise),
    **dict.fromkeys(("barrier", "pvary"), _each),
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    "reduction": _reduce,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _product,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}
