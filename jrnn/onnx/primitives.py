"""Rules for primitives of JAX as nodes of ONNX, except primitives that hold jaxprs.

Where ONNX has no operator, a primitive is defined by other primitives, which are traced and written. Most definitions are in
the table of primitives (`jaxprs/primitives/definitions.py`).
"""

import string
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.jaxprs.primitives import definitions
from jrnn.jaxprs.queries import is_floating
from jrnn.onnx.emit import GraphEmitter, Value, ints, is_static, known, rule
from jrnn.onnx.places import filling, gathered

_UNARY = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "logistic": "Sigmoid",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "floor": "Floor", "ceil": "Ceil",
    "sign": "Sign", "not": "Not",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max", "min": "Min", "add_any": "Add",
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal",
    "and": "And", "or": "Or", "xor": "Xor",
}  # fmt: skip


def same(
    e: GraphEmitter,
    node: FlatEquation,
    type: str,
    *inputs: Value,
    **attributes: Any,
) -> Value:
    """A node of the type and shape of the equation's output."""
    return e.op(type, inputs, node.shape, node.dtype, **attributes)


def _bitwise(e: GraphEmitter, node: FlatEquation, x: Value) -> str:
    """The operator of booleans, or of the bits of integers."""
    type = {**_UNARY, **_BINARY}[node.name]
    if x.dtype == bool:
        return type
    if e.root.opset < 18:
        raise ConversionError("the bits of integers need the operator set 18")
    return f"Bitwise{type}"


@rule(*_UNARY)
def _(e, node, x):
    return same(e, node, _bitwise(e, node, x) if node.name == "not" else _UNARY[node.name], x)


@rule(*_BINARY)
def _(e, node, a, b):
    if node.name in ("and", "or", "xor"):
        return same(e, node, _bitwise(e, node, a), a, b)
    if a.dtype == bool and node.name in ("lt", "le", "gt", "ge", "max", "min", "add", "mul"):
        a = e.cast(a, np.int32)
        b = e.cast(b, np.int32)
        return e.cast(e.op(_BINARY[node.name], [a, b], node.shape, np.int32), node.dtype)
    return same(e, node, _BINARY[node.name], a, b)


_IN_ORDER = {"lt_to": "Less", "le_to": "LessOrEqual", "eq_to": "Equal"}


@rule(*_IN_ORDER)
def _(e, node, a, b):
    """Comparisons in the order of `sort`, as `jnp.searchsorted` makes them: NaN is above all other numbers, and equals NaN.

    JAX has removed the signs of zeros and of NaN before; in this order they would count.
    """
    if a.dtype == bool:
        a = e.cast(a, np.int32)
        b = e.cast(b, np.int32)
    compared = same(e, node, _IN_ORDER[node.name], a, b)
    if not is_floating(a):
        return compared
    a_is_nan, last = (e.op("IsNaN", [x], x.shape, bool) for x in (a, b))
    if node.name != "le_to":
        last = same(
            e,
            node,
            "And",
            a_is_nan if node.name == "eq_to" else e.op("Not", [a_is_nan], a.shape, bool),
            last,
        )
    return same(e, node, "Or", compared, last)


# Of `op(type, *inputs)`, which makes a node of the type and shape of the equation's output.
_DEFINED: dict[str, Callable] = {
    "clamp": lambda op, low, x, high: op("Min", op("Max", x, low), high),
    "exp2": lambda op, x: op("Pow", np.asarray(2, x.dtype), x),
    "expm1": lambda op, x: op("Sub", op("Exp", x), np.ones((), x.dtype)),
    "is_finite": lambda op, x: op("Not", op("Or", op("IsNaN", x), op("IsInf", x))),
    "log1p": lambda op, x: op("Log", op("Add", x, np.ones((), x.dtype))),
    "ne": lambda op, a, b: op("Not", op("Equal", a, b)),
    "rem": lambda op, a, b: op("Mod", a, b, fmod=1),
    "rsqrt": lambda op, x: op("Reciprocal", op("Sqrt", x)),
    "square": lambda op, x: op("Mul", x, x),
}


@rule(*_DEFINED)
def _(e, node, *values):
    return _DEFINED[node.name](partial(same, e, node), *values)


@rule("shift_left", "shift_right_arithmetic", "shift_right_logical")
def shift_rule(e, node, x, by):
    """By a power of two in 64 bits: ONNX shifts unsigned integers only."""
    if x.dtype.itemsize > 4:
        raise ConversionError("shifts of 64-bit integers are not supported")
    bits = 8 * x.dtype.itemsize
    shape = node.shape

    def op(type: str, *inputs: Value, **attributes: Any) -> Value:
        return e.op(type, inputs, shape, np.int64, **attributes)

    def number(value: int) -> np.ndarray:
        return np.asarray(value, np.int64)

    unsigned = np.dtype(f"uint{bits}")
    by = e.cast(e.cast(by, unsigned), np.int64)  # a negative number is a large one
    powers = np.left_shift(number(1), np.arange(bits + 1))
    by = e.clip(by, number(0), number(bits))
    if known(by):
        factor = powers[by]
    else:
        factor = e.op("Gather", [powers, by], by.shape, np.int64, axis=0)
    if node.name == "shift_left":
        return e.cast(e.cast(op("Mul", e.cast(x, np.int64), factor), unsigned), x.dtype)
    wide = e.cast(e.cast(x, unsigned) if node.name == "shift_right_logical" else x, np.int64)
    # of the sign of the divisor, so that the quotient is rounded down
    rest = op("Mod", wide, factor)
    return e.cast(e.cast(op("Div", op("Sub", wide, rest), factor), unsigned), x.dtype)


@rule("tile")
def _(e, node, x):
    return same(e, node, "Tile", x, e.sizes(node.params["reps"]))


@rule("integer_pow")
def _(e, node, x):
    y = node.params["y"]
    if y == 2:
        return same(e, node, "Mul", x, x)
    return same(e, node, "Pow", x, np.asarray(y, x.dtype))


@rule("round")
def _(e, node, x):
    if node.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise ConversionError("only rounding to even is supported")
    return same(e, node, "Round", x)


@rule("select_n")
def _(e, node, which, *cases):
    dtype = node.dtype
    shape = node.shape
    # onnxruntime has no Where of booleans
    if np.issubdtype(dtype, np.bool_):
        kept = np.dtype(np.int32)
    else:
        kept = dtype
    chosen, *others = (e.cast(case, kept) for case in cases)
    for k, case in enumerate(others, 1):
        if which.dtype == bool:
            later = which
        else:
            later = e.op("Less", [np.asarray(k - 1, which.dtype), which], which.shape, bool)
        chosen = e.op("Where", [later, case, chosen], shape, kept)
    return e.cast(chosen, dtype)


# Shapes and types


@rule("concatenate")
def _(e, node, *values):
    return e.concat(values, node.params["dimension"])


@rule("convert_element_type")
def _(e, node, x):
    return e.cast(x, node.dtype)


@rule("copy", "name", "optimization_barrier", "reduce_precision", "stop_gradient")
def _(e, node, *xs):
    return xs


@rule("dim_as_value")
def _(e, node):
    return e.cast(e.size(node.params["dim"]), node.dtype)


@rule("reshape")
def _(e, node, x, *_):
    return e.reshape(x, node.shape)


@rule("squeeze")
def _(e, node, x):
    return same(e, node, "Squeeze", x, ints(*node.params["dimensions"]))


@rule("stack")
def _(e, node, *values):
    return e.stack(values, node.params["axis"])


@rule("transpose")
def _(e, node, x):
    return e.transpose(x, node.params["permutation"])


@rule("broadcast_in_dim")
def _(e, node, x, *_):
    shape = node.params["shape"]
    kept = node.params["broadcast_dimensions"]
    row = [1] * len(shape)
    for k, axis in enumerate(kept):
        row[axis] = x.shape[k]
    return e.expand(e.reshape(x, row), shape)


@rule("split")
def _(e, node, x):
    types = [(v.shape, v.dtype) for v in node.outputs]
    return e.ops("Split", [x, e.sizes(node.params["sizes"])], types, axis=node.params["axis"])


@rule("slice")
def _(e, node, x):
    starts = node.params["start_indices"]
    ends = node.params["limit_indices"]
    steps = node.params["strides"] or (1,) * len(x.shape)
    axes = []
    slices = []
    for k, piece in enumerate(zip(starts, ends, steps, strict=True)):
        if piece != (0, x.shape[k], 1):
            axes.append(k)
            slices.append(piece)
    starts, ends, steps = map(e.sizes, zip(*slices) if slices else ((), (), ()))
    return same(e, node, "Slice", x, starts, ends, ints(*axes), steps)


@rule("rev")
def _(e, node, x):
    return e.flip(x, node.params["dimensions"])


@rule("iota")
def _(e, node):
    shape = node.params["shape"]
    axis = node.params["dimension"]
    zero = np.zeros((), np.int64)
    one = np.ones((), np.int64)
    numbers = e.cast(
        e.op("Range", [zero, e.size(shape[axis]), one], (shape[axis],), np.int64),
        np.dtype(node.params["dtype"]),
    )
    row: list[Any] = [1] * len(shape)
    row[axis] = shape[axis]
    return e.expand(e.reshape(numbers, row), shape)


def _starts(e: GraphEmitter, x: Value, starts, sizes) -> Value:
    """The start of a window of `sizes`, clipped so that the window is inside x, as an int64 vector."""
    zero = np.zeros((), np.int64)
    places = []
    for start, size, whole in zip(starts, sizes, x.shape, strict=True):
        places.append(e.clip(e.cast(start, np.int64), zero, e.size(whole - size)))
    return e.stack(places, 0)


@rule("dynamic_slice")
def _(e, node, x, *starts):
    sizes = node.params["slice_sizes"]
    first = _starts(e, x, starts[: len(sizes)], sizes)
    ends = e.op("Add", [first, e.sizes(sizes)], (len(sizes),), np.int64)
    return same(e, node, "Slice", x, first, ends)


@rule("dynamic_update_slice")
def _(
    e,
    node,
    x,
    update,
    *starts,
):
    if not is_static(update.shape):
        raise ConversionError("an update of an open size is not supported")
    first = _starts(e, x, starts, update.shape)
    grid = np.stack(np.meshgrid(*map(np.arange, update.shape), indexing="ij"), -1).astype(np.int64)
    return same(e, node, "ScatterND", x, e.op("Add", [grid, first], grid.shape, np.int64), update)


@rule("gather")
def _(e, node, x, indices):
    """Whole rows along one axis, as in `x[indices]` and `jnp.take`, are one Gather of them."""
    d = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    mode = node.params["mode"]
    if len(d.start_index_map) == 1:
        axis = d.start_index_map[0]
    else:
        axis = len(x.shape)
    rows = all(n == (1 if k == axis else x.shape[k]) for k, n in enumerate(sizes))
    rank = len(indices.shape) - 1
    offsets = tuple(k for k in range(len(x.shape) - 1 + rank) if not axis <= k < axis + rank)
    if d.collapsed_slice_dims != (axis,) or not rows or tuple(d.offset_dims) != offsets:
        return gathered(e, node, x, indices)
    shape = node.shape
    dtype = indices.dtype
    indices = e.reshape(indices, indices.shape[:-1])
    inside = e.clip(indices, np.zeros((), dtype), e.cast(e.size(x.shape[axis] - 1), dtype))
    picked = e.op("Gather", [x, inside], shape, x.dtype, axis=axis)
    if mode != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return picked
    if known(inside, indices) and (inside == indices).all():
        return picked
    right = e.op("Equal", [inside, indices], indices.shape, np.bool_)
    right = e.reshape(right, [*indices.shape, *[1] * (len(shape) - axis - rank)])
    return e.op("Where", [right, picked, np.asarray(filling(node, x), x.dtype)], shape, x.dtype)


# Reductions and products


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def _(e, node, x):
    axes = node.params["axes"]
    dtype = x.dtype
    type = {"sum": "Sum", "max": "Max", "min": "Min", "prod": "Prod", "and": "Min", "or": "Max"}[
        node.name[7:]
    ]
    if np.issubdtype(dtype, np.bool_):
        x = e.cast(x, np.int32)
    if type == "Sum" or e.root.opset >= 18:
        reduced = e.op(f"Reduce{type}", [x, ints(*axes)], node.shape, x.dtype, keepdims=0)
    else:
        reduced = e.op(f"Reduce{type}", [x], node.shape, x.dtype, keepdims=0, axes=list(axes))
    return e.cast(reduced, dtype)


@rule("argmax", "argmin")
def _(e, node, x):
    type = {"argmax": "ArgMax", "argmin": "ArgMin"}[node.name]
    place = e.op(type, [x], node.shape, np.int64, axis=node.params["axes"][0], keepdims=0)
    return e.cast(place, node.dtype)


@rule("cumsum")
def _(e, node, x):
    axis = np.asarray(node.params["axis"], np.int64)
    return same(e, node, "CumSum", x, axis, reverse=int(node.params["reverse"]))


@rule("dot_general")
def _(e, node, a, b):
    (over_a, over_b), (batch_a, batch_b) = node.params["dimension_numbers"]
    dtype = node.dtype
    shape = node.shape
    a = e.cast(a, dtype)
    b = e.cast(b, dtype)
    if (
        not batch_a
        and over_a == (len(a.shape) - 1,)
        and len(b.shape) == 2
        and len(over_b) == 1
        and len(a.shape) > 1
    ):
        return e.op("MatMul", [a, e.transpose(b, (over_b[0], 1 - over_b[0]))], shape, dtype)
    names_a = list(string.ascii_lowercase[: len(a.shape)])
    names_b = list(string.ascii_lowercase[len(a.shape) :][: len(b.shape)])
    for k, j in (*zip(batch_a, batch_b), *zip(over_a, over_b)):
        names_b[j] = names_a[k]
    kept = [names_a[k] for k in batch_a]
    kept += [n for k, n in enumerate(names_a) if k not in (*batch_a, *over_a)]
    kept += [n for k, n in enumerate(names_b) if k not in (*batch_b, *over_b)]
    equation = f"{''.join(names_a)},{''.join(names_b)}->{''.join(kept)}"
    return e.op("Einsum", [a, b], shape, dtype, equation=equation)


def _is_negative(x: Any) -> Any:
    """True for -0.0, too."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _atan2(y: Any, x: Any) -> Any:
    """Divides by the larger of the two, so that the quotient is at most 1. Zeros have signs; infinities are equal."""
    rise = jnp.abs(y)
    run = jnp.abs(x)
    is_steep = rise > run
    small = jnp.where(is_steep, run, rise)
    large = jnp.where(is_steep, rise, run)
    both = (small == large) & (large > 0)
    angle = jnp.arctan(jnp.where(both, 1, small / jnp.where(large == 0, 1, large)))
    angle = jnp.where(is_steep, np.pi / 2 - angle, angle)
    angle = jnp.where(_is_negative(x), np.pi - angle, angle)
    return jnp.where(_is_negative(y), -angle, angle)


def _erf_inv(x: Any) -> Any:
    if x.dtype == np.float64:
        raise ConversionError("the inverse of erf is supported in float32, float16 and bfloat16")
    return definitions.erf_inv(x)


_DEFINITIONS: dict[str, Callable] = {
    "atan2": _atan2,
    "cbrt": lambda x: jnp.sign(x) * jnp.abs(x) ** (1 / 3),
    "erf_inv": _erf_inv,
    "erfc": lambda x: 1 - jax.lax.erf(x),
}


@rule(*_DEFINITIONS)
def _(e: GraphEmitter, node: FlatEquation, *xs: Value):
    return e.defined(_DEFINITIONS[node.name], node, *xs)
