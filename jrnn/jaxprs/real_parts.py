"""Complex numbers as pairs of real ones, for formats that have none.

`real_jaxpr` traces a jaxpr again with two real arrays instead of each complex one. Operations that are linear, such as
slices and sums, apply to both; products, quotients and functions have rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn import jaxprs
from jrnn.errors import ConversionError
from jrnn.jaxprs import Eqn, Value, Values, primitives
from jrnn.jaxprs.jax_internals import ClosedJaxpr, Jaxpr, ShapedArray, expanded, source_line


class Pair(NamedTuple):
    """The real and the imaginary part of a complex array."""

    re: Array
    im: Array

    def __mul__(self, other: Pair) -> Pair:  # type: ignore[override]
        return Pair(
            self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re
        )

    def __truediv__(self, other: Pair) -> Pair:
        """By Smith's method, so that no square overflows."""
        wide = jnp.abs(other.re) >= jnp.abs(other.im)
        large = jnp.where(wide, other.re, other.im)
        small = jnp.where(wide, other.im, other.re)
        ratio = small / large
        total = large + small * ratio
        a = jnp.where(wide, self.re, self.im)
        b = jnp.where(wide, self.im, self.re)
        return Pair(
            (a + b * ratio) / total,
            jnp.where(wide, 1.0, -1.0).astype(a.dtype) * (b - a * ratio) / total,
        )


def is_complex(aval: Array | ShapedArray) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.complexfloating)


def has_complex(jaxpr: Jaxpr) -> bool:
    """Returns True if an equation of a jaxpr, or of one inside it, computes complex numbers."""
    return any(
        is_complex(v.aval)
        for eqn in jaxprs.all_equations(jaxpr)
        for v in (*eqn.invars, *eqn.outvars)
    )


def real_jaxpr(closed: ClosedJaxpr, name: str) -> ClosedJaxpr:
    """Returns a closed jaxpr from and to the same real arrays that computes without complex numbers.

    Raises:
        ConversionError: for an operation on complex numbers without a rule, with the user's line.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(partial(_WithPairs(name).run, closed))(*avals)


@dataclass(frozen=True)
class _WithPairs:
    """Evaluates jaxprs with a Pair instead of each complex array. `name` is the function's, for errors."""

    name: str

    def run(self, closed: ClosedJaxpr, *args: Value) -> list[Value]:
        return jaxprs.interpreted(closed, args, self._apply, _split)

    def _apply(self, eqn: Eqn, operands: list[Value]) -> Values:
        """Returns the results of an equation."""
        has_pairs = any(is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if not has_pairs and not any(map(has_complex, jaxprs.sub_jaxprs(eqn))):
            return jaxprs.bind(eqn, *operands)
        body = jaxprs.called(eqn, jaxprs.LOWERED_CALLS) or expanded(eqn)
        if body is not None:
            return self.run(body, *operands)
        kind = eqn.primitive.name
        if primitives.row_of(eqn).linear == "jointly":
            return _applied_to_parts(eqn, operands)
        if kind in _CONTROL:
            return _CONTROL[kind](self, operands, **eqn.params)
        if kind in _RULES:
            return [_RULES[kind](eqn, *operands)]
        operand = eqn.invars[0].aval.str_short()
        line = source_line(eqn)
        raise ConversionError(
            f"{self.name}: {kind} of {operand} has no rule for complex numbers{line and f' ({line})'}; "
            "compute with the real and the imaginary part"
        )


def _split(value: Array) -> Array | Pair:
    """Splits a constant if it is complex, by numpy: JAX would trace the complex number."""
    return Pair(np.real(value), np.imag(value)) if is_complex(value) else value


def _applied_to_parts(eqn: Eqn, operands: Values) -> Values:
    """Returns the results of a linear equation. Operands that are not pairs, such as indices, are given to both parts."""
    parts = []
    for k in (0, 1):
        parts.append(jaxprs.bind(eqn, *(v[k] if isinstance(v, Pair) else v for v in operands)))
    return list(map(Pair, *parts))


# Functions ---------------------------------------------------------------------------------------------------------


def _joined(eqn: Eqn, re: Array, im: Array) -> Pair:
    """A pair of one shape. JAX 0.12 gives one part as a scalar, where it transposes the real part of a number."""
    shape = eqn.outvars[0].aval.shape
    return Pair(*(jnp.broadcast_to(part, shape) for part in (re, im)))


def _exp(eqn: Eqn, z: Pair) -> Pair:
    size = jnp.exp(z.re)
    return Pair(size * jnp.cos(z.im), size * jnp.sin(z.im))


def _size(z: Pair) -> Array:
    """|z|, without squares that overflow."""
    largest = jnp.maximum(jnp.abs(z.re), jnp.abs(z.im))
    scale = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt((z.re / scale) ** 2 + (z.im / scale) ** 2)


def _power(eqn: Eqn, z: Pair) -> Pair:
    exponent = eqn.params["y"]
    one = Pair(jnp.ones_like(z.re), jnp.zeros_like(z.re))
    power = one
    square = z
    remaining = abs(exponent)
    while remaining:
        power = power * square if remaining % 2 else power
        square = square * square
        remaining = remaining // 2
    return power if exponent >= 0 else one / power


def _converted(eqn: Eqn, x: Array | Pair) -> Array | Pair:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return x.re.astype(dtype)
    part = jnp.finfo(dtype).dtype
    z = _pair(x)
    return Pair(z.re.astype(part), z.im.astype(part))


def _pair(x: Array | Pair) -> Pair:
    return x if isinstance(x, Pair) else Pair(x, jnp.zeros_like(x))


def _product(eqn: Eqn, a: Pair, b: Pair) -> Pair:
    preferred = eqn.params["preferred_element_type"]
    part = None if preferred is None else jnp.finfo(preferred).dtype

    def dot(x: Array, y: Array) -> Array:
        return jaxprs.bind(eqn, x, y, preferred_element_type=part)[0]

    return Pair(dot(a.re, b.re) - dot(a.im, b.im), dot(a.re, b.im) + dot(a.im, b.re))


def _conjugate(eqn: Eqn, z: Array | Pair) -> Pair:
    z = _pair(z)
    return Pair(z.re, -z.im)


def _log(eqn: Eqn, z: Pair) -> Pair:
    return Pair(jnp.log(_size(z)), jnp.arctan2(z.im, z.re))


def _are_equal(eqn: Eqn, a: Pair, b: Pair) -> Array:
    return (a.re == b.re) & (a.im == b.im)


def _differ(eqn: Eqn, a: Pair, b: Pair) -> Array:
    return ~_are_equal(eqn, a, b)


_RULES: dict[str, Callable[..., Array | Pair]] = {
    "complex": _joined,
    "real": lambda eqn, z: z.re,
    "imag": lambda eqn, z: z.im,
    "conj": _conjugate,
    "mul": lambda eqn, a, b: a * b,
    "square": lambda eqn, z: z * z,
    "div": lambda eqn, a, b: a / b,
    "integer_pow": _power,
    "exp": _exp,
    "log": _log,
    "abs": lambda eqn, z: _size(z),
    "eq": _are_equal,
    "ne": _differ,
    "convert_element_type": _converted,
    "dot_general": _product,
}


# Control flow ------------------------------------------------------------------------------------------------------


def _scan(
    pairs: _WithPairs,
    operands: Values,
    *,
    jaxpr: ClosedJaxpr,
    length: int,
    reverse: bool,
    unroll: int,
    **params: Any,
) -> Values:
    consts, carry, xs = jaxprs.scan_parts(params, operands)
    n_carry = len(carry)

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        out = pairs.run(jaxpr, *consts, *carry, *x)
        return out[:n_carry], out[n_carry:]

    # The length may be a symbolic dimension.
    carry, ys = lax.scan(step, carry, xs, None if xs else length, reverse, unroll)
    return [*carry, *ys]


def _while(
    pairs: _WithPairs,
    operands: Values,
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    **_: Any,
) -> Values:
    tests = operands[:cond_nconsts]
    consts = operands[cond_nconsts : cond_nconsts + body_nconsts]

    def goes_on(carry: Values) -> Array:
        return pairs.run(cond_jaxpr, *tests, *carry)[0]

    def step(carry: Values) -> Values:
        return pairs.run(body_jaxpr, *consts, *carry)

    return lax.while_loop(goes_on, step, operands[cond_nconsts + body_nconsts :])


def _cond(
    pairs: _WithPairs, operands: Values, *, branches: Sequence[ClosedJaxpr], **_: Any
) -> Values:
    index, *values = operands
    return lax.switch(index, [partial(pairs.run, body) for body in branches], *values)


_CONTROL: dict[str, Callable[..., Values]] = {"scan": _scan, "while": _while, "cond": _cond}
