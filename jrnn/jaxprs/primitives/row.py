"""The record of a primitive's properties, and the defaults of its kind."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax import Array

from jrnn.jaxprs.primitives import shapes
from jrnn.jaxprs.primitives.shapes import AxisRule, ResizeRule
from jrnn.jaxprs.primitives.slopes import SlopeBound

# elementwise: one value per element of the operands, cheap enough to be computed again in the reverse loop.
# special: functions of elements by series of many terms, which are not repeated.
# view: picks, repeats or reorders elements of one operand; free where the result is used, a copy where it is stored.
# placement: makes an array of parts or of nothing.
# reduction, running: over axes that go, or stay.
# product, solver, transform, order, window, lookup, update: as their names say.
# draw, key: random numbers, and keys as words.
# collective: communicates over devices or mapped axes.
# library: calls of libraries and callbacks.  barrier: returns each operand.  control: runs jaxprs.
Kind = Literal[
    "elementwise", "special", "view", "placement", "reduction", "running", "product", "solver", "transform", "order",
    "window", "lookup", "update", "draw", "key", "collective", "library", "barrier", "control", "unknown",
]  # fmt: skip
Evaluate = Callable[..., Any]  # from the operands, and the parameters as keywords


@dataclass(frozen=True)
class Row:
    """What is known of a primitive.

    Attributes:
        kind: see `Kind`.
        linear: "jointly" in all its operands but `positions`, or "each" for one that is linear in each operand; "" for
            others.
        positions: the operands that are indices or predicates.
        definition: the primitive as a function of arrays, made of other primitives, for rooms without a rule of their own.
        cost: the time of one element, compared with tanh; None for the time of an addition, 0.0 for what is free.
        calls: of a library, for one evaluation; 0.0 for a part of another kernel, None for a kernel of its own.
        axes: how axes follow from an operand to a result (`shapes.py`); None if they are not followed.
        resize: the parameters for operands of other sizes, where they contain sizes.
        image: numbers between which all results lie.
        monotone: the extremes over ranges of the operands are at the ends of these ranges.
        even: the extremes over ranges of the operands are at their ends, or at 0.
        slope: a bound of the slope of a function of one variable (`slopes.py`).
        rounds_inside: results near 0 are rounded as if they were near 1.
        numpy: numpy's function for operands of some types, as "kinds" or "kinds name"; kinds are any, real, float, or
            numpy's letters (V is bfloat16). Or a function of the operands, with the parameters as keywords, which returns
            None for a case that it does not cover.
        neutral: the second operand for which the result is the first one.
        commutes: the operands may be swapped.
        copies: the result is the operand, and the derivative is 1 or 0.
        stops: the derivative is 0, whatever the result is.
        picks: every element of the result is one of the operands (but `positions`), or one that rounding makes of it.
        jumps: for floating-point operands, the result jumps where an operand changes by a rounding error.
        activation: costs many instructions per value, so that it is worth computing for several slices at once.
        reshapes: a view of all elements in their order, in another shape; it may repeat them.
        cuts: a view of a part of the elements.
        moves: may be evaluated for all steps.
        cheap: cheap enough to be computed again in the reverse loop.
        heavy: worth naming where it leaves a loop, and never computed twice.
    """

    kind: Kind
    linear: Literal["jointly", "each", ""] = ""
    positions: Container[int] = ()
    definition: Callable[..., Array] | None = None
    cost: float | None = None
    calls: float | None = None
    axes: AxisRule | None = None
    resize: ResizeRule | None = None
    image: tuple[float, float] | None = None
    monotone: bool = False
    even: bool = False
    slope: SlopeBound | None = None
    rounds_inside: bool = False
    numpy: str | Evaluate | None = None
    neutral: float | None = None
    commutes: bool = False
    copies: bool = False
    stops: bool = False
    picks: bool = False
    jumps: bool = False
    activation: bool = False
    reshapes: bool = False
    cuts: bool = False
    moves: bool = True
    cheap: bool = False
    heavy: bool = False


# A kind that is not here stays in its loop.
_KINDS = (
    Row("elementwise", cheap=True, axes=shapes.same),
    Row("special", axes=shapes.same),
    Row("view", cheap=True, cost=0.0, picks=True),
    Row("placement", cheap=True, cost=0.0),
    Row("reduction", cheap=True, axes=shapes.without("axes")),
    Row("running", axes=shapes.along_others("axis")),
    Row("product", heavy=True, calls=1.0),
    Row("solver", heavy=True),
    Row("transform", heavy=True),
    Row("order"),
    Row("window"),
    Row("lookup", heavy=True, calls=0.0),
    Row("update"),
    Row("draw", heavy=True),
    Row("key", cost=0.0),
    Row("barrier", cost=0.0, axes=shapes.same, moves=False),
)
_DEFAULTS: dict[str, Row] = {row.kind: row for row in _KINDS}


def row(kind: Kind, **columns: Any) -> Row:
    """Returns a row, by default with what its kind says."""
    return replace(_DEFAULTS.get(kind, Row(kind, moves=False)), **columns)
