"""Enclosures: what a step can compute from inputs that are known up to a radius, rounding included.

A value is a `Box`: a center, which the step computes, and a radius. For every input within its box, the exact result of an
equation lies within the box of the result, and so does the result with rounding. Values that depend on no box are exact. A
primitive without a rule has no enclosure (`NotEnclosed`).

For a smooth function f of one element, the mean value theorem gives the radius of the result,

    radius(f(x)) = max |f'(t)| radius(x) + rounding,    over all t from x - radius(x) to x + radius(x),

so that such a function needs a bound of its slope between two numbers, which its row of the table has. The result of a
comparison, or of a function such as `floor`, may jump within a box, where no slope bounds it. Such a boolean is *unknown*,
and what is selected by it may jump. A primitive that the table defines by others has the box of its definition.

Source: Moore, Kearfott and Cloud, "Introduction to Interval Analysis", 2009, with centers and radii in place of bounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Program, primitives
from jrnn.jaxprs.primitives import Row, slopes
from jrnn.loops.ir import Unsupported

Boxes = Sequence["Box"]
FUNCTION_ULPS = 4  # the rounding of a function such as tanh, as XLA computes it


class NotEnclosed(Unsupported):
    """Raised for a step with an equation that has no enclosure; the message is its primitive."""


@dataclass(frozen=True)
class Box:
    """All values within a radius of a center, element by element.

    Attributes:
        center: what the step computes.
        inexact: the radius, in the shape of the center; None if the value is exact. The radius of a boolean is 1 where the
            value is unknown.
    """

    center: Array
    inexact: Array | None = None

    @property
    def is_exact(self) -> bool:
        return self.inexact is None

    @property
    def radius(self) -> Array:
        """The radius; zeros if the value is exact."""
        if self.inexact is None:
            return jnp.zeros(jnp.shape(self.center), _wide(self.center))
        return self.inexact

    @property
    def size(self) -> Array:
        """The absolute value of the center, in the type of radii."""
        return jnp.abs(self.center).astype(_wide(self.center))


def _is_floating(value: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _wide(value: Array) -> jnp.dtype:
    """Returns the type of radii of a value."""
    if not _is_floating(value):
        return jnp.float32
    return jnp.promote_types(jnp.result_type(value), jnp.float32)


def _eps(value: Array) -> float:
    """Returns the relative rounding of a value's type."""
    return float(jnp.finfo(jnp.result_type(value)).eps) if _is_floating(value) else 0.0


def enclosed(program: Program, arguments: Iterable[Box]) -> tuple[Boxes, Array]:
    """Evaluates a program on boxes.

    Args:
        program: the program, with all calls inlined.
        arguments: the boxes of its inputs.

    Returns:
        The boxes of its results; and whether a value may jump within its box, as where it compares unknown values.

    Raises:
        NotEnclosed: for an equation without a rule.
    """
    all_jumps: list[Array] = []

    def boxes(eqn: Eqn, operands: Boxes) -> Boxes:
        centers = jaxprs.bind(eqn, *(box.center for box in operands))
        if _are_exact(operands):
            return list(map(Box, centers))
        rule = rule_for(eqn)
        if rule is None or any(map(jnp.iscomplexobj, centers)):
            raise NotEnclosed(eqn.primitive.name)
        radii, jumps = rule(eqn, operands, centers)
        all_jumps.append(jnp.any(jumps))
        radii = [jnp.where(jnp.isnan(radius), jnp.inf, radius) for radius in radii]
        return list(map(Box, centers, radii))

    results = jaxprs.interpreted(program, arguments, boxes, Box)
    return results, reduce(jnp.logical_or, all_jumps, jnp.asarray(False))


def radii_of(boxes: Boxes) -> list[Array]:
    return [box.radius for box in boxes]


def _are_exact(boxes: Boxes) -> bool:
    return all(box.is_exact for box in boxes)


# Rules: the radii of the results, and where they may jump ----------------------------------------------------------------

Arrays = Sequence[Array]
RadiiAndJumps = tuple[Arrays, Array | bool]
Rule = Callable[[Eqn, Boxes, Arrays], RadiiAndJumps]
RadiusOf = Callable[..., Array]  # from an equation and the boxes of its operands, without rounding


def _smooth(radius_of: RadiusOf, ulps: float = 1, min_size: float = 0) -> Rule:
    """The rule of a continuous function of elements.

    Args:
        radius_of: the radius without rounding.
        ulps: the rounding, in units of the last place.
        min_size: results smaller than this are rounded as if they had this size.
    """

    def rule(eqn, operands, centers):
        (center,) = centers
        radius = radius_of(eqn, *operands)
        image = primitives.row_of(eqn).image
        if image is not None:
            # No result lies further away than the ends of the function's image.
            wide = center.astype(_wide(center))
            farthest = jnp.maximum(image[1] - wide, wide - image[0])
            radius = jnp.where(radius <= farthest, radius, farthest)
        rounding = ulps * _eps(center) * jnp.maximum(Box(center).size, min_size)
        return [radius + rounding], False

    return rule


def _sloped(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    """The rule of a function of one variable, by the mean value theorem."""
    row = primitives.row_of(eqn)
    slope = row.slope
    assert slope is not None

    def radius_of(eqn, a):
        return slope(eqn, *_ends(a)) * a.radius

    return _smooth(radius_of, FUNCTION_ULPS, float(row.rounds_inside))(eqn, operands, centers)


def _defined(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    """The rule of a primitive that the table defines by others: the box of its definition, seen from the own center."""
    (center,) = centers
    definition = primitives.row_of(eqn).definition
    avals = [jax.typeof(box.center) for box in operands]
    program = jaxprs.trace(lambda *args: [definition(*args)], avals)
    (box,), jumps = enclosed(program, operands)
    return [box.radius + Box(box.center - center).size], jumps


def _ends(box: Box) -> tuple[Array, Array]:
    """The least and the largest value of a box."""
    center = box.center.astype(_wide(box.center))
    return center - box.radius, center + box.radius


def _sum_of_radii(eqn: Eqn, *operands: Box) -> Array:
    return reduce(operator.add, radii_of(operands))


def _multiplied(eqn: Eqn, a: Box, b: Box) -> Array:
    return a.size * b.radius + a.radius * (b.size + b.radius)


def _quotient(eqn: Eqn, a: Box, b: Box) -> Array:
    least_divisor = b.size - b.radius
    center = jnp.abs(a.center / b.center).astype(_wide(a.center))
    radius = (a.radius + center * b.radius) / least_divisor
    return jnp.where(least_divisor > 0, radius, jnp.inf)


def _pow(eqn: Eqn, a: Box, b: Box) -> Array:
    if not b.is_exact:
        raise NotEnclosed("pow")
    lo, hi = _ends(a)

    def slope_at(x):
        return jnp.abs(b.center * jnp.where(lo > 0, x, 1) ** (b.center - 1))

    return jnp.where(lo > 0, jnp.maximum(slope_at(lo), slope_at(hi)), jnp.inf) * a.radius


def _angle(eqn: Eqn, y: Box, x: Box) -> Array:
    """The angle of a point moves by at most its way over its distance from the origin, unless it may cross the cut."""
    wide = jnp.promote_types(_wide(y.center), _wide(x.center))

    def least_size(box):
        center = box.center.astype(wide)
        return slopes.nearest(center - box.radius, center + box.radius)

    least_y = least_size(y)
    distance = jnp.hypot(least_y, least_size(x))
    crosses = (least_y == 0) & (x.center - x.radius <= 0)
    radius = (y.radius + x.radius) / jnp.where(crosses, 1, distance)
    return jnp.where(crosses, jnp.inf, radius)


def _reduced_precision(eqn: Eqn, a: Box) -> Array:
    return a.radius + 2.0 ** -eqn.params["mantissa_bits"] * a.size


def _largest_radius(eqn: Eqn, *operands: Box) -> Array:
    return reduce(jnp.maximum, radii_of(operands))


def _summed(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    """The rule of sums and differences, and of copies, which are not rounded."""
    return _smooth(_sum_of_radii, len(operands) > 1)(eqn, operands, centers)


def _picked(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    """The rule of primitives that pick, move or add elements: the radii are picked, moved or added likewise."""
    positions = primitives.row_of(eqn).positions
    indices = [box for i, box in enumerate(operands) if i in positions]
    values = [box for i, box in enumerate(operands) if i not in positions]
    dtype = jnp.result_type(*radii_of(values))
    is_rounded = "update_jaxpr" in eqn.params and dtype != centers[0].dtype
    if is_rounded or not _are_exact(indices):
        raise NotEnclosed(eqn.primitive.name)

    radii = []
    for i, box in enumerate(operands):
        radii.append(box.center if i in positions else box.radius.astype(dtype))
    return _applied(eqn, radii), False


def _applied(eqn: Eqn, operands: Arrays) -> Arrays:
    """The results of an equation for operands of one wide type."""
    types = {"preferred_element_type", "out_dtype"}.intersection(eqn.params)
    return jaxprs.bind(eqn, *operands, **dict.fromkeys(types))


def _sum(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    (box,) = operands
    (center,) = centers
    if eqn.primitive.name == "cumsum":
        count = center.shape[eqn.params["axis"]]
    else:
        count = max(1, box.center.size // max(1, center.size))
    (radius,) = _applied(eqn, [box.radius])
    (size,) = _applied(eqn, [box.size])
    return [radius + count * _eps(center) * size], False


def _product(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    a, b = operands
    (center,) = centers
    numbers = eqn.params["dimension_numbers"]
    depth = math.prod(a.center.shape[axis] for axis in numbers[0][0])
    dtype = jnp.promote_types(_wide(a.center), _wide(b.center))

    def times(x, y):
        return lax.dot_general(
            x.astype(dtype), y.astype(dtype), numbers, precision=lax.Precision.HIGHEST
        )

    rounding = (depth + 1) * max(_eps(a.center), _eps(center)) * times(a.size, b.size)
    radius = times(a.radius, b.size + b.radius) + times(a.size, b.radius)
    return [radius + rounding], False


def _extreme(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    return [jnp.max(operands[0].radius, eqn.params["axes"])], False


def _is_finite(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    return [jnp.zeros(centers[0].shape, jnp.float32)], False


def _compared(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    a, b = operands
    if eqn.invars[0] is eqn.invars[1]:  # asks for NaN
        return _is_finite(eqn, operands, centers)
    if a.center.dtype == bool:
        return [jnp.maximum(a.radius, b.radius)], False
    distance = jnp.abs(a.center.astype(_wide(a.center)) - b.center.astype(_wide(b.center)))
    radius = a.radius + b.radius
    is_unknown = (distance <= radius) & (radius > 0)
    return [is_unknown.astype(jnp.float32)], False


def _stepped(interval: Callable[[Array], Array], height: float) -> Rule:
    """The rule of functions that are constant between jumps of a height; `interval` numbers the constant parts."""

    def rule(eqn, operands, centers):
        (box,) = operands
        lo, hi = _ends(box)
        jumps = interval(lo) != interval(hi)
        return [jnp.where(jumps, height + box.radius, 0)], jumps

    return rule


def _selected(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    """The radius of the selected case; the distance of all cases where it is unknown which one is selected."""
    which, *cases = operands
    (center,) = centers
    (radius,) = jaxprs.bind(eqn, which.center, *radii_of(cases))
    if which.is_exact:
        return [radius], False
    is_unknown = jnp.broadcast_to(which.radius > 0, center.shape)
    wide = center.astype(_wide(center))
    distances = [jnp.abs(case.center.astype(wide.dtype) - wide) + case.radius for case in cases]
    return [jnp.where(is_unknown, reduce(jnp.maximum, distances), radius)], is_unknown


def _converted(eqn: Eqn, operands: Boxes, centers: Arrays) -> RadiiAndJumps:
    (box,) = operands
    (center,) = centers
    if _is_floating(center) and _is_floating(box.center):
        return [box.radius.astype(_wide(center)) + _eps(center) * Box(center).size], False
    if box.center.dtype == bool:
        is_unknown = box.radius > 0
        return [is_unknown.astype(_wide(center))], is_unknown & (center.dtype != bool)
    if center.dtype == bool:
        is_unknown = (box.size <= box.radius) & (box.radius > 0)
        return [is_unknown.astype(_wide(center))], False
    if jnp.issubdtype(box.center.dtype, jnp.integer):
        return [box.radius.astype(_wide(center))], False
    return _stepped(jnp.trunc, 1)(eqn, operands, centers)


def _rounded(x: Array) -> Array:
    return jnp.floor(x + 0.5)


_RULES: dict[str, Rule] = {  # by primitive or kind
    "atan2": _smooth(_angle, FUNCTION_ULPS, 1),
    "mul": _smooth(_multiplied),
    "div": _smooth(_quotient, 2),
    "pow": _smooth(_pow, FUNCTION_ULPS),
    "abs": _smooth(_sum_of_radii, 0),
    "reduce_precision": _smooth(_reduced_precision),
    **dict.fromkeys(("and", "or", "xor", "not"), _smooth(_largest_radius, 0)),
    "is_finite": _is_finite,
    "sign": _stepped(jnp.sign, 2),
    "floor": _stepped(jnp.floor, 1),
    "ceil": _stepped(jnp.ceil, 1),
    "round": _stepped(_rounded, 1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to"), _compared),
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(("view", "placement", "barrier", "lookup", "pvary"), _picked),
    **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add"), _picked),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_and", "reduce_or"), _extreme),
    **dict.fromkeys(("reduce_sum", "cumsum"), _sum),
    "dot_general": _product,
}


def rule_for(eqn: Eqn) -> Rule | None:
    """Returns the rule for an equation: of its primitive or kind, or of what its row says."""
    return primitives.rule_of(eqn, _RULES) or rule_of_row(primitives.row_of(eqn))


def rule_of_row(row: Row) -> Rule | None:
    """Returns the rule that follows from the row of a primitive, or None."""
    if row.slope is not None:
        return _sloped
    if primitives.adds(row):
        return _summed
    if row.kind == "elementwise" and row.picks:
        return _smooth(_largest_radius, 0)
    return _defined if row.definition is not None else None
