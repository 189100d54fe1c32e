"""Axes of values that belong together: how they follow through equations, and which have one size.

`primitives/shapes.py` has the rule of each primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from jrnn.jaxprs import primitives
from jrnn.jaxprs.primitives.shapes import AxisRule, Follow
from jrnn.jaxprs.programs import Atom, Eqn, Var, is_literal

T = TypeVar("T")
Axis = tuple[Var, int]  # a variable, and the position of an axis


class UnionFind(Generic[T]):
    """Classes of things that are one: `above` leads from each to another one of its class, and to the class's root.

    Each search makes the path behind it half as long, so that n joins take about n log n steps in a chain, too.
    """

    def __init__(self) -> None:
        self.above: dict[T, T] = {}

    def root(self, member: T) -> T:
        above = self.above.get(member)
        while above is not None:
            further = self.above.get(above)
            if further is None:
                return above
            self.above[member] = further
            member = further
            above = self.above.get(member)
        return member


class Classes(UnionFind[Axis]):
    """Classes of axes that belong together. Those in `fixed` have a property that their class gets."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed: set[Axis] = set()

    def join(self, a: Atom, i: int, b: Atom, j: int) -> None:
        if is_literal(a) or is_literal(b):
            self.fix(a, [i])
            self.fix(b, [j])
            return
        mine = self.root((a, i))
        theirs = self.root((b, j))
        if mine != theirs:
            self.above[mine] = theirs
            if mine in self.fixed:
                self.fixed.add(theirs)

    def fix(self, atom: Atom, which: Iterable[int]) -> None:
        if not is_literal(atom):
            self.fixed.update(self.root((atom, d)) for d in which)


def is_followed(eqn: Eqn) -> bool:
    """Returns True if axes are followed through the primitive of an equation."""
    return primitives.row_of(eqn).axes is not None


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
    rule = primitives.row_of(eqn).axes
    return {} if rule is None else rule(eqn, place, out)


def contracted_axes(eqn: Eqn, place: int) -> set[int]:
    """Returns the axes of an operand that a reduction or a product removes, whatever size they have."""
    if eqn.primitive.name == "dot_general":
        return {*eqn.params["dimension_numbers"][0][place]}
    return {*eqn.params["axes"]} if primitives.is_kind(eqn, "reduction") else set()


def of_one_size(eqn: Eqn, place: int, out: Var) -> Follow:
    """Returns `aligned` with axes along which elements are mixed, but whose size equals an axis of the result."""
    if eqn.primitive.name == "rev" or primitives.is_kind(eqn, "running"):
        return {k: k for k in range(out.aval.ndim)}
    return aligned(eqn, place, out)


def join_followed(
    eqn: Eqn,
    classes: Classes,
    follow: AxisRule,
    fills: Collection[str],
    any_size: Callable[[int], bool] | None = None,
) -> bool:
    """Joins the axes of operands with the axes of results that follow from them, and fixes all others.

    Args:
        eqn: the equation.
        classes: of axes.
        follow: `aligned`, or `of_one_size`.
        fills: names of primitives whose results may have axes that follow from none.
        any_size: of the size of an axis of an operand: whether the axis stays free although nothing follows from it.

    Returns:
        False if axes are not followed through the equation, so that all are fixed.
    """
    if not is_followed(eqn) or eqn.params.get("out_sharding") is not None:
        for atom in (*eqn.invars, *eqn.outvars):
            classes.fix(atom, range(getattr(atom.aval, "ndim", 0)))
        return False
    unreached = {v: {*range(v.aval.ndim)} for v in eqn.outvars}
    for place, atom in enumerate(eqn.invars):
        unmatched = {*range(atom.aval.ndim)} - contracted_axes(eqn, place)
        for v in eqn.outvars:
            followed = follow(eqn, place, v)
            for axis, to in followed.items():
                classes.join(atom, axis, v, to)
            unmatched -= followed.keys()
            unreached[v].difference_update(followed.values())
        if any_size is not None:
            unmatched = {axis for axis in unmatched if not any_size(atom.aval.shape[axis])}
        classes.fix(atom, unmatched)
    if eqn.primitive.name not in fills:
        for v, axes in unreached.items():
            classes.fix(v, axes)
    return True


def blocks(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Returns the smallest ranges of axes of two shapes that hold the same elements, without 0 among their sizes.

    >>> blocks((1, 32, 256), (32, 4, 64))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    groups = []
    i = 0
    j = 0
    while i < len(old) or j < len(new):
        first = (i, j)
        size = 1
        new_size = 1
        # The first axis of each shape, and then one of the shape with fewer elements, until both have as many.
        while True:
            is_behind = i == first[0] or size < new_size
            if is_behind and i < len(old):
                size *= old[i]
                i += 1
            elif (j == first[1] or new_size < size) and j < len(new):
                new_size *= new[j]
                j += 1
            else:
                break
        groups.append((range(first[0], i), range(first[1], j)))
    return groups
