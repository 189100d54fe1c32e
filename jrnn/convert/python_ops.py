"""Operators as Python expressions: a table from an operator's type to the text of a call of JAX.

A rule gets a `Call`, whose `x` are the names of the inputs, and returns the expression of the first output, or a tuple of
expressions. It names the helper functions that it needs with `call.use(name)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jrnn.errors import OpError
from jrnn.ir import Op
from jrnn.registry import lookup

DTYPES = {1: "float32", 2: "int32", 5: "bool_", 10: "int64", 13: "float64"}
Expression = Callable[["Call"], "str | tuple[str, ...]"]

EXPRESSIONS: dict[str, Expression] = {}


@dataclass(frozen=True)
class Call:
    """One operator to be written: its record, the Python names of its inputs, and the helpers used so far."""

    op: Op
    x: tuple[str, ...]
    helpers: dict[str, None] = field(default_factory=dict)

    def arg(self, name: str) -> Any:
        """An argument, or its default, as the operator itself decodes it."""
        definition = lookup(self.op.type)
        default = next(spec.default for spec in definition.args if spec.name == name)
        return definition.decode(self.op).get(name, default)

    def use(self, helper: str, *args: str, **settings: Any) -> str:
        """A call of a helper function; settings that are None are left out."""
        self.helpers[helper] = None
        given = [*args, *(f"{k}={v!r}" for k, v in settings.items() if v is not None)]
        return f"{helper}({', '.join(given)})"


def expression(*types: str) -> Callable[[Expression], Expression]:
    def register(fn: Expression) -> Expression:
        for type in types:
            assert type not in EXPRESSIONS, f"two expressions for {type}"
            EXPRESSIONS[type] = fn
        return fn

    return register


_PLAIN = {
    "Tanh": "jnp.tanh({0})", "Sigmoid": "jax.nn.sigmoid({0})", "Relu": "jax.nn.relu({0})", "Exp": "jnp.exp({0})",
    "Log": "jnp.log({0})", "Sqrt": "jnp.sqrt({0})", "Rsqrt": "lax.rsqrt({0})", "Sqr": "jnp.square({0})", "Cube": "{0} ** 3",
    "Abs": "jnp.abs({0})", "Negative": "-{0}", "Sign": "jnp.sign({0})", "Floor": "jnp.floor({0})", "Ceil": "jnp.ceil({0})",
    "Sin": "jnp.sin({0})", "Cos": "jnp.cos({0})", "Tan": "jnp.tan({0})", "Asin": "jnp.arcsin({0})",
    "Acos": "jnp.arccos({0})", "Atan": "jnp.arctan({0})", "Sinh": "jnp.sinh({0})", "Cosh": "jnp.cosh({0})",
    "Erf": "lax.erf({0})", "Cbrt": "jnp.cbrt({0})", "Reciprocal": "1 / {0}", "Softplus": "jax.nn.softplus({0})",
    "Softsign": "jax.nn.soft_sign({0})", "Swish": "jax.nn.silu({0})", "Not": "~{0}", "Where": "jnp.where({0}, {1}, {2})",
    "StopGradient": "lax.stop_gradient({0})", "Copy": "{0}", "Alias": "{0}", "EnsureDense": "{0}",
    "AveragedLoss": "{0}.mean()",
}  # fmt: skip


def _formatted(template: str, c: Call) -> str:
    return template.format(*c.x)


for _type, _template in _PLAIN.items():
    EXPRESSIONS[_type] = partial(_formatted, _template)

_OPERATORS = {
    "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=",
    "And": "&", "Or": "|", "Xor": "^", "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^",
}  # fmt: skip


@expression(*_OPERATORS)
def _(c: Call):
    a, b = c.x
    if c.arg("broadcast"):
        b = c.use("along", a, b, str(c.arg("axis")))
    if c.op.type == "Div":
        return f"lax.div(*jnp.broadcast_arrays({a}, {b}))"  # integers are divided towards zero
    return f"{a} {_OPERATORS[c.op.type]} {b}"


@expression("Sum")
def _(c: Call):
    return " + ".join(c.x)


@expression("Max", "Min")
def _(c: Call):
    found, name = c.x[0], "jnp.maximum" if c.op.type == "Max" else "jnp.minimum"
    for other in c.x[1:]:
        found = f"{name}({found}, {other})"
    return found


@expression("Pow")
def _(c: Call):
    return f"{c.x[0]} ** {c.x[1] if len(c.x) > 1 else repr(c.arg('exponent'))}"


@expression("Clip")
def _(c: Call):
    return f"jnp.clip({c.x[0]}, {c.arg('min')!r}, {c.arg('max')!r})"


@expression("Scale")
def _(c: Call):
    return f"{c.x[0]} * {c.arg('scale')!r}"


@expression("Gelu")
def _(c: Call):
    return f"jax.nn.gelu({c.x[0]}, approximate={bool(c.arg('fast_gelu'))})"


@expression("Cast")
def _(c: Call):
    to = c.arg("to")
    if to not in DTYPES:
        raise OpError(f"casts to type {to!r}; {', '.join(DTYPES.values())} can be written as Python")
    return f"{c.x[0]}.astype(jnp.{DTYPES[to]})"


@expression("FC")
def _(c: Call):
    if c.arg("axis_w") != 1:
        raise OpError("has axis_w; only 1 can be written as Python")
    return c.use("fully_connected", *c.x, axis=c.arg("axis") if c.arg("axis") != 1 else None)


@expression("FCTransposed")
def _(c: Call):
    x, w, b = c.x
    return c.use("fully_connected", x, f"{w}.T", b, axis=c.arg("axis") if c.arg("axis") != 1 else None)


@expression("MatMul")
def _(c: Call):
    if len(c.x) == 3:
        raise OpError("takes its shape from a third input, which cannot be written as Python")
    trans = {k: True for k in ("trans_a", "trans_b") if c.arg(k)}
    axes = {k: c.arg(k) for k in ("axis_a", "axis_b") if c.arg(k) != 1}
    return c.use("matrix_product", *c.x, **axes, **trans)


@expression("BatchMatMul")
def _(c: Call):
    a, b = (f"jnp.swapaxes({x}, -1, -2)" if c.arg(t) else x for x, t in zip(c.x, ("trans_a", "trans_b")))
    return f"jnp.matmul({a}, {b})"


@expression("Reshape")
def _(c: Call):
    shape = c.arg("shape")
    if shape is None:
        raise OpError("takes its shape from a blob, which cannot be written as Python; give argument 'shape'")
    sizes = ", ".join(f"{c.x[0]}.shape[{k}]" if d == 0 else str(d) for k, d in enumerate(shape))
    return f"{c.x[0]}.reshape(({sizes}{',' if len(shape) == 1 else ''}))", f"jnp.array({c.x[0]}.shape)"


@expression("Squeeze")
def _(c: Call):
    return f"jnp.squeeze({c.x[0]}, {c.arg('dims')!r})"


@expression("ExpandDims")
def _(c: Call):
    return f"jnp.expand_dims({c.x[0]}, {c.arg('dims')!r})"


@expression("Transpose")
def _(c: Call):
    return f"jnp.transpose({c.x[0]}, {c.arg('axes') or None!r})"


@expression("Tile")
def _(c: Call):
    if len(c.x) > 1:
        raise OpError("takes its settings from blobs, which cannot be written as Python")
    return f"jnp.concatenate([{c.x[0]}] * {c.arg('tiles')}, axis={c.arg('axis')})"


@expression("Slice")
def _(c: Call):
    if len(c.x) > 1:
        raise OpError("takes its bounds from blobs, which cannot be written as Python")
    return c.use("cut", c.x[0], repr(c.arg("starts")), repr(c.arg("ends")))


@expression("Split")
def _(c: Call):
    parts, count, axis = c.arg("split"), len(c.op.outputs), c.arg("axis")
    if len(c.x) > 1 or c.arg("add_axis"):
        raise OpError("splits by a blob or drops an axis, which cannot be written as Python")
    at = repr(np.cumsum(parts)[:-1].tolist()) if parts else str(count)
    whole = f"jnp.split({c.x[0]}, {at}, axis={1 if axis is None else axis})"
    return (f"*{whole},",)


@expression("Concat")
def _(c: Call):
    axis = c.arg("axis")
    name = "stack" if c.arg("add_axis") else "concatenate"
    axis = 1 if axis is None else axis
    sizes = f"jnp.array([{', '.join(f'{x}.shape[{axis}]' if name == 'concatenate' else '1' for x in c.x)}])"
    return f"jnp.{name}([{', '.join(c.x)}], axis={axis})", sizes


@expression("Gather")
def _(c: Call):
    if c.arg("match_outer"):
        raise OpError("has match_outer, which cannot be written as Python")
    return f"jnp.take({c.x[0]}, {c.x[1]}, axis={c.arg('axis')})"


@expression("TopK")
def _(c: Call):
    if len(c.x) > 1:
        raise OpError("takes k from a blob, which cannot be written as Python")
    return (f"*{c.use('top_k', c.x[0], k=c.arg('k'), axis=c.arg('axis') if c.arg('axis') != -1 else None)},",)


@expression("ScatterAssign")
def _(c: Call):
    data, indices, rows = c.x
    return f"{data}.at[{indices}].set({rows}.reshape({indices}.shape + {data}.shape[1:]))"


@expression("SparseToDense")
def _(c: Call):
    if len(c.x) < 3:
        raise OpError("takes its size from the indices, which cannot be written as Python; give the third input")
    indices, values, like = c.x
    return f"jnp.zeros({like}.shape[:1] + {values}.shape[1:], {values}.dtype).at[{indices}].add({values})"


@expression("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
def _(c: Call):
    name = c.op.type.removeprefix("Reduce").lower()
    return f"{c.x[0]}.{name}({c.arg('axes') or None!r}, keepdims={bool(c.arg('keepdims'))})"


@expression("ArgMax", "ArgMin")
def _(c: Call):
    return f"jnp.{c.op.type.lower()}({c.x[0]}, {c.arg('axis')}, keepdims={bool(c.arg('keepdims'))})"


@expression("Softmax")
def _(c: Call):
    return c.use("softmax", c.x[0], axis=c.arg("axis"))


@expression("LayerNorm")
def _(c: Call):
    given = c.x if c.arg("elementwise_affine") else c.x[:1]
    return (f"*{c.use('layer_norm', *given, axis=c.arg('axis'), epsilon=c.arg('epsilon'))},",)


@expression("LSTMUnit", "GRUUnit")
def _(c: Call):
    lstm = c.op.type == "LSTMUnit"
    states = 3 if lstm else 2
    given = c.x if c.arg("sequence_lengths") else c.x[:states]
    settings = {"forget_bias": c.arg("forget_bias") or None} if lstm else {}
    call = c.use("lstm_unit" if lstm else "gru_unit", *given, **settings, drop_states=c.arg("drop_states") or None)
    return (f"*{call},",) if lstm else call


@expression("SequenceMask")
def _(c: Call):
    if c.arg("mode") not in ("sequence", b"sequence") or c.arg("axis") != 1 or c.arg("repeat_from_axis") not in (-1, 2):
        raise OpError("masks in another way than by sequence lengths along axis 1, which cannot be written as Python")
    return c.use("mask_sequences", *c.x[:2], repr(c.arg("fill_val")).replace("inf", "jnp.inf"))


@expression("Conv", "ConvTranspose", "MaxPool", "AveragePool")
def _(c: Call):
    a = c.op.arg
    last = a("order", b"NCHW") == b"NHWC"
    if (last and c.op.type != "Conv") or a("kernels") is None or len(a("kernels")) not in (2, 3):
        raise OpError(
            "is written as Python with arguments kernels, strides, pads for two or three dimensions, and all but Conv with "
            "order NCHW"
        )
    names = {"Conv": ("dilations",), "ConvTranspose": ("adjs",)}.get(c.op.type, ())
    settings = {k: tuple(a(k)) for k in ("strides", "pads", *names) if a(k) is not None}
    if c.op.type == "Conv":
        return c.use("convolution", *c.x, **settings, group=a("group"), last=last or None)
    if c.op.type == "ConvTranspose":
        return c.use("transposed_convolution", *c.x, **settings, group=a("group"))
    if c.op.type == "MaxPool":
        return c.use("max_pool", c.x[0], kernels=tuple(a("kernels")), **settings)
    include = bool(a("count_include_pad", 0)) or None
    return c.use("average_pool", c.x[0], kernels=tuple(a("kernels")), **settings, count_include_pad=include)


@expression("ConstantFill")
def _(c: Call):
    dtype = c.arg("dtype")
    name = "int64" if dtype is None and isinstance(c.op.arg("value", 0.0), int) else DTYPES.get(dtype or 1)
    if name is None:
        raise OpError(f"fills with type {dtype}; {', '.join(DTYPES.values())} can be written as Python")
    if c.x:
        if c.arg("input_as_shape") or c.arg("extra_shape") or len(c.x) > 1:
            raise OpError("takes its shape or its value from blobs, which cannot be written as Python")
        return f"jnp.full({c.x[0]}.shape, {c.arg('value')!r}, jnp.{name})"
    return f"jnp.full({c.arg('shape') or ()!r}, {c.arg('value')!r}, jnp.{name})"


@expression("GivenTensorFill", "GivenTensorIntFill", "GivenTensorInt64Fill", "GivenTensorBoolFill")
def _(c: Call):
    names = {"GivenTensorIntFill": "int32", "GivenTensorInt64Fill": "int64", "GivenTensorBoolFill": "bool_"}
    kind, shape = names.get(c.op.type, "float32"), tuple(c.op.arg("shape", ()))
    values = np.asarray(c.op.arg("values")).reshape(shape)
    values = values if c.op.type == "GivenTensorFill" else values.astype(np.int64)
    return f"jnp.array({_numbers(values)}, jnp.{kind})"


def _numbers(values: np.ndarray) -> str:
    """Nested lists of numbers; float32 as the shortest decimals that are read back as the same."""
    if values.ndim:
        return f"[{', '.join(map(_numbers, values))}]" if values.size else f"jnp.zeros({values.shape!r})"
    if values.dtype.kind == "i" or np.isfinite(values):
        return str(values)
    return f"float('{values}')"
