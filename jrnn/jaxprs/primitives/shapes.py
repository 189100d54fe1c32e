"""How axes follow from the operands of a primitive to its results, and how its parameters follow from the sizes of arrays.

An axis of an operand follows to an axis of the result if element i of the result along it depends on element i of the
operand alone. A rule returns these pairs for one operand and one result: for `transpose(x, (1, 0))`, {0: 1, 1: 0}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jrnn.jaxprs.jax_internals import JaxprEqn, Literal, Var
from jrnn.jaxprs.queries import other_axes, positions

Follow = dict[int, int]  # an axis of an operand -> the axis of a result
AxisRule = Callable[
    [JaxprEqn, int, Var], Follow
]  # of an equation, the position of an operand, and a result
ShapeOf = Callable[[Var | Literal], tuple[int, ...]]
ResizeRule = Callable[[JaxprEqn, ShapeOf], dict[str, Any]]


def same(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    """The rule of functions of elements. An axis of size 1 may stand for a longer one."""
    shape = eqn.invars[place].aval.shape
    if len(shape) != len(out.aval.shape):
        return {}
    return {k: k for k, size in enumerate(out.aval.shape) if shape[k] == size}


def broadcast(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    if place:  # a symbolic dimension
        return {}
    shape = eqn.invars[0].aval.shape
    to = eqn.params["broadcast_dimensions"]
    return {k: axis for k, axis in enumerate(to) if shape[k] == out.aval.shape[axis]}


def reshape(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    """The rule of reshapes: an axis stays if the axes before it have as many elements as before."""
    if place or eqn.params.get("dimensions") is not None:
        return {}
    axis_of = {key: k for k, key in _starts(out.aval.shape)}
    return {k: axis_of[key] for k, key in _starts(eqn.invars[0].aval.shape) if key in axis_of}


def _starts(shape: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Returns each axis that is not of size 1, with the number of elements before it, and its size."""
    starts = []
    for k, size in enumerate(shape):
        if size != 1:
            starts.append((k, (math.prod(shape[:k]), size)))
    return starts


def without(parameter: str) -> AxisRule:
    """The rule of primitives that remove the axes in a parameter."""

    def rule(eqn: JaxprEqn, place: int, out: Var) -> Follow:
        return positions(other_axes(eqn.invars[place].aval.ndim, _axes_in(eqn, parameter)))

    return rule


def along_others(parameter: str) -> AxisRule:
    """The rule of primitives that mix elements along the axes in a parameter, and keep all axes."""

    def rule(eqn: JaxprEqn, place: int, out: Var) -> Follow:
        axes = other_axes(eqn.invars[place].aval.ndim, _axes_in(eqn, parameter))
        return dict(zip(axes, axes))

    return rule


def _axes_in(eqn: JaxprEqn, parameter: str) -> Sequence[int]:
    value = eqn.params[parameter]
    return value if isinstance(value, Sequence) else (value,)


def transpose(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    return positions(eqn.params["permutation"])


def stack(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    return {k: k + (k >= eqn.params["axis"]) for k in range(eqn.invars[place].aval.ndim)}


def tile(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    repeats = eqn.params["reps"]
    if len(repeats) != out.aval.ndim:
        return {}
    return {k: k for k, count in enumerate(repeats) if count == 1}


def pad(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    if place:
        return {}
    config = eqn.params["padding_config"]
    return {k: k for k, padding in enumerate(config) if padding == (0, 0, 0)}


def nothing(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    """The rule of a known primitive whose result has no axes of its operands."""
    return {}


def product(eqn: JaxprEqn, place: int, out: Var) -> Follow:
    """The result has the batch axes, the free axes of the left operand, and the free axes of the right one."""
    contracted, batch = eqn.params["dimension_numbers"]
    free = []
    for side, operand in enumerate(eqn.invars):
        free.append(other_axes(operand.aval.ndim, (*contracted[side], *batch[side])))
    follow = positions(batch[place])
    start = len(batch[0]) + (len(free[0]) if place else 0)
    for axis, k in enumerate(free[place], start):
        follow[k] = axis
    return follow


# Sizes ---------------------------------------------------------------------------------------------------------------


def result_shape(parameter: str) -> ResizeRule:
    """The rule of primitives with the shape of their result in a parameter."""

    def rule(eqn: JaxprEqn, shape_of: ShapeOf) -> dict[str, Any]:
        return {parameter: shape_of(eqn.outvars[0])}

    return rule


def ends_of_slice(eqn: JaxprEqn, shape_of: ShapeOf) -> dict[str, Any]:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    slices = zip(starts, shape_of(eqn.outvars[0]), strides)
    return {"limit_indices": tuple(start + (n - 1) * by + 1 for start, n, by in slices)}
