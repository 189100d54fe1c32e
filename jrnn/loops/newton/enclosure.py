"""Enclosures: what a step can compute from inputs that are known up to a radius, rounding included.

A value is a `Box`: a center, which the step computes, and a radius. For every input within its box, the exact result of an
equation lies within the box of the result, and so does the result with rounding. Values that depend on no box are exact. A
primitive without a rule has no enclosure (`NotEnclosed`).

Source: Moore, Kearfott and Cloud, "Introduction to Interval Analysis", 2009, with centers and radii in place of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives

_ULPS = 4  # of a function such as tanh, as XLA computes it


class NotEnclosed(Exception):
    """Raised for a step with an equation that has no enclosure; the message is its primitive."""


@dataclass(frozen=True)
class Box:
    """A center and a radius of the same shape; of a boolean the radius is 1 where it is unsure. None: exact."""

    center: Any
    radius: Any | None = None

    @property
    def size(self) -> Any:
        """The absolute value of the center, in the type of radii."""
        return jnp.abs(self.center).astype(_wide(self.center))

    @property
    def spread(self) -> Any:
        """The radius; zeros if it is exact."""
        return (
            jnp.zeros(jnp.shape(self.center), _wide(self.center))
            if self.radius is None
            else self.radius
        )


def _wide(value: Any) -> Any:
    dtype = jnp.result_type(value)
    return (
        jnp.promote_types(dtype, jnp.float32)
        if jnp.issubdtype(dtype, jnp.floating)
        else jnp.float32
    )


def _eps(value: Any) -> float:
    dtype = jnp.result_type(value)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def enclosed(eqns: Iterable[Eqn], env: dict[Var, Box]) -> tuple[dict[Var, Box], Any]:
    """Evaluates equations on boxes.

    Args:
        eqns: the equations, with all calls inlined.
        env: the boxes of the variables that they read.

    Returns:
        The boxes of all variables; and whether a result may jump within its box, as where it compares unsure values.

    Raises:
        NotEnclosed: for an equation without a rule.
    """
    jumps: list[Any] = []

    def boxes(eqn: Eqn, *operands: Box) -> list[Box]:
        centers = jaxprs.bind(eqn, *(box.center for box in operands))
        if all(box.radius is None for box in operands):
            return [Box(center) for center in centers]
        rule = primitives.rule_of(eqn, _RULES)
        if rule is None or any(jnp.iscomplexobj(v) for v in centers):
            raise NotEnclosed(eqn.primitive.name)
        radii, jump = rule(eqn, operands, centers)
        jumps.append(jnp.any(jump))
        return [Box(c, jnp.where(jnp.isnan(r), jnp.inf, r)) for c, r in zip(centers, radii)]

    jaxprs.evaluate(eqns, env, boxes, Box)
    return env, reduce(jnp.logical_or, jumps, jnp.asarray(False))


# Rules: the radii of the results, and where they may jump ----------------------------------------------------------------

Rule = Callable[[Eqn, Sequence[Box], Sequence[Any]], tuple[Sequence[Any], Any]]


def _smooth(of: Callable[..., Any], ulps: float = 1, least: float = 0) -> Rule:
    """The rule of a continuous function of elements.

    `of` returns the radius without rounding. Results smaller than `least` are rounded as if they had this size.
    """

    def rule(
        eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        (center,) = centers
        radius = of(eqn, *operands)
        image = primitives.row_of(eqn).image
        if image is not None:
            wide = center.astype(_wide(center))
            within = jnp.maximum(image[1] - wide, wide - image[0])  # no result lies further away
            radius = jnp.where(radius <= within, radius, within)
        return [radius + ulps * _eps(center) * jnp.maximum(Box(center).size, least)], False

    return rule


def _sloped(slope: Callable[..., Any], least: float = 0) -> Rule:
    """The rule of a function of one variable; `slope` bounds its derivative from the bounds of the operand."""

    def of(eqn: Eqn, a: Box) -> Any:
        center = a.center.astype(_wide(a.center))
        return slope(eqn, center - a.spread, center + a.spread) * a.spread

    return _smooth(of, _ULPS, least)


def _nearest(lo: Any, hi: Any) -> Any:
    """The least absolute value between two bounds."""
    return jnp.where((lo <= 0) & (hi >= 0), 0, jnp.minimum(jnp.abs(lo), jnp.abs(hi)))


def _farthest(lo: Any, hi: Any) -> Any:
    return jnp.maximum(jnp.abs(lo), jnp.abs(hi))


def _above(least: float, slope: Callable[[Any], Any]) -> Callable[..., Any]:
    """The slope of a function of numbers above a limit, which is steepest at the lower bound."""
    return lambda eqn, lo, hi: jnp.where(
        lo > least, slope(jnp.where(lo > least, lo, least + 1)), jnp.inf
    )


def _inside(slope: Callable[[Any], Any]) -> Callable[..., Any]:
    """The slope of a function of numbers between -1 and 1, which is steepest at the bound nearest to one of these."""

    def bound(eqn: Eqn, lo: Any, hi: Any) -> Any:
        at = _farthest(lo, hi)
        return jnp.where(at < 1, slope(jnp.where(at < 1, at, 0)), jnp.inf)

    return bound


def _cube_root(eqn: Eqn, lo: Any, hi: Any) -> Any:
    at = _nearest(lo, hi)
    return jnp.where(at > 0, 1 / (3 * jnp.cbrt(jnp.where(at > 0, at, 1)) ** 2), jnp.inf)


def _tangent(eqn: Eqn, lo: Any, hi: Any) -> Any:
    """The slope is convex between two poles, and unbounded over a pole."""
    together = jnp.floor(lo / math.pi + 0.5) == jnp.floor(hi / math.pi + 0.5)
    return jnp.where(together, 1 + _farthest(jnp.tan(lo), jnp.tan(hi)) ** 2, jnp.inf)


def _power(eqn: Eqn, lo: Any, hi: Any) -> Any:
    y = eqn.params["y"]
    at = _farthest(lo, hi) if y >= 1 else _nearest(lo, hi)
    return abs(y) * jnp.where(at > 0, at, 0 if y >= 1 else jnp.nan) ** (y - 1)


_SLOPES: dict[str, Callable[..., Any]] = {
    "tanh": lambda eqn, lo, hi: 1 - jnp.tanh(_nearest(lo, hi)) ** 2,
    "logistic": lambda eqn, lo, hi: (
        jax.nn.sigmoid(_nearest(lo, hi)) * jax.nn.sigmoid(-_nearest(lo, hi))
    ),
    "exp": lambda eqn, lo, hi: jnp.exp(hi),
    "exp2": lambda eqn, lo, hi: math.log(2) * jnp.exp2(hi),
    "expm1": lambda eqn, lo, hi: jnp.exp(hi),
    "log": _above(0, lambda x: 1 / x),
    "log2": _above(0, lambda x: 1 / (math.log(2) * x)),
    "log1p": _above(-1, lambda x: 1 / (1 + x)),
    "sqrt": _above(0, lambda x: 0.5 / jnp.sqrt(x)),
    "rsqrt": _above(0, lambda x: 0.5 / (x * jnp.sqrt(x))),
    "sin": lambda eqn, lo, hi: jnp.minimum(1, jnp.abs(jnp.cos((lo + hi) / 2)) + (hi - lo) / 2),
    "cos": lambda eqn, lo, hi: jnp.minimum(1, jnp.abs(jnp.sin((lo + hi) / 2)) + (hi - lo) / 2),
    "atan": lambda eqn, lo, hi: 1 / (1 + _nearest(lo, hi) ** 2),
    "asin": _inside(lambda x: 1 / jnp.sqrt((1 - x) * (1 + x))),
    "atanh": _inside(lambda x: 1 / ((1 - x) * (1 + x))),
    "erf_inv": _inside(lambda x: math.sqrt(math.pi) / 2 * jnp.exp(lax.erf_inv(x) ** 2)),
    "tan": _tangent,
    "cbrt": _cube_root,
    "asinh": lambda eqn, lo, hi: 1 / jnp.sqrt(1 + _nearest(lo, hi) ** 2),
    "sinh": lambda eqn, lo, hi: jnp.cosh(_farthest(lo, hi)),
    "cosh": lambda eqn, lo, hi: jnp.sinh(_farthest(lo, hi)),
    "erf": lambda eqn, lo, hi: 2 / math.sqrt(math.pi) * jnp.exp(-(_nearest(lo, hi) ** 2)),
    "erfc": lambda eqn, lo, hi: 2 / math.sqrt(math.pi) * jnp.exp(-(_nearest(lo, hi) ** 2)),
    "square": lambda eqn, lo, hi: 2 * _farthest(lo, hi),
    "one_minus_square": lambda eqn, lo, hi: 2 * _farthest(lo, hi),
    "integer_pow": _power,
    "bessel_i0e": lambda eqn, lo, hi: 1.0,
    "bessel_i1e": lambda eqn, lo, hi: 0.5,
}
_NEAR_ZERO: dict[str, Callable[..., Any]] = {  # rounded within, where the result may be about zero
    "acos": _SLOPES["asin"],
    "acosh": _above(1, lambda x: 1 / jnp.sqrt((x - 1) * (x + 1))),
}


def _quotient(eqn: Eqn, a: Box, b: Box) -> Any:
    below = b.size - b.spread
    center = jnp.abs(a.center / b.center).astype(_wide(a.center))
    return jnp.where(below > 0, (a.spread + center * b.spread) / below, jnp.inf)


def _pow(eqn: Eqn, a: Box, b: Box) -> Any:
    if b.radius is not None:
        raise NotEnclosed("pow")
    lo, hi = (a.center.astype(_wide(a.center)) + s * a.spread for s in (-1, 1))
    slope = jnp.maximum(
        *(jnp.abs(b.center * jnp.where(lo > 0, x, 1) ** (b.center - 1)) for x in (lo, hi))
    )
    return jnp.where(lo > 0, slope, jnp.inf) * a.spread


def _angle(eqn: Eqn, y: Box, x: Box) -> Any:
    """The angle of a point moves by at most its way over its distance from the origin, unless it may cross the cut."""
    wide = jnp.promote_types(_wide(y.center), _wide(x.center))
    bounds = [
        _nearest(box.center.astype(wide) - box.spread, box.center.astype(wide) + box.spread)
        for box in (y, x)
    ]
    distance = jnp.hypot(*bounds)
    crosses = (bounds[0] == 0) & (x.center - x.spread <= 0)
    moved = (y.spread + x.spread) / jnp.where(crosses, 1, distance)
    return jnp.where(crosses, jnp.inf, moved)


def _polynomial(
    eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
) -> tuple[Sequence[Any], Any]:
    """Horner's rule in absolute values bounds the polynomial, its slope and its rounding."""
    x, *coefficients = operands
    (center,) = centers
    farthest = x.size + x.spread
    zero = jnp.zeros(center.shape, _wide(center))
    size = zero
    slope = zero
    radius = zero
    for a in reversed(coefficients):
        slope = slope * farthest + size
        size = size * farthest + a.size + a.spread
        radius = radius * farthest + a.spread
    rounding = 2 * len(coefficients) * _eps(center) * size
    return [slope * x.spread + radius + rounding], False


def _greatest(eqn: Eqn, *operands: Box) -> Any:
    return reduce(jnp.maximum, [box.spread for box in operands])


def _picked(eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The rule of primitives that pick, move or add elements."""
    exact = primitives.row_of(eqn).positions
    if any(box.radius is not None for i, box in enumerate(operands) if i in exact):
        raise NotEnclosed(eqn.primitive.name)
    dtype = jnp.result_type(*(box.spread for i, box in enumerate(operands) if i not in exact))
    if "update_jaxpr" in eqn.params and dtype != centers[0].dtype:
        raise NotEnclosed(eqn.primitive.name)
    operands = [
        box.center if i in exact else box.spread.astype(dtype) for i, box in enumerate(operands)
    ]
    return _alike(eqn, operands), False


def _alike(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation for operands of one wide type."""
    changed = {k: None for k in ("preferred_element_type", "out_dtype") if k in eqn.params}
    return jaxprs.bind(eqn, *operands, **changed)


def _sum(eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    (box,), (center,) = operands, centers
    running = eqn.primitive.name == "cumsum"
    count = (
        center.shape[eqn.params["axis"]]
        if running
        else max(1, box.center.size // max(1, center.size))
    )
    (spread,), (size,) = (_alike(eqn, [v]) for v in (box.spread, box.size))
    return [spread + count * _eps(center) * size], False


def _product(
    eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
) -> tuple[Sequence[Any], Any]:
    (a, b), (center,) = operands, centers
    depth = math.prod(a.center.shape[d] for d in eqn.params["dimension_numbers"][0][0])
    dtype = jnp.promote_types(_wide(a.center), _wide(b.center))

    def times(x: Any, y: Any) -> Any:
        numbers = eqn.params["dimension_numbers"]
        return lax.dot_general(
            x.astype(dtype), y.astype(dtype), numbers, precision=lax.Precision.HIGHEST
        )

    rounding = (depth + 1) * max(_eps(a.center), _eps(center)) * times(a.size, b.size)
    return [times(a.spread, b.size + b.spread) + times(a.size, b.spread) + rounding], False


def _compared(
    eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
) -> tuple[Sequence[Any], Any]:
    a, b = operands
    if eqn.invars[0] is eqn.invars[1]:  # asks for NaN
        return [jnp.zeros(centers[0].shape, jnp.float32)], False
    if a.center.dtype == bool:
        return [jnp.maximum(a.spread, b.spread)], False
    apart = jnp.abs(a.center.astype(_wide(a.center)) - b.center.astype(_wide(b.center)))
    radius = a.spread + b.spread
    return [((apart <= radius) & (radius > 0)).astype(jnp.float32)], False


def _stepped(below: Callable[[Any], Any], height: float) -> Rule:
    """The rule of functions that are constant between jumps; `below` numbers the intervals."""

    def rule(
        eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        (box,) = operands
        center = box.center.astype(_wide(box.center))
        unsure = below(center - box.spread) != below(center + box.spread)
        return [jnp.where(unsure, height + box.spread, 0)], unsure

    return rule


def _selected(
    eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
) -> tuple[Sequence[Any], Any]:
    which, *cases = operands
    (center,) = centers
    (own,) = jaxprs.bind(eqn, which.center, *(case.spread for case in cases))
    if which.radius is None:
        return [own], False
    unsure = jnp.broadcast_to(which.radius > 0, center.shape)
    wide = center.astype(_wide(center))
    every = [jnp.abs(case.center.astype(wide.dtype) - wide) + case.spread for case in cases]
    return [jnp.where(unsure, reduce(jnp.maximum, every), own)], unsure


def _converted(
    eqn: Eqn, operands: Sequence[Box], centers: Sequence[Any]
) -> tuple[Sequence[Any], Any]:
    (box,), (center,) = operands, centers
    if jnp.issubdtype(center.dtype, jnp.floating) and jnp.issubdtype(
        box.center.dtype, jnp.floating
    ):
        return [box.spread.astype(_wide(center)) + _eps(center) * Box(center).size], False
    if center.dtype == bool or box.center.dtype == bool:
        unsure = (
            box.spread > 0
            if box.center.dtype == bool
            else (box.size <= box.spread) & (box.spread > 0)
        )
        return [unsure.astype(_wide(center))], unsure & (center.dtype != bool)
    if jnp.issubdtype(box.center.dtype, jnp.integer):
        return [box.spread.astype(_wide(center))], False
    return _stepped(jnp.trunc, 1)(eqn, operands, centers)


_ADDED = _smooth(lambda eqn, a, b: a.spread + b.spread)
_SAME = _smooth(lambda eqn, a: a.spread, 0)
_RULES: dict[str, Rule] = {  # by primitive or kind
    **{name: _sloped(slope) for name, slope in _SLOPES.items()},
    **{name: _sloped(slope, 1) for name, slope in _NEAR_ZERO.items()},
    "atan2": _smooth(_angle, _ULPS, 1),
    "polynomial": _polynomial,
    **dict.fromkeys(("add", "add_any", "sub"), _ADDED),
    "mul": _smooth(lambda eqn, a, b: a.size * b.spread + a.spread * (b.size + b.spread)),
    "div": _smooth(_quotient, 2),
    "pow": _smooth(_pow, _ULPS),
    **dict.fromkeys(("abs", "neg", "copy", "name", "stop_gradient"), _SAME),
    "reduce_precision": _smooth(
        lambda eqn, a: a.spread + 2.0 ** -eqn.params["mantissa_bits"] * a.size
    ),
    **dict.fromkeys(("max", "min", "clamp", "and", "or", "xor", "not"), _smooth(_greatest, 0)),
    "is_finite": lambda eqn, operands, centers: ([jnp.zeros(centers[0].shape, jnp.float32)], False),
    "sign": _stepped(jnp.sign, 2),
    "floor": _stepped(jnp.floor, 1),
    "ceil": _stepped(jnp.ceil, 1),
    "round": _stepped(lambda x: jnp.floor(x + 0.5), 1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(("view", "placement", "barrier", "lookup", "pvary"), _picked),
    **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add"), _picked),
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        lambda eqn, operands, centers: ([jnp.max(operands[0].spread, eqn.params["axes"])], False),
    ),
    **dict.fromkeys(("reduce_sum", "cumsum"), _sum),
    "dot_general": _product,
}
