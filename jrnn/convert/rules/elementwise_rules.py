"""Rules for primitives that work element by element: arithmetic, functions, comparisons, logic, choosing, casts.

Where Caffe2 has no operator for a primitive, its definition is a JAX function, which is traced and converted.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emitter import BOOL, FLOAT, Blob, Emitter, Value, rule
from jrnn.errors import ConversionError
from jrnn.jaxprs import definitions
from jrnn.jaxprs.flat import FlatEquation

_FOLDED = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum, "And": np.logical_and,
    "GE": np.greater_equal, "LE": np.less_equal,
}  # fmt: skip


def is_static(*values: Value) -> bool:
    return not any(isinstance(v, Blob) for v in values)


def binary(e: Emitter, type: str, a: Value, b: Value, dtype: Any = None) -> Value:
    """A broadcasting operator; static where both operands are, if its type is in _FOLDED."""
    if type in _FOLDED and is_static(a, b):
        return np.asarray(_FOLDED[type](a, b))
    a = e.loose(a)
    b = e.loose(b)
    out = e.op(
        type,
        [a.name, b.name],
        np.broadcast_shapes(a.held, b.held),
        a.dtype if dtype is None else dtype,
    )
    return replace(out, shape=np.broadcast_shapes(a.shape, b.shape))


def unary(e: Emitter, type: str, x: Blob, **args: Any) -> Blob:
    return replace(e.op(type, [x.name], x.held, x.dtype, **args), shape=x.shape)


def need_float(x: Value, what: str) -> None:
    if x.dtype != FLOAT:
        raise ConversionError(
            f"{what} of {x.dtype}: Caffe2 only has it for float32; convert to float32 first"
        )


_UNARY = {
    "neg": "Negative", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "rsqrt": "Rsqrt", "cbrt": "Cbrt",
    "tanh": "Tanh", "logistic": "Sigmoid", "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos",
    "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "erf": "Erf", "floor": "Floor", "ceil": "Ceil", "sign": "Sign",
    "square": "Sqr",
}  # fmt: skip


@rule(*_UNARY)
def _(e: Emitter, node: FlatEquation, x):
    if x.dtype != FLOAT and node.name == "neg":
        return binary(e, "Sub", np.zeros((), x.dtype), x)
    if x.dtype != FLOAT and node.name == "square":
        return binary(e, "Mul", x, x)
    if x.dtype != FLOAT and node.name == "abs":
        return binary(e, "Mul", x, unary(e, "Sign", x))
    if node.name != "sign":
        need_float(x, node.name)
    if node.name in ("sign", "floor", "ceil") and x.dtype == FLOAT:
        x = unary(e, "StopGradient", x)  # Caffe2 has no gradient of them; JAX's is zero
    return unary(e, _UNARY[node.name], x)


@rule("integer_pow")
def _(e: Emitter, node: FlatEquation, x):
    y = node.params["y"]
    if x.dtype != FLOAT:
        return e.call(
            lambda x: math.prod([x] * y, start=jnp.ones_like(x)), x
        )  # JAX has y >= 0 for integers
    if y in (2, 3, -1):
        return unary(e, {2: "Sqr", 3: "Cube", -1: "Reciprocal"}[y], x)
    even = unary(e, "Pow", unary(e, "Sqr", x), exponent=float(abs(y) // 2))
    power = binary(e, "Mul", even, x) if y % 2 else even
    return unary(e, "Reciprocal", power) if y < 0 else power


@rule("pow")
def _(e: Emitter, node: FlatEquation, x, y):
    need_float(x, "a power")
    if is_static(y) and np.ptp(y) == 0:
        return unary(e, "Pow", x, exponent=float(y.flat[0]))
    return e.op("Pow", [x, e.cast(y, FLOAT)], x.shape, FLOAT)


# Definitions by other primitives ---------------------------------------------------------------------------------------


def _round_to_even(x: Any) -> Any:
    below = jnp.floor(x)
    rest = x - below
    odd = below - 2 * jnp.floor(below * 0.5)
    return below + jnp.where(rest == 0.5, odd, (rest > 0.5).astype(x.dtype))


def _round_from_zero(x: Any) -> Any:
    size = jnp.abs(x)
    below = jnp.floor(size)
    return jnp.sign(x) * (below + (size - below >= 0.5).astype(x.dtype))


_ROUNDED = {
    lax.RoundingMethod.TO_NEAREST_EVEN: _round_to_even,
    lax.RoundingMethod.AWAY_FROM_ZERO: _round_from_zero,
}
rule("round")(lambda e, node, x: e.call(_ROUNDED[node.params["rounding_method"]], x))


def _remainder(a: Any, b: Any) -> Any:
    if a.dtype != FLOAT:
        return a - lax.div(a, b) * b
    rest = a - jnp.trunc(a / b) * b
    # the quotient is rounded: if that moved it across a whole number, the remainder is off by one divisor
    size = jnp.abs(b)
    rest = jnp.where(jnp.abs(rest) >= size, rest - jnp.sign(rest) * size, rest)
    return jnp.where(rest * jnp.sign(a) < 0, rest + jnp.sign(a) * size, rest)


def _atan2(y: Any, x: Any) -> Any:
    """Divides by the larger of the two, so that values and gradients are right where the other is zero."""
    flat = jnp.abs(x) >= jnp.abs(y)
    near_x = jnp.arctan(y / jnp.where(flat & (x != 0), x, 1.0)) + jnp.where(
        x < 0, jnp.where(y < 0, -np.pi, np.pi), 0.0
    )
    near_y = jnp.where(y < 0, -np.pi / 2, np.pi / 2) - jnp.arctan(x / jnp.where(flat, 1.0, y))
    return jnp.where(flat, near_x, near_y)


def _asinh(x: Any) -> Any:
    grown = [
        jnp.log(v + jnp.sqrt(v * v + 1.0))
        for v in (jnp.where(x < 0, 0.0, x), jnp.where(x < 0, -x, 0.0))
    ]
    return jnp.where(x < 0, -grown[1], grown[0])


_DEFINITIONS: dict[str, Callable] = {
    "acosh": lambda x: jnp.log(x + jnp.sqrt(x * x - 1.0)),
    "asinh": _asinh,
    "atan2": _atan2,
    "atanh": lambda x: 0.5 * jnp.log((1.0 + x) / (1.0 - x)),
    "erf_inv": definitions.erf_inv,
    "erfc": lambda x: 1.0 - lax.erf(x),
    "exp2": lambda x: lax.exp(x * math.log(2.0)),
    "expm1": lambda x: lax.exp(x) - 1.0,
    "log1p": lambda x: lax.log(x + 1.0),
    "log2": definitions.log2,
    "one_minus_square": definitions.one_minus_square,
    "polynomial": definitions.polynomial,
    "rem": _remainder,
}


rule(*_DEFINITIONS)(lambda e, node, *xs: e.call(_DEFINITIONS[node.name], *xs))


def _shift_right(x: Any, amount: Any, powers: Any) -> Any:
    for part in (amount // 2, amount - amount // 2):  # 2**31 is no int32, but both halves are
        divisor = powers[part]
        quotient = lax.div(x, divisor)
        x = jnp.where(quotient * divisor > x, quotient - 1, quotient)
    return x


_SHIFTS = {
    "shift_left": lambda x, amount, powers: x * powers[amount],
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": lambda x, amount, powers: (
        _shift_right(x, amount, powers) & (powers[len(powers) - 1 - amount] * 2 - 1)
    ),
}


@rule(*_SHIFTS)
def _(e: Emitter, node: FlatEquation, x, amount):
    if x.dtype == BOOL:
        raise ConversionError(f"{node.name} of booleans: convert to int32 first")
    bits = x.dtype.itemsize * 8
    powers = np.asarray([1 << k for k in range(bits - 1)] + [-(1 << (bits - 1))], x.dtype)
    return e.call(lambda x, amount: _SHIFTS[node.name](x, amount, jnp.asarray(powers)), x, amount)


# Two operands, comparisons, logic --------------------------------------------------------------------------------------

_BINARY = {"add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


@rule(*_BINARY)
def _(e: Emitter, node: FlatEquation, a, b):
    neutral = 0 if _BINARY[node.name] in ("Add", "Sub") else 1
    shape = node.outputs[0].shape
    if is_static(b) and a.shape == shape and (b == neutral).all():
        return a
    if is_static(a) and node.name in ("add", "mul") and b.shape == shape and (a == neutral).all():
        return b
    return binary(e, _BINARY[node.name], a, b)


@rule("max", "min")
def _(e: Emitter, node: FlatEquation, a, b):
    if a.dtype == BOOL:
        return binary(e, "Or" if node.name == "max" else "And", a, b)
    if is_static(a):
        a, b = b, a
    if is_static(b) and b.dtype == FLOAT:
        neutral = -np.inf if node.name == "max" else np.inf
        if (b == neutral).all() and b.ndim <= len(a.shape):
            return a
        if node.name == "max" and (b == 0).all():
            return unary(e, "Relu", a)
    return extreme(e, node.name.capitalize(), a, b)


def extreme(e: Emitter, type: str, a: Value, b: Value) -> Value:
    """Max and Min, which take floats of one shape."""
    if is_static(a, b):
        return np.asarray(_FOLDED[type](a, b))
    shape = np.broadcast_shapes(a.shape, b.shape)
    if a.dtype != FLOAT:
        return where(e, binary(e, "GE" if type == "Max" else "LE", a, b, BOOL), a, b, shape)
    return e.op(type, [spread_to(v, shape) for v in (a, b)], shape, a.dtype)


def spread_to(value: Value, shape: tuple[int, ...]) -> Value:
    """The value with another shape that it broadcasts to."""
    return replace(value, shape=shape) if isinstance(value, Blob) else np.broadcast_to(value, shape)


def where(e: Emitter, which: Value, yes: Value, no: Value, shape: tuple[int, ...]) -> Blob:
    return e.op("Where", [spread_to(v, shape) for v in (which, yes, no)], shape, yes.dtype)


@rule("clamp")
def _(e: Emitter, node: FlatEquation, low, x, high):
    known = is_static(low, high) and all(v.size and np.ptp(v) == 0 for v in (low, high))
    if known and x.dtype == FLOAT:
        return unary(e, "Clip", x, min=float(low.flat[0]), max=float(high.flat[0]))
    return extreme(e, "Min", extreme(e, "Max", x, low), high)


_COMPARISONS = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}
_OF_BOOLEANS = {
    "lt": lambda a, b: ~a & b,
    "le": lambda a, b: ~a | b,
    "gt": lambda a, b: a & ~b,
    "ge": lambda a, b: a | ~b,
}


@rule(*_COMPARISONS)
def _(e: Emitter, node: FlatEquation, a, b):
    if a.dtype == BOOL and node.name == "ne":
        return binary(e, "Xor", a, b)
    if a.dtype == BOOL and node.name in _OF_BOOLEANS:
        return e.call(_OF_BOOLEANS[node.name], a, b)
    return binary(e, _COMPARISONS[node.name], a, b, BOOL)


@rule("and", "or", "xor")
def _(e: Emitter, node: FlatEquation, a, b):
    type = node.name.capitalize()
    return binary(e, type if a.dtype == BOOL else "Bitwise" + type, a, b)


@rule("not")
def _(e: Emitter, node: FlatEquation, x):
    if x.dtype != BOOL:  # two's complement
        return binary(e, "Sub", np.asarray(-1, x.dtype), x)
    return unary(e, "Not", x)


@rule("select_n")
def _(e: Emitter, node: FlatEquation, which, *cases):
    shape = np.broadcast_shapes(which.shape, cases[0].shape)
    if len(cases) == 2:
        return where(
            e, which if which.dtype == BOOL else e.cast(which, BOOL), cases[1], cases[0], shape
        )
    chosen = cases[-1]
    for k in reversed(range(len(cases) - 1)):
        chosen = where(
            e, binary(e, "LE", which, np.asarray(k, which.dtype), BOOL), cases[k], chosen, shape
        )
    return chosen


# Casts and copies ------------------------------------------------------------------------------------------------------


@rule("reduce_precision")
def _(e: Emitter, node: FlatEquation, x):
    p = node.params
    if p["exponent_bits"] < 8 or p["mantissa_bits"] < 23:
        raise ConversionError(
            f"rounding to {p['exponent_bits']} exponent and {p['mantissa_bits']} mantissa bits: Caffe2 only has float32"
        )
    return x


rule("convert_element_type")(lambda e, node, x: e.cast(x, node.outputs[0].dtype))
rule("copy", "name", "optimization_barrier", "device_put", "sharding_constraint")(
    lambda e, node, *xs: xs
)
rule("is_finite")(
    lambda e, node, x: binary(e, "LT", unary(e, "Abs", x), np.asarray(np.inf, FLOAT), BOOL)
)
rule("stop_gradient")(lambda e, node, x: unary(e, "StopGradient", x))
