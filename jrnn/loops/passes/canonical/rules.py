"""An equation evaluated on values in any layout: one rule a primitive.

A value of a step has a shape, and an array in another layout (`layouts.py`): `groups` has, for each axis of the array, the
axes of the value that it holds. For a value x of shape (1, 32, 4, 64):

    groups ((1,), (2,), (3,))    an array [32, 4, 64]: the axis of size 1 is in no array
    groups ((3,), (1,), (2,))    an array [64, 32, 4]: transposed
    groups ((1,), (2, 3))        an array [32, 256]: the last two axes are merged

A rule computes with the arrays as they are and renames the axes of the result. Views cost nothing:
`transpose(x, (0, 2, 1, 3))` keeps the first of these arrays, and its groups become ((2,), (1,), (3,)), because axis 1 of x
is axis 2 of the result. An equation without a rule gets its operands as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, axes, primitives
from jrnn.jaxprs.primitives.shapes import Follow
from jrnn.loops.passes.canonical.layouts import (
    Group,
    Groups,
    StepValue,
    apart_groups,
    is_unit,
    natural,
    sizes,
)

Values = Sequence[StepValue]
Results = list[StepValue]
Pair = tuple[Group, Group]
Preferred = Callable[[Var], Groups]  # the layout of a value that the canonical form has


def evaluated(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    """Returns the results of an equation for operands in any layout."""
    rule = primitives.rule_of(eqn, _RULES)
    shardings = (eqn.params.get("out_sharding"), eqn.params.get("sharding"))
    if rule is not None and shardings == (None, None):
        results = rule(eqn, operands, preferred)
        if results is not None:
            layouts = map(preferred, eqn.outvars)
            return list(map(_with_one_row, results, layouts))

    results = []
    arrays = jaxprs.bind(eqn, *(operand.to_array() for operand in operands))
    for array, v in zip(arrays, eqn.outvars):
        results.append(StepValue.of(array, v.aval.shape).in_layout(preferred(v)))
    return results


def _with_one_row(x: StepValue, groups: Groups) -> StepValue:
    """Returns the value with the axis of size 1 that its layout has."""
    unit = [g for g in groups if x.is_unit_group(g)]
    return x.in_layout((*unit, *x.squeezed().groups))


def _elementwise(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    out = eqn.outvars[0]
    layouts = {o.groups for o in operands if _has_all_axes(o, out.aval.shape)}
    groups = layouts.pop() if len(layouts) == 1 else preferred(out)
    arrays = [o.aligned(groups) if o.shape else o.array for o in operands]
    return [StepValue(array, out.aval.shape, groups) for array in jaxprs.bind(eqn, *arrays)]


def _has_all_axes(x: StepValue, shape: Sequence[int]) -> bool:
    """Whether a value has all axes of a shape that are not of size 1."""
    return {*x.axes} == _all_axes(natural(shape))


def _all_axes(groups: Groups) -> set[int]:
    return {*itertools.chain(*groups)}


def _follow(eqn: Eqn, place: int = 0) -> Follow:
    """Returns which axis of the result each axis of an operand is."""
    rule = primitives.named(eqn.primitive.name).axes
    assert rule is not None
    return rule(eqn, place, eqn.outvars[0])


def _relabeled(groups: Iterable[Group], names: Follow) -> Groups:
    return tuple(tuple(names[a] for a in group) for group in groups)


def _each(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    """The rule of primitives that return each operand."""
    arrays = jaxprs.bind(eqn, *(o.array for o in operands))
    return [StepValue(array, o.shape, o.groups) for array, o in zip(arrays, operands)]


def _transpose(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    (x,) = operands
    return [_renamed(x, eqn.outvars[0].aval.shape, _follow(eqn))]


def _reshape(eqn: Eqn, operands: Values, preferred: Preferred) -> Results | None:
    """The rule of reshapes: axes that stay are renamed, and the array is reshaped for the others.

    A reshape of (32, 256, 8) to (32, 4, 64, 8) is made of blocks of axes: 0 stays 0, 1 becomes (1, 2), and 2 becomes 3.
    An array with the groups ((2,), (0,), (1,)) is reshaped to ((3,), (0,), (1,), (2,)): no element moves.
    """
    if len(operands) != 1:
        return None
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        return None
    (x,) = operands
    shape = eqn.outvars[0].aval.shape
    if not all(map(jaxprs.is_known, (*x.shape, *shape))) or 0 in shape:
        return None

    renamed: dict[int, int] = {}  # axes that stay as they are
    changed: dict[int, tuple[list[int], list[int]]] = {}  # blocks by their first axis
    for block, new_block in axes.blocks(x.shape, shape):
        old = [a for a in block if x.shape[a] != 1]
        new = [a for a in new_block if shape[a] != 1]
        if len(old) == len(new) == 1:
            renamed[old[0]] = new[0]
        elif old:  # a block without axes becomes none
            changed[old[0]] = (old, new)

    # The axes of each block follow the first one.
    changed_axes = {a for old, _ in changed.values() for a in old}
    x = x.squeezed().unmerge(changed_axes)
    order: list[Group] = []
    groups: list[Group] = []
    for group in x.groups:
        if group[0] in changed:
            old, new = changed[group[0]]
            order += apart_groups(old)
            groups += apart_groups(new)
        elif group[0] not in changed_axes:
            order.append(group)
            groups.append(tuple(renamed[a] for a in group))
    array = x.in_layout(tuple(order)).array
    size = sizes(shape, tuple(groups))
    if size != np.shape(array):
        array = jax.lax.reshape(array, size)
    return [StepValue(array, shape, tuple(groups))]


def _broadcast(eqn: Eqn, operands: Values, preferred: Preferred) -> Results | None:
    shape = eqn.outvars[0].aval.shape
    if len(operands) != 1:  # symbolic dimensions
        return None
    x = operands[0].squeezed()
    moved = _renamed(x, shape, _follow(eqn))
    if _has_all_axes(moved, shape):
        return [moved]

    # Groups that the value has stay merged; the result has the axes of other groups apart until it is complete.
    groups = preferred(eqn.outvars[0])
    present: list[Group] = []
    apart: list[Group] = []
    for group in groups:
        if group in moved.groups:
            present.append(group)
            apart.append(group)
        else:
            present += apart_groups(a for a in group if a in moved.axes)
            apart += apart_groups(group)
    moved = moved.in_layout(tuple(present))
    layout = tuple(apart)
    places = [layout.index(group) for group in moved.groups]
    if not places:  # a scalar
        layout = groups
    array = jax.lax.broadcast_in_dim(moved.array, sizes(shape, layout), places)
    return [StepValue(array, shape, layout).in_layout(groups)]


def _reduce(eqn: Eqn, operands: Values, preferred: Preferred) -> Results | None:
    if eqn.primitive.name in ("argmax", "argmin"):  # a place along an axis, which must be there
        return None
    over = {*eqn.params["axes"]}
    x = operands[0].squeezed()
    partly: set[int] = set()  # reduced axes in groups that remain in part
    for group in x.groups:
        if not over.issuperset(group):
            partly |= over.intersection(group)
    x = x.unmerge(partly)
    places = tuple(i for i, group in enumerate(x.groups) if over.issuperset(group))
    array = jaxprs.bind(eqn, x.array, axes=places)[0] if places else x.array
    rest = [group for group in x.groups if not over.issuperset(group)]
    return [StepValue(array, eqn.outvars[0].aval.shape, _relabeled(rest, _follow(eqn)))]


def _product(eqn: Eqn, operands: Values, preferred: Preferred) -> Results | None:
    """The rule of products: they contract the groups of the operands, merged or not.

    A result has the batch axes, then the other axes of the left and of the right operand, in the order of the arrays.
    If the rows of the canonical form are in the right operand, the operands are exchanged, so that rows come first: with a
    constant matrix W [H, D] and a vector a row x [D, N], `W x` is computed as `x^T W^T` from an array x [N, D].
    """
    contracted, batch = eqn.params["dimension_numbers"]
    out = eqn.outvars[0]
    left = operands[0]
    kinds = []
    for axis_pairs in (contracted, batch):
        kinds.append([pair for pair in zip(*axis_pairs) if not is_unit(left.shape[pair[0]])])
    if contracted[0] and not kinds[0]:
        return None  # a product of axes of size 1
    operands = [
        _without_units(o, (*contracted[side], *batch[side])) for side, o in enumerate(operands)
    ]
    pairs = _groups_of(operands, kinds)
    if pairs is None:  # only a part of merged axes is summed
        operands = [o.unmerge() for o in operands]
        pairs = _groups_of(operands, kinds)
    assert pairs is not None

    # The groups of each operand that are left, as axes of the result.
    labels = (_follow(eqn, 0), _follow(eqn, 1))
    free: list[list[Group]] = []
    for side, o in enumerate(operands):
        joined = [pair[side] for pair in (*pairs[0], *pairs[1])]
        rest = [group for group in o.groups if group not in joined]
        free.append(list(_relabeled(rest, labels[side])))

    # The product, with the operand that has the rows on the left.
    rows = preferred(out)[:1]
    swap = bool(rows) and rows[0] in free[1] and not pairs[1]
    sides = (1, 0) if swap else (0, 1)
    numbers = []
    for joined_pairs in pairs:
        numbers.append([_places(operands[side], joined_pairs, side) for side in sides])
    precision = eqn.params["precision"]
    if swap and isinstance(precision, tuple):
        precision = precision[::-1]
    arrays = [operands[side].array for side in sides]
    dimension_numbers = tuple(map(tuple, numbers))
    (array,) = jaxprs.bind(eqn, *arrays, dimension_numbers=dimension_numbers, precision=precision)
    batch_groups = _relabeled((pair[0] for pair in pairs[1]), labels[0])
    groups = (*batch_groups, *free[sides[0]], *free[sides[1]])
    return [StepValue(array, out.aval.shape, groups)]


def _places(x: StepValue, pairs: Sequence[Pair], side: int) -> tuple[int, ...]:
    """The axes of an operand's array that pairs of groups join."""
    return tuple(x.groups.index(pair[side]) for pair in pairs)


def _without_units(x: StepValue, axes: Iterable[int]) -> StepValue:
    """Returns the value without axes of size 1 if one of some axes is such an axis of its array."""
    if any((a,) in x.groups and is_unit(x.shape[a]) for a in axes):
        return x.squeezed()
    return x


def _groups_of(
    operands: Values, kinds: Sequence[Sequence[tuple[int, int]]]
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
    eqn: Eqn, operands: Values, preferred: Preferred, axis: int | None = None
) -> Results:
    out = eqn.outvars[0]
    axis = eqn.params["dimension"] if axis is None else axis
    operands = [o for o in operands if o.shape[axis] != 0] or operands[:1]
    if len(operands) == 1:
        return operands
    layout = preferred(out)
    having_axis = [o for o in operands if o.array_axis(axis) is not None]
    every = _all_axes(natural(out.aval.shape))
    if having_axis and _all_axes(having_axis[0].groups) == every:
        layout = having_axis[0].groups
    apart: list[Group] = []
    for group in layout:
        apart += apart_groups(group) if axis in group else [group]
    groups = tuple(apart)
    arrays = [o.unmerge([axis]).aligned(groups) for o in operands]
    array = jax.lax.concatenate(arrays, groups.index((axis,)))
    return [StepValue(array, out.aval.shape, groups)]


def _stack(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    axis = eqn.params["axis"]
    shape = operands[0].shape
    with_axis = (*shape[:axis], 1, *shape[axis:])
    moved = [_renamed(o, with_axis, _follow(eqn, i)) for i, o in enumerate(operands)]
    return _concatenate(eqn, moved, preferred, axis) if len(moved) > 1 else moved


def _renamed(x: StepValue, shape: Sequence[int], names: Follow) -> StepValue:
    return StepValue(x.array, tuple(shape), _relabeled(x.groups, names))


def _cut(x: StepValue, cuts: dict[int, tuple[int, int, int]], shape: Sequence[int]) -> StepValue:
    """Returns the value `x[start:end:step]` along each of some axes. Axes of the result that have size 1 are in no array."""
    x = x.unmerge([a for a in cuts if a in x.axes])
    for a in cuts:
        # Nothing is left of an axis of size 1.
        if x.array_axis(a) is None and not is_unit(shape[a]):
            x = StepValue(jax.lax.expand_dims(x.array, [0]), x.shape, ((a,), *x.groups))
    starts = [0] * len(x.groups)
    ends = list(np.shape(x.array))
    steps = [1] * len(x.groups)
    for a, (start, end, step) in cuts.items():
        place = x.array_axis(a)
        if place is not None:
            starts[place], ends[place], steps[place] = start, end, step
    array = jax.lax.slice(x.array, starts, ends, None if set(steps) <= {1} else steps)
    units = [(a,) for a in cuts if is_unit(shape[a]) and (a,) in x.groups]
    if units:
        array = jax.lax.squeeze(array, [x.groups.index(unit) for unit in units])
    return StepValue(array, tuple(shape), tuple(g for g in x.groups if g not in units))


def _slice(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    (x,) = operands
    params = eqn.params
    shape = eqn.outvars[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    cuts = {}
    for axis, cut in enumerate(zip(params["start_indices"], params["limit_indices"], strides)):
        if cut != (0, x.shape[axis], 1):
            cuts[axis] = cut
    return [_cut(x, cuts, shape)]


def _split(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    (x,) = operands
    axis = eqn.params["axis"]
    results = []
    start = 0
    for size, v in zip(eqn.params["sizes"], eqn.outvars):
        results.append(_cut(x, {axis: (start, start + size, 1)}, v.aval.shape))
        start += size
    return results


def _unstack(eqn: Eqn, operands: Values, preferred: Preferred) -> Results:
    (x,) = operands
    axis = eqn.params["axis"]
    names = _follow(eqn)
    part_shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    results = []
    for i, v in enumerate(eqn.outvars):
        part = _cut(x, {axis: (i, i + 1, 1)}, part_shape)
        results.append(_renamed(part.squeezed(), v.aval.shape, names))
    return results


_RULES: dict[str, Callable[..., Results | None]] = {  # by primitive or kind
    **dict.fromkeys(("elementwise", "special"), _elementwise),
    **dict.fromkeys(("barrier", "pvary"), _each),
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    "reduction": _reduce,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _product,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}
