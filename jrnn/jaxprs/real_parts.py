"""Complex numbers as pairs of real ones, for formats that have none.

`real_jaxpr` traces a jaxpr again with two real arrays in the place of each complex one. Operations that are linear, such as
slices and sums, apply to both; products, quotients and functions have rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn import jaxprs
from jrnn.errors import ConversionError
from jrnn.jaxprs import Eqn, Values, primitives
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
    return jax.make_jaxpr(lambda *args: _run(closed, args, name))(*avals)


def _run(closed: ClosedJaxpr, args: Values, name: str) -> Values:
    """Evaluates a jaxpr; a complex array is a Pair."""
    return jaxprs.interpreted(
        closed, args, lambda eqn, operands: _apply(eqn, operands, name), _split
    )


def _split(value: Array) -> Array | Pair:
    """Splits a constant if it is complex, by numpy: JAX would trace the complex number."""
    return Pair(np.real(value), np.imag(value)) if is_complex(value) else value


def _apply(eqn: Eqn, operands: Values, name: str) -> Values:
    """Returns the results of an equation."""
    plain = not any(is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
    if plain and not any(has_complex(inner) for inner in jaxprs.sub_jaxprs(eqn)):
        return jaxprs.bind(eqn, *operands)
    kind = eqn.primitive.name
    body = jaxprs.called(eqn, jaxprs.LOWERED_CALLS) or expanded(eqn)
    if body is not None:
        return _run(body, operands, name)
    if (
        primitives.row_of(eqn).linear == "jointly"
    ):  # other operands, such as indices, are given to both parts
        parts = [
            jaxprs.bind(eqn, *(v[k] if isinstance(v, Pair) else v for v in operands))
            for k in (0, 1)
        ]
        return [Pair(*both) for both in zip(*parts)]
    if kind in _CONTROL:
        return _CONTROL[kind](eqn, operands, name)
    if kind in _RULES:
        return [_RULES[kind](eqn, *operands)]
    operand = eqn.invars[0].aval.str_short()
    line = source_line(eqn)
    raise ConversionError(
        f"{name}: {kind} of {operand} has no rule for complex numbers{line and f' ({line})'}; compute with the real and the "
        "imaginary part"
    )


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
    z = x if isinstance(x, Pair) else Pair(x, jnp.zeros_like(x))
    return Pair(z.re.astype(part), z.im.astype(part))


def _product(eqn: Eqn, a: Pair, b: Pair) -> Pair:
    preferred = eqn.params["preferred_element_type"]
    part = None if preferred is None else jnp.finfo(preferred).dtype

    def dot(x: Array, y: Array) -> Array:
        return jaxprs.bind(eqn, x, y, preferred_element_type=part)[0]

    return Pair(dot(a.re, b.re) - dot(a.im, b.im), dot(a.re, b.im) + dot(a.im, b.re))


_RULES: dict[str, Callable[..., Any]] = {
    "complex": _joined,
    "real": lambda eqn, z: z.re,
    "imag": lambda eqn, z: z.im,
    "conj": lambda eqn, z: Pair(z.re, -z.im) if isinstance(z, Pair) else Pair(z, jnp.zeros_like(z)),
    "mul": lambda eqn, a, b: a * b,
    "square": lambda eqn, z: z * z,
    "div": lambda eqn, a, b: a / b,
    "integer_pow": _power,
    "exp": _exp,
    "log": lambda eqn, z: Pair(jnp.log(_size(z)), jnp.arctan2(z.im, z.re)),
    "abs": lambda eqn, z: _size(z),
    "eq": lambda eqn, a, b: (a.re == b.re) & (a.im == b.im),
    "ne": lambda eqn, a, b: (a.re != b.re) | (a.im != b.im),
    "convert_element_type": _converted,
    "dot_general": _product,
}


# Control flow ------------------------------------------------------------------------------------------------------


def _scan(eqn: Eqn, operands: Values, name: str) -> Values:
    p = eqn.params
    n_consts, n_carry = jaxprs.scan_counts(p)
    consts = operands[:n_consts]
    carry = operands[n_consts : n_consts + n_carry]
    xs = operands[n_consts + n_carry :]

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        out = _run(p["jaxpr"], [*consts, *carry, *x], name)
        return out[:n_carry], out[n_carry:]

    length = None if xs else p["length"]  # which may be a symbolic dimension
    carry, ys = lax.scan(step, carry, xs, length, p["reverse"], p["unroll"])
    return [*carry, *ys]


def _while(eqn: Eqn, operands: Values, name: str) -> Values:
    p = eqn.params
    first = p["cond_nconsts"]
    after = p["cond_nconsts"] + p["body_nconsts"]
    tests = operands[:first]
    consts = operands[first:after]
    return lax.while_loop(
        lambda carry: _run(p["cond_jaxpr"], [*tests, *carry], name)[0],
        lambda carry: _run(p["body_jaxpr"], [*consts, *carry], name),
        operands[after:],
    )


def _cond(eqn: Eqn, operands: Values, name: str) -> Values:
    index, *values = operands
    branches = [lambda *args, body=body: _run(body, args, name) for body in eqn.params["branches"]]
    return lax.switch(index, branches, *values)


_CONTROL: dict[str, Callable[..., Values]] = {"scan": _scan, "while": _while, "cond": _cond}
