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
    if any(n != 1 and d not in follow for d, n in enumerate(eqn.invars[0].aval.shape)):
        raise Unsupported("it merges or splits axes")
    back = {axis: d for d, axis in follow.items()}
    return [back.get(d) for d in range(eqn.outvars[0].aval.ndim)]


def varying_axes(eqn: Eqn, axes_of: Callable[[Atom], set[int]]) -> list[set[int]]:
    """Returns the axes along which each result may vary: broadcasts are followed through elementwise operations.

    Args:
        eqn: the equation.
        axes_of: the axes along which an operand may vary.
    """
    name = eqn.primitive.name
    all_long = [long_axes(v) for v in eqn.outvars]
    if primitives.is_whole_view(eqn):
        with suppress(Unsupported):
            sources = sources_of(eqn)
            inner = axes_of(eqn.invars[0])
            return [{d for d in all_long[0] if sources[d] in inner}]
    if primitives.is_kind(eqn, "elementwise"):
        return [set().union(*map(axes_of, eqn.invars)) & axes for axes in all_long]
    return [{eqn.params["dimension"]} & all_long[0]] if name == "iota" else all_long


def long_axes(atom: Atom) -> set[int]:
    return {d for d, n in enumerate(atom.aval.shape) if n != 1}
