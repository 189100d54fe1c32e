"""Primitives of JAX as nodes of ONNX: all but those that hold jaxprs."""

import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.flat import Node
from jrnn.errors import ConversionError
from jrnn.onnx.emit import Emitter, Value, is_static, known, rule

_UNARY = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "logistic": "Sigmoid",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "floor": "Floor", "ceil": "Ceil",
    "sign": "Sign", "not": "Not", "copy": "Identity", "copy_p": "Identity", "stop_gradient": "Identity",
    "optimization_barrier": "Identity", "reduce_precision": "Identity", "name": "Identity",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max", "min": "Min", "add_any": "Add",
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal",
    "and": "And", "or": "Or", "xor": "Xor",
}  # fmt: skip


def same(e: Emitter, node: Node, type: str, *inputs: Value, **attributes: Any) -> Value:
    """A node of the type and shape of the equation's output."""
    return e.op(type, inputs, node.outputs[0].shape, node.outputs[0].dtype, **attributes)


@rule(*_UNARY)
def _(e, node, *values):
    if node.name == "not" and node.outputs[0].dtype != bool:
        raise ConversionError("bits of integers are not written")
    found = tuple(
        v if _UNARY[node.name] == "Identity" else e.op(_UNARY[node.name], [v], v.shape, v.dtype) for v in values
    )
    return found


@rule(*_BINARY)
def _(e, node, a, b):
    if node.name in ("and", "or", "xor") and a.dtype != bool:
        raise ConversionError("bits of integers are not written")
    if a.dtype == bool and node.name in ("lt", "le", "gt", "ge", "max", "min", "add", "mul"):
        a, b = e.cast(a, np.int32), e.cast(b, np.int32)
        return e.cast(e.op(_BINARY[node.name], [a, b], node.outputs[0].shape, np.int32), node.outputs[0].dtype)
    return same(e, node, _BINARY[node.name], a, b)


@rule("ne")
def _(e, node, a, b):
    return same(e, node, "Not", same(e, node, "Equal", a, b))


@rule("rem")
def _(e, node, a, b):
    return same(e, node, "Mod", a, b, fmod=1)


@rule("square")
def _(e, node, x):
    return same(e, node, "Mul", x, x)


@rule("integer_pow")
def _(e, node, x):
    y = node.params["y"]
    return same(e, node, "Mul", x, x) if y == 2 else same(e, node, "Pow", x, np.asarray(y, x.dtype))


@rule("rsqrt")
def _(e, node, x):
    return same(e, node, "Reciprocal", same(e, node, "Sqrt", x))


@rule("log1p")
def _(e, node, x):
    return same(e, node, "Log", same(e, node, "Add", x, np.ones((), x.dtype)))


@rule("expm1")
def _(e, node, x):
    return same(e, node, "Sub", same(e, node, "Exp", x), np.ones((), x.dtype))


@rule("exp2")
def _(e, node, x):
    return same(e, node, "Pow", np.asarray(2, x.dtype), x)


@rule("round")
def _(e, node, x):
    if int(node.params["rounding_method"]) != 1:  # to even
        raise ConversionError("only rounding to even is written")
    return same(e, node, "Round", x)


@rule("clamp")
def _(e, node, low, x, high):
    return same(e, node, "Min", same(e, node, "Max", x, low), high)


@rule("is_finite")
def _(e, node, x):
    return same(e, node, "Not", same(e, node, "Or", same(e, node, "IsNaN", x), same(e, node, "IsInf", x)))


@rule("select_n")
def _(e, node, which, *cases):
    if which.dtype != bool or len(cases) != 2:
        raise ConversionError("choices among more than two values are not written")
    if cases[0].dtype == bool:  # onnxruntime has no Where of booleans
        cases = tuple(e.cast(case, np.int32) for case in cases)
        return e.cast(e.op("Where", [which, cases[1], cases[0]], node.outputs[0].shape, np.int32), bool)
    return same(e, node, "Where", which, cases[1], cases[0])


@rule("convert_element_type")
def _(e, node, x):
    return e.cast(x, node.outputs[0].dtype)


# Shapes


@rule("dim_as_value")
def _(e, node):
    return e.cast(e.size(node.params["dim"]), node.outputs[0].dtype)


@rule("broadcast_in_dim")
def _(e, node, x, *_):
    shape, kept = node.params["shape"], node.params["broadcast_dimensions"]
    row = [1] * len(shape)
    for k, axis in enumerate(kept):
        row[axis] = x.shape[k]
    return e.expand(e.reshape(x, row), shape)


@rule("reshape")
def _(e, node, x, *_):
    return e.reshape(x, node.outputs[0].shape)


@rule("squeeze")
def _(e, node, x):
    return same(e, node, "Squeeze", x, e.ints(*node.params["dimensions"]))


@rule("expand_dims")
def _(e, node, x):
    return same(e, node, "Unsqueeze", x, e.ints(*node.params["dimensions"]))


@rule("transpose")
def _(e, node, x):
    return e.transpose(x, node.params["permutation"])


@rule("concatenate")
def _(e, node, *values):
    return same(e, node, "Concat", *values, axis=node.params["dimension"])


@rule("stack")
def _(e, node, *values):
    axis = node.params["axis"]
    rows = [e.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in values]
    return same(e, node, "Concat", *rows, axis=axis)


@rule("split")
def _(e, node, x):
    types = [(v.shape, v.dtype) for v in node.outputs]
    return e.ops("Split", [x, e.sizes(node.params["sizes"])], types, axis=node.params["axis"])


@rule("slice")
def _(e, node, x):
    starts, ends, steps = (node.params[k] for k in ("start_indices", "limit_indices", "strides"))
    axes = [k for k, size in enumerate(x.shape) if (starts[k], ends[k], (steps or {k: 1})[k]) != (0, size, 1)]
    starts, ends = (e.sizes([v[k] for k in axes]) for v in (starts, ends))
    return same(e, node, "Slice", x, starts, ends, e.ints(*axes), e.ints(*((steps or {k: 1})[k] for k in axes)))


@rule("rev")
def _(e, node, x):
    axes = node.params["dimensions"]
    ones, far = np.ones(len(axes), np.int64), np.full(len(axes), np.iinfo(np.int64).min)
    return same(e, node, "Slice", x, -ones, far, e.ints(*axes), -ones)


@rule("pad")
def _(e, node, x, value):
    low, high, inner = zip(*node.params["padding_config"], strict=True)
    if any(inner):
        raise ConversionError("padding between elements is not written")
    return same(e, node, "Pad", x, e.sizes([*low, *high]), value)


@rule("iota")
def _(e, node):
    shape, axis, dtype = (node.params[k] for k in ("shape", "dimension", "dtype"))
    zero, one = np.zeros((), np.int64), np.ones((), np.int64)
    numbers = e.cast(e.op("Range", [zero, e.size(shape[axis]), one], (shape[axis],), np.int64), np.dtype(dtype))
    return e.expand(e.reshape(numbers, [size if k == axis else 1 for k, size in enumerate(shape)]), shape)


def _starts(e: Emitter, x: Value, starts, sizes) -> Value:
    """Where a window of `sizes` starts, moved inside as JAX does, as an int64 vector."""
    parts = []
    for start, size, whole in zip(starts, sizes, x.shape, strict=True):
        last = e.size(whole - size)
        parts.append(e.reshape(e.clip(e.cast(start, np.int64), np.zeros((), np.int64), last), (1,)))
    return np.concatenate(parts) if known(*parts) else e.op("Concat", parts, (len(parts),), np.int64, axis=0)


@rule("dynamic_slice")
def _(e, node, x, *starts):
    sizes = node.params["slice_sizes"]
    first = _starts(e, x, starts[: len(sizes)], sizes)
    ends = e.op("Add", [first, e.sizes(sizes)], (len(sizes),), np.int64)
    return same(e, node, "Slice", x, first, ends)


@rule("dynamic_update_slice")
def _(e, node, x, update, *starts):
    if not is_static(update.shape):
        raise ConversionError("an update of an open size is not written")
    first = _starts(e, x, starts, update.shape)
    grid = np.stack(np.meshgrid(*map(np.arange, update.shape), indexing="ij"), -1).astype(np.int64)
    return same(e, node, "ScatterND", x, e.op("Add", [grid, first], grid.shape, np.int64), update)


@rule("gather")
def _(e, node, x, indices):
    """Whole rows along one axis, as `x[indices]` and `jnp.take` pick them."""
    d, sizes, mode = (node.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    axis = d.start_index_map[0] if len(d.start_index_map) == 1 else None
    rows = all(n == (1 if k == axis else x.shape[k]) for k, n in enumerate(sizes))
    rank = len(indices.shape) - 1
    beside = tuple(range(axis, axis + rank)) if axis is not None else ()
    offsets = tuple(k for k in range(len(x.shape) - 1 + rank) if k not in beside)
    if axis is None or d.collapsed_slice_dims != (axis,) or not rows or tuple(d.offset_dims) != offsets:
        raise ConversionError("only indices along one axis, for whole rows, are written: x[i], jnp.take(x, i, axis)")
    shape, dtype = node.outputs[0].shape, indices.dtype
    indices = e.reshape(indices, indices.shape[:-1])
    inside = e.clip(indices, np.zeros((), dtype), e.cast(e.size(x.shape[axis] - 1), dtype))
    found = e.op("Gather", [x, inside], shape, x.dtype, axis=axis)
    if mode != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return found
    if known(inside, indices) and (inside == indices).all():
        return found
    right = e.op("Equal", [inside, indices], indices.shape, np.bool_)
    right = e.reshape(right, [*indices.shape, *[1] * (len(shape) - axis - rank)])
    fill = node.params["fill_value"]
    if fill is None:
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min if x.dtype != bool else True
    return e.op("Where", [right, found, np.asarray(fill, x.dtype)], shape, x.dtype)


# Reductions and products


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def _(e, node, x):
    axes, dtype = node.params["axes"], x.dtype
    type = {"sum": "Sum", "max": "Max", "min": "Min", "prod": "Prod", "and": "Min", "or": "Max"}[node.name[7:]]
    x = e.cast(x, np.int32) if np.issubdtype(dtype, np.bool_) else x
    if type == "Sum" or e.root.opset >= 18:
        found = e.op(f"Reduce{type}", [x, e.ints(*axes)], node.outputs[0].shape, x.dtype, keepdims=0)
    else:
        found = e.op(f"Reduce{type}", [x], node.outputs[0].shape, x.dtype, keepdims=0, axes=list(axes))
    return e.cast(found, dtype)


@rule("argmax", "argmin")
def _(e, node, x):
    type = {"argmax": "ArgMax", "argmin": "ArgMin"}[node.name]
    found = e.op(type, [x], node.outputs[0].shape, np.int64, axis=node.params["axes"][0], keepdims=0)
    return e.cast(found, node.outputs[0].dtype)


@rule("cumsum")
def _(e, node, x):
    axis = np.asarray(node.params["axis"], np.int64)
    return same(e, node, "CumSum", x, axis, reverse=int(node.params["reverse"]))


@rule("dot_general")
def _(e, node, a, b):
    (over_a, over_b), (batch_a, batch_b) = node.params["dimension_numbers"]
    dtype, shape = node.outputs[0].dtype, node.outputs[0].shape
    a, b = e.cast(a, dtype), e.cast(b, dtype)
    if not batch_a and over_a == (len(a.shape) - 1,) and len(b.shape) == 2 and len(over_b) == 1 and len(a.shape) > 1:
        return e.op("MatMul", [a, e.transpose(b, (over_b[0], 1 - over_b[0]))], shape, dtype)
    letters = iter(string.ascii_lowercase)
    names_a = [next(letters) for _ in a.shape]
    names_b = [next(letters) for _ in b.shape]
    for k, j in (*zip(batch_a, batch_b), *zip(over_a, over_b)):
        names_b[j] = names_a[k]
    kept = [names_a[k] for k in batch_a]
    kept += [n for k, n in enumerate(names_a) if k not in (*batch_a, *over_a)]
    kept += [n for k, n in enumerate(names_b) if k not in (*batch_b, *over_b)]
    equation = f"{''.join(names_a)},{''.join(names_b)}->{''.join(kept)}"
    return e.op("Einsum", [a, b], shape, dtype, equation=equation)
