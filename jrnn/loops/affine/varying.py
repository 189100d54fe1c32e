"""The axes along which the values of a step vary: a vector that is broadcast to a matrix varies along one axis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from jrnn.jaxprs import Atom, Eqn, primitives
from jrnn.jaxprs.axes import aligned
from jrnn.loops.ir import Unsupported


def sources_of(eqn: Eqn) -> list[int | None]:
    """Returns for each axis of the result of a view the axis of the operand that it is."""
    follow = aligned(eqn, 0, eqn.outvars[0])
    if not long_axes(eqn.invars[0]).issubset(follow):
        raise Unsupported("it merges or splits axes")
    sources: list[int | None] = [None] * eqn.outvars[0].aval.ndim
    for axis, axis_of_result in follow.items():
        sources[axis_of_result] = axis
    return sources


def varying_axes(eqn: Eqn, axes_of: Callable[[Atom], set[int]]) -> list[set[int]]:
    """Returns the axes along which each result may vary: broadcasts are followed through elementwise operations.

    Args:
        eqn: the equation.
        axes_of: the axes along which an operand may vary.
    """
    all_long = list(map(long_axes, eqn.outvars))
    if primitives.is_whole_view(eqn):
        with suppress(Unsupported):
            sources = sources_of(eqn)
            inner = axes_of(eqn.invars[0])
            return [{axis for axis in all_long[0] if sources[axis] in inner}]
    if primitives.is_kind(eqn, "elementwise"):
        of_operands = set().union(*map(axes_of, eqn.invars))
        return list(map(of_operands.intersection, all_long))
    if eqn.primitive.name == "iota":
        return [all_long[0].intersection([eqn.params["dimension"]])]
    return all_long


def long_axes(atom: Atom) -> set[int]:
    return {d for d, n in enumerate(atom.aval.shape) if n != 1}
