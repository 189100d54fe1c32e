"""Rules for primitives that work element by element: arithmetic, functions, comparisons, logic, choosing, casts.

Where Caffe2 has no operator for a primitive, its definition is a JAX function, which is traced and converted. Most
definitions are in the table of primitives (`jaxprs/primitives/definitions.py`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emitter import BOOL, FLOAT, Blob, Emitter, Value, rule
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.jaxprs.primitives import definitions
from jrnn.nets.ir import Shape

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
    if dtype is None:
        dtype = a.dtype
    out = e.op(type, [a.name, b.name], np.broadcast_shapes(a.own_shape, b.own_shape), dtype)
    return replace(out, shape=np.broadcast_shapes(a.shape, b.shape))


def unary(e: Emitter, type: str, x: Blob, **args: Any) -> Blob:
    """An operator of one blob, element by element."""
    out = e.op(type, [x.name], x.own_shape, x.dtype, **args)
    return replace(out, shape=x.shape)


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
        return e.call(partial(_integer_power, y), x)
    if y in (2, 3, -1):
        return unary(e, {2: "Sqr", 3: "Cube", -1: "Reciprocal"}[y], x)
    even = unary(e, "Pow", unary(e, "Sqr", x), exponent=float(abs(y) // 2))
    power = binary(e, "Mul", even, x) if y % 2 else even
    return unary(e, "Reciprocal", power) if y < 0 else power


def _integer_power(y, x):
    """x to the y of integers, for which JAX has y >= 0."""
    return math.prod([x] * y, start=jnp.ones_like(x))


@rule("pow")
def _(e: Emitter, node: FlatEquation, x, y):
    need_float(x, "a power")
    if is_static(y) and np.ptp(y) == 0:
        return unary(e, "Pow", x, exponent=float(y.flat[0]))
    return e.op("Pow", [x, e.cast(y, FLOAT)], x.shape, FLOAT)


# Definitions by other primitives ---------------------------------------------------------------------------------------


def _round_to_even(x):
    below = jnp.floor(x)
    rest = x - below
    odd = below - 2 * jnp.floor(below * 0.5)
    return below + jnp.where(rest == 0.5, odd, (rest > 0.5).astype(x.dtype))


def _round_from_zero(x):
    size = jnp.abs(x)
    below = jnp.floor(size)
    return jnp.sign(x) * (below + (size - below >= 0.5).astype(x.dtype))


_ROUNDED = {
    lax.RoundingMethod.TO_NEAREST_EVEN: _round_to_even,
    lax.RoundingMethod.AWAY_FROM_ZERO: _round_from_zero,
}


@rule("round")
def _(e: Emitter, node: FlatEquation, x):
    return e.call(_ROUNDED[node.params["rounding_method"]], x)


def _remainder(a, b):
    if a.dtype != FLOAT:
        return a - lax.div(a, b) * b
    rest = a - jnp.trunc(a / b) * b
    # the quotient is rounded: if that moved it across a whole number, the remainder is off by one divisor
    size = jnp.abs(b)
    rest = jnp.where(jnp.abs(rest) >= size, rest - jnp.sign(rest) * size, rest)
    return jnp.where(rest * jnp.sign(a) < 0, rest + jnp.sign(a) * size, rest)


def _atan2(y, x):
    """Divides by the larger of the two, so that values and gradients are right where the other is zero."""
    flat = jnp.abs(x) >= jnp.abs(y)
    slope = y / jnp.where(flat & (x != 0), x, 1.0)
    near_x = jnp.arctan(slope)
    near_x += jnp.where(x < 0, jnp.where(y < 0, -np.pi, np.pi), 0.0)
    near_y = jnp.where(y < 0, -np.pi / 2, np.pi / 2) - jnp.arctan(x / jnp.where(flat, 1.0, y))
    return jnp.where(flat, near_x, near_y)


def _asinh(x):
    def of_positive(size):
        return jnp.log(size + jnp.sqrt(size * size + 1.0))

    above = jnp.where(x < 0, 0.0, x)
    below = jnp.where(x < 0, -x, 0.0)
    of_above = of_positive(above)
    of_below = of_positive(below)
    return jnp.where(x < 0, -of_below, of_above)


def _acosh(x):
    return jnp.log(x + jnp.sqrt(x * x - 1.0))


def _atanh(x):
    return 0.5 * jnp.log((1.0 + x) / (1.0 - x))


def _erfc(x):
    return 1.0 - lax.erf(x)


def _expm1(x):
    return lax.exp(x) - 1.0


def _log1p(x):
    return lax.log(x + 1.0)


_DEFINITIONS: dict[str, Callable] = {
    "acosh": _acosh,
    "asinh": _asinh,
    "atan2": _atan2,
    "atanh": _atanh,
    "erf_inv": definitions.erf_inv,
    "erfc": _erfc,
    "expm1": _expm1,
    "log1p": _log1p,
    "rem": _remainder,
}


@rule(*_DEFINITIONS)
def _(e: Emitter, node: FlatEquation, *xs):
    return e.call(_DEFINITIONS[node.name], *xs)


def _shift_left(x, amount, powers):
    return x * powers[amount]


def _shift_right(x, amount, powers):
    """Divides and rounds down, in two parts: 2**31 is no int32, but both halves are."""
    for part in (amount // 2, amount - amount // 2):
        divisor = powers[part]
        quotient = lax.div(x, divisor)
        x = jnp.where(quotient * divisor > x, quotient - 1, quotient)
    return x


def _shift_right_logical(x, amount, powers):
    """Shifts zeros in, which clears the copies of the sign."""
    shifted = _shift_right(x, amount, powers)
    return shifted & (powers[len(powers) - 1 - amount] * 2 - 1)


_SHIFTS = {
    "shift_left": _shift_left,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right_logical,
}


@rule(*_SHIFTS)
def _(e: Emitter, node: FlatEquation, x, amount):
    if x.dtype == BOOL:
        raise ConversionError(f"{node.name} of booleans: convert to int32 first")
    bits = x.dtype.itemsize * 8
    powers = np.asarray([1 << k for k in range(bits - 1)] + [-(1 << (bits - 1))], x.dtype)

    def shift(x, amount):
        return _SHIFTS[node.name](x, amount, jnp.asarray(powers))

    return e.call(shift, x, amount)


# Two operands, comparisons, logic --------------------------------------------------------------------------------------

_BINARY = {"add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


@rule(*_BINARY)
def _(e: Emitter, node: FlatEquation, a, b):
    neutral = 0 if _BINARY[node.name] in ("Add", "Sub") else 1
    shape = node.shape
    if is_static(b) and a.shape == shape and (b == neutral).all():
        return a
    if is_static(a) and node.name in ("add", "mul") and b.shape == shape and (a == neutral).all():
        return b
    return binary(e, _BINARY[node.name], a, b)


@rule("max", "min")
def _(e: Emitter, node: FlatEquation, a, b):
    if a.dtype == BOOL:
        type = "Or" if node.name == "max" else "And"
        return binary(e, type, a, b)
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
        is_first = binary(e, "GE" if type == "Max" else "LE", a, b, BOOL)
        return where(e, is_first, a, b, shape)
    return e.op(type, [spread_to(v, shape) for v in (a, b)], shape, a.dtype)


def spread_to(value: Value, shape: Shape) -> Value:
    """The value with another shape that it broadcasts to."""
    if isinstance(value, Blob):
        return replace(value, shape=shape)
    return np.broadcast_to(value, shape)


def where(e: Emitter, which: Value, yes: Value, no: Value, shape: Shape) -> Blob:
    """The elements of `yes` where `which` is true, else the elements of `no`, broadcast to one shape."""
    return e.op("Where", [spread_to(v, shape) for v in (which, yes, no)], shape, yes.dtype)


def _is_one_number(value: Value) -> bool:
    """Whether all elements of a value are the same known number."""
    return bool(is_static(value) and value.size and np.ptp(value) == 0)


@rule("clamp")
def _(e: Emitter, node: FlatEquation, low, x, high):
    if x.dtype == FLOAT and _is_one_number(low) and _is_one_number(high):
        return unary(e, "Clip", x, min=float(low.flat[0]), max=float(high.flat[0]))
    return extreme(e, "Min", extreme(e, "Max", x, low), high)


_COMPARISONS = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}


@rule(*_COMPARISONS)
def _(e: Emitter, node: FlatEquation, a, b):
    if a.dtype == BOOL and node.name == "ne":
        return binary(e, "Xor", a, b)
    if a.dtype == BOOL and node.name != "eq":
        return e.call(partial(_compared_booleans, node.name), a, b)
    return binary(e, _COMPARISONS[node.name], a, b, BOOL)


def _compared_booleans(name, a, b):
    """The comparison lt, le, gt or ge of booleans, which Caffe2 does not compare: False < True."""
    if name[0] == "l":
        a = ~a
    else:
        b = ~b
    return a & b if name[1] == "t" else a | b


@rule("and", "or", "xor")
def _(e: Emitter, node: FlatEquation, a, b):
    type = node.name.capitalize()
    if a.dtype != BOOL:
        type = "Bitwise" + type
    return binary(e, type, a, b)


@rule("not")
def _(e: Emitter, node: FlatEquation, x):
    if x.dtype != BOOL:  # two's complement
        return binary(e, "Sub", np.asarray(-1, x.dtype), x)
    return unary(e, "Not", x)


@rule("select_n")
def _(e: Emitter, node: FlatEquation, which, *cases):
    shape = np.broadcast_shapes(which.shape, cases[0].shape)
    if len(cases) == 2:
        if which.dtype != BOOL:
            which = e.cast(which, BOOL)
        return where(e, which, cases[1], cases[0], shape)
    chosen = cases[-1]
    for k in reversed(range(len(cases) - 1)):
        is_case = binary(e, "LE", which, np.asarray(k, which.dtype), BOOL)
        chosen = where(e, is_case, cases[k], chosen, shape)
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


@rule("convert_element_type")
def _(e: Emitter, node: FlatEquation, x):
    return e.cast(x, node.dtype)


@rule("copy", "name", "optimization_barrier", "device_put", "sharding_constraint")
def _(e: Emitter, node: FlatEquation, *xs):
    return xs


@rule("is_finite")
def _(e: Emitter, node: FlatEquation, x):
    return binary(e, "LT", unary(e, "Abs", x), np.asarray(np.inf, FLOAT), BOOL)


@rule("stop_gradient")
def _(e: Emitter, node: FlatEquation, x):
    return unary(e, "StopGradient", x)
