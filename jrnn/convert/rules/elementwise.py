"""Rules for primitives that work element by element: arithmetic, functions, comparisons, logic, choosing, casts."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.convert.emit import BOOL, FLOAT, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError


def binary(e: Emitter, type: str, a: Value, b: Value, dtype: Any = None) -> Blob:
    """An operator that broadcasts, on operands that may still have to be spread."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    a, b = e.loose(a), e.loose(b)
    made = e.op(type, [a, b], np.broadcast_shapes(a.held, b.held), a.dtype if dtype is None else dtype)
    return replace(made, shape=shape)


def unary(e: Emitter, type: str, x: Blob, dtype: Any = None, **args: Any) -> Blob:
    made = e.op(type, [x], x.held, x.dtype if dtype is None else dtype, **args)
    return replace(made, shape=x.shape)


def need_float(x: Value, what: str) -> None:
    if x.dtype != FLOAT:
        raise ConversionError(f"{what} of {x.dtype}: Caffe2 has it for float32 alone; convert to float32 before")


_UNARY = {
    "neg": "Negative", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "rsqrt": "Rsqrt", "cbrt": "Cbrt",
    "tanh": "Tanh", "logistic": "Sigmoid", "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos",
    "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "erf": "Erf", "floor": "Floor", "ceil": "Ceil", "sign": "Sign",
    "square": "Sqr",
}  # fmt: skip


@rule(*_UNARY)
def _(e: Emitter, node: Node, x):
    if x.dtype != FLOAT and node.name == "neg":
        return binary(e, "Sub", np.zeros((), x.dtype), x)
    if x.dtype != FLOAT and node.name == "square":
        return binary(e, "Mul", x, x)
    if node.name == "abs" and x.dtype != FLOAT:
        return binary(e, "Mul", x, unary(e, "Sign", x))
    if node.name != "sign":
        need_float(x, node.name)
    return unary(e, _UNARY[node.name], x)


@rule("integer_pow")
def _(e: Emitter, node: Node, x):
    y = node.params["y"]
    if x.dtype != FLOAT:
        return e.call(lambda x: math.prod([x] * y, start=jnp.ones_like(x)), x)  # JAX has y >= 0 for integers
    if y in (2, 3, -1):
        return unary(e, {2: "Sqr", 3: "Cube", -1: "Reciprocal"}[y], x)
    odd, even = abs(y) % 2, unary(e, "Pow", unary(e, "Sqr", x), exponent=float(abs(y) // 2))
    found = binary(e, "Mul", even, x) if odd else even
    return unary(e, "Reciprocal", found) if y < 0 else found


@rule("pow")
def _(e: Emitter, node: Node, x, y):
    need_float(x, "a power")
    if isinstance(y, np.ndarray) and isinstance(x, Blob) and np.ptp(y) == 0:
        return unary(e, "Pow", x, exponent=float(y.flat[0]))
    return e.op("Pow", [e.blob(x), e.cast(e.blob(y), FLOAT)], x.shape, FLOAT)


@rule("log1p")
def _(e: Emitter, node: Node, x):
    return unary(e, "Log", binary(e, "Add", x, np.ones((), FLOAT)))


@rule("erfc")
def _(e: Emitter, node: Node, x):
    return binary(e, "Sub", np.ones((), FLOAT), unary(e, "Erf", x))


@rule("expm1")
def _(e: Emitter, node: Node, x):
    return binary(e, "Sub", unary(e, "Exp", x), np.ones((), FLOAT))


@rule("exp2")
def _(e: Emitter, node: Node, x):
    return unary(e, "Exp", binary(e, "Mul", x, np.float32(math.log(2.0)).reshape(())))


@rule("is_finite")
def _(e: Emitter, node: Node, x):
    return binary(e, "LT", unary(e, "Abs", x), np.asarray(np.inf, FLOAT), BOOL)


_BINARY = {"add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


@rule(*_BINARY)
def _(e: Emitter, node: Node, a, b):
    neutral = 0 if node.name in ("add", "add_any", "sub") else 1
    if isinstance(b, np.ndarray) and a.shape == node.outputs[0].shape and (b == neutral).all():
        return a
    if (
        isinstance(a, np.ndarray)
        and node.name in ("add", "mul")
        and b.shape == node.outputs[0].shape
        and (a == neutral).all()
    ):
        return b
    return binary(e, _BINARY[node.name], a, b)


@rule("max", "min")
def _(e: Emitter, node: Node, a, b):
    if a.dtype == BOOL:
        return binary(e, "Or" if node.name == "max" else "And", a, b)
    if isinstance(a, np.ndarray):
        a, b = b, a
    neutral = -np.inf if node.name == "max" else np.inf
    if isinstance(b, np.ndarray) and b.dtype == FLOAT and (b == neutral).all() and b.ndim <= len(a.shape):
        return a
    if node.name == "max" and isinstance(b, np.ndarray) and b.dtype == FLOAT and (b == 0).all():
        return unary(e, "Relu", a)
    return extreme(e, "Max" if node.name == "max" else "Min", a, b)


def extreme(e: Emitter, type: str, a: Value, b: Value) -> Blob:
    """Max and Min, which take floats of one shape."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    if a.dtype != FLOAT:
        first = binary(e, "GE" if type == "Max" else "LE", a, b, BOOL)
        return e.op("Where", [e.blob(spread_to(v, shape)) for v in (first, a, b)], shape, a.dtype)
    a, b = (e.blob(spread_to(v, shape)) for v in (a, b))
    return e.op(type, [a, b], shape, a.dtype)


def spread_to(value: Value, shape: tuple[int, ...]) -> Value:
    """The value with another shape that it broadcasts to."""
    return replace(value, shape=shape) if isinstance(value, Blob) else np.broadcast_to(value, shape)


@rule("clamp")
def _(e: Emitter, node: Node, low, x, high):
    known = all(isinstance(v, np.ndarray) and v.size and np.ptp(v) == 0 for v in (low, high))
    if known and x.dtype == FLOAT:
        return unary(e, "Clip", x, min=float(low.flat[0]), max=float(high.flat[0]))
    return extreme(e, "Min", extreme(e, "Max", x, low), high)


_COMPARISONS = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}


@rule(*_COMPARISONS)
def _(e: Emitter, node: Node, a, b):
    if a.dtype == BOOL and node.name == "ne":
        return binary(e, "Xor", a, b)
    if a.dtype == BOOL and node.name != "eq":
        return e.call(_OF_BOOLEANS[node.name], a, b)
    return binary(e, _COMPARISONS[node.name], a, b, BOOL)


_OF_BOOLEANS = {
    "lt": lambda a, b: ~a & b,
    "le": lambda a, b: ~a | b,
    "gt": lambda a, b: a & ~b,
    "ge": lambda a, b: a | ~b,
}


@rule("and", "or", "xor")
def _(e: Emitter, node: Node, a, b):
    type = node.name.capitalize()
    return binary(e, type if a.dtype == BOOL else "Bitwise" + type, a, b)


@rule("not")
def _(e: Emitter, node: Node, x):
    if x.dtype != BOOL:  # two's complement
        return binary(e, "Sub", np.asarray(-1, x.dtype), x)
    return unary(e, "Not", x)


@rule("select_n")
def _(e: Emitter, node: Node, which, *cases):
    shape = np.broadcast_shapes(which.shape, cases[0].shape)
    found = cases[-1]
    if len(cases) > 2:
        for k in reversed(range(len(cases) - 1)):
            here = binary(e, "LE", which, np.asarray(k, which.dtype), BOOL)
            found = _where(e, here, cases[k], found, shape)
        return found
    if which.dtype != BOOL:
        which = e.cast(which, BOOL)
    return _where(e, which, found, cases[0], shape)


def _where(e: Emitter, which: Value, yes: Value, no: Value, shape: tuple[int, ...]) -> Blob:
    inputs = [e.blob(spread_to(v, shape)) for v in (which, yes, no)]
    return e.op("Where", inputs, shape, yes.dtype)


@rule("convert_element_type")
def _(e: Emitter, node: Node, x):
    return e.cast(x, node.outputs[0].dtype)


@rule("stop_gradient")
def _(e: Emitter, node: Node, x):
    return unary(e, "StopGradient", x)


@rule("reduce_precision")
def _(e: Emitter, node: Node, x):
    p = node.params
    if p["exponent_bits"] < 8 or p["mantissa_bits"] < 23:
        raise ConversionError(
            f"rounds to {p['exponent_bits']} bits of exponent and {p['mantissa_bits']} of mantissa: Caffe2 has float32 alone"
        )
    return x


@rule("copy", "name", "optimization_barrier", "device_put", "sharding_constraint")
def _(e: Emitter, node: Node, *xs):
    return xs if len(xs) > 1 else xs[0]
