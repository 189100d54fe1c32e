"""How axes follow from the operands of an equation to its results: one rule a primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jrnn.jaxprs import primitives
from jrnn.jaxprs.programs import Atom, Eqn, Var, is_literal

Follow = dict[int, int]  # an axis of an operand -> the axis of a result
Axis = tuple[Any, int]  # a variable, and the position of an axis


class Classes:
    """Classes of axes that belong together, by union and find. Those in `fixed` have a property that their class gets.

    Each search makes the path behind it half as long, so that n joins take about n log n steps in a chain, too.
    """

    def __init__(self) -> None:
        self._above: dict[Axis, Axis] = {}
        self.fixed: set[Axis] = set()

    def root(self, axis: Axis) -> Axis:
        above = self._above.get(axis)
        while above is not None:
            further = self._above.get(above)
            if further is None:
                return above
            self._above[axis] = further
            axis = further
            above = self._above.get(axis)
        return axis

    def join(self, a: Atom, i: int, b: Atom, j: int) -> None:
        if is_literal(a) or is_literal(b):
            self.fix(a, [i])
            self.fix(b, [j])
        elif (mine := self.root((a, i))) != (theirs := self.root((b, j))):
            self._above[mine] = theirs
            if mine in self.fixed:
                self.fixed.add(theirs)

    def fix(self, atom: Atom, which: Iterable[int]) -> None:
        if not is_literal(atom):
            self.fixed.update(self.root((atom, d)) for d in which)


def is_followed(eqn: Eqn) -> bool:
    """Returns True if axes are followed through the primitive of an equation."""
    return primitives.rule_of(eqn, _RULES) is not None


def aligned(eqn: Eqn, place: int, out: Var) -> Follow:
    """Returns the axes of an operand that are aligned with axes of a result.

    Element i of the result along such an axis depends on element i of the operand alone.

    Args:
        eqn: the equation.
        place: the position of the operand.
        out: the result.

    >>> import jax, jax.numpy as jnp
    >>> (eqn,) = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    >>> [aligned(eqn, place, eqn.outvars[0]) for place in (0, 1)]
    [{0: 0}, {1: 1}]
    """
    rule = primitives.rule_of(eqn, _RULES)
    return {} if rule is None else rule(eqn, place, out)


def contracted_axes(eqn: Eqn, place: int) -> set[int]:
    """Returns the axes of an operand that a reduction or a product removes, whatever size they have."""
    if primitives.is_kind(eqn, "reduction"):
        return {*eqn.params["axes"]}
    return (
        {*eqn.params["dimension_numbers"][0][place]}
        if eqn.primitive.name == "dot_general"
        else set()
    )


def of_one_size(eqn: Eqn, place: int, out: Var) -> Follow:
    """Returns `aligned` with axes along which elements are mixed, but whose size is that of an axis of the result."""
    if eqn.primitive.name == "rev" or primitives.is_kind(eqn, "running"):
        return {k: k for k in range(out.aval.ndim)}
    return aligned(eqn, place, out)


def join_followed(
    eqn: Eqn,
    classes: Classes,
    follow: Callable[[Eqn, int, Var], Follow],
    fills: Sequence[str],
    any_size: Callable[[Any], bool] = lambda size: False,
) -> bool:
    """Joins the axes of operands with those of results that follow from them, and fixes all others.

    Args:
        eqn: the equation.
        classes: of axes.
        follow: `aligned`, or `of_one_size`.
        fills: names of primitives whose results may have axes that follow from none.
        any_size: from the size of an axis of an operand, whether it stays free although nothing follows from it.

    Returns:
        False if axes are not followed through the equation, so that all are fixed.
    """
    if not is_followed(eqn) or eqn.params.get("out_sharding") is not None:
        for atom in (*eqn.invars, *eqn.outvars):
            classes.fix(atom, range(getattr(atom.aval, "ndim", 0)))
        return False
    reached: dict[Any, set[int]] = {v: set() for v in eqn.outvars}
    for place, atom in enumerate(eqn.invars):
        unmatched = {*range(atom.aval.ndim)} - contracted_axes(eqn, place)
        for v in eqn.outvars:
            followed = follow(eqn, place, v)
            for axis, to in followed.items():
                classes.join(atom, axis, v, to)
            unmatched -= followed.keys()
            reached[v].update(followed.values())
        if unmatched:
            classes.fix(atom, [axis for axis in unmatched if not any_size(atom.aval.shape[axis])])
    for v in eqn.outvars if eqn.primitive.name not in fills else ():
        classes.fix(v, {*range(v.aval.ndim)} - reached[v])
    return True


def _elementwise(eqn: Eqn, place: int, out: Any) -> Follow:
    # an axis of size 1 may stand for a longer one
    mine = eqn.invars[place].aval.shape
    whole = out.aval.shape
    return {k: k for k, n in enumerate(whole) if mine[k] == n} if len(mine) == len(whole) else {}


def _broadcast(eqn: Eqn, place: int, out: Any) -> Follow:
    shape = eqn.invars[place].aval.shape
    to = eqn.params["broadcast_dimensions"]
    return (
        {k: axis for k, axis in enumerate(to) if shape[k] == out.aval.shape[axis]}
        if place == 0
        else {}
    )


def _reshape(eqn: Eqn, place: int, out: Any) -> Follow:
    if place or eqn.params.get("dimensions") is not None:
        return {}
    old = eqn.invars[place].aval.shape
    new = out.aval.shape
    starts = {(math.prod(new[:k]), new[k]): k for k in range(len(new)) if new[k] != 1}
    pairs = ((k, starts.get((math.prod(old[:k]), old[k]))) for k in range(len(old)) if old[k] != 1)
    return {k: axis for k, axis in pairs if axis is not None}


def _without(axes: Callable[[Any], Sequence[int]]) -> Callable[..., Follow]:
    """The rule of primitives that remove axes."""

    def rule(eqn: Eqn, place: int, out: Any) -> Follow:
        removed = axes(eqn)
        remaining = [k for k in range(eqn.invars[place].aval.ndim) if k not in removed]
        return {k: axis for axis, k in enumerate(remaining)}

    return rule


def _except(axes: Callable[[Any], Sequence[int]]) -> Callable[..., Follow]:
    """The rule of primitives that mix elements along some axes, and keep all axes."""

    def rule(eqn: Eqn, place: int, out: Any) -> Follow:
        return {k: k for k in range(eqn.invars[place].aval.ndim) if k not in axes(eqn)}

    return rule


def _cut(eqn: Eqn) -> list[int]:
    shape = eqn.invars[0].aval.shape
    return [k for k, size in enumerate(eqn.outvars[0].aval.shape) if size != shape[k]]


def _product(eqn: Eqn, place: int, out: Any) -> Follow:
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [k for k in range(a.aval.ndim) if k not in contracted[side] and k not in batch[side]]
        for side, a in enumerate(eqn.invars)
    ]
    follow = {k: axis for axis, k in enumerate(batch[place])}
    start = len(batch[0]) + (len(free[0]) if place else 0)
    return {**follow, **{k: start + axis for axis, k in enumerate(free[place])}}


def blocks(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Returns the smallest ranges of axes of two shapes that hold the same elements, without 0 among their sizes.

    >>> blocks((1, 32, 256), (32, 4, 64))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    groups = []
    i = 0
    j = 0
    while i < len(old) or j < len(new):
        first = i
        second = j
        sizes = [1, 1]
        while True:
            if i == first and i < len(old):
                sizes[0] *= old[i]
                i += 1
            elif j == second and j < len(new):
                sizes[1] *= new[j]
                j += 1
            elif sizes[0] < sizes[1] and i < len(old):
                sizes[0] *= old[i]
                i += 1
            elif sizes[1] < sizes[0] and j < len(new):
                sizes[1] *= new[j]
                j += 1
            else:
                break
        groups.append((range(first, i), range(second, j)))
    return groups


_RULES: dict[str, Callable[..., Follow]] = {  # by primitive or kind
    **dict.fromkeys(("elementwise", "special", "barrier", "pvary"), _elementwise),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _without(lambda eqn: eqn.params["dimensions"]),
    "reduction": _without(lambda eqn: eqn.params["axes"]),
    "transpose": lambda eqn, place, out: {
        k: axis for axis, k in enumerate(eqn.params["permutation"])
    },
    "slice": _except(_cut),
    "split": _except(lambda eqn: [eqn.params["axis"]]),
    "concatenate": _except(lambda eqn: [eqn.params["dimension"]]),
    "stack": lambda eqn, place, out: {
        k: k + (k >= eqn.params["axis"]) for k in range(eqn.invars[place].aval.ndim)
    },
    "unstack": _without(lambda eqn: [eqn.params["axis"]]),
    "tile": lambda eqn, place, out: {
        k: k
        for k, reps in enumerate(eqn.params["reps"])
        if reps == 1 and len(eqn.params["reps"]) == out.aval.ndim
    },
    "rev": _except(lambda eqn: eqn.params["dimensions"]),
    "pad": lambda eqn, place, out: (
        {k: k for k, padding in enumerate(eqn.params["padding_config"]) if padding == (0, 0, 0)}
        if place == 0
        else {}
    ),
    "running": _except(lambda eqn: [eqn.params["axis"]]),
    "dot_general": _product,
    "iota": lambda eqn, place, out: {},
}
