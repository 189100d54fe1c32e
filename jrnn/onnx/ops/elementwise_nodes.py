"""Operators that work element by element."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import ConversionError
from jrnn.onnx.graph import cast, known, op, spread, xp

_NUMPY = {
    "Abs": "abs", "Neg": "negative", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Sin": "sin", "Cos": "cos", "Tan": "tan",
    "Asin": "arcsin", "Acos": "arccos", "Atan": "arctan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "arcsinh",
    "Acosh": "arccosh", "Atanh": "arctanh", "Tanh": "tanh", "Floor": "floor", "Ceil": "ceil", "Round": "round",
    "Sign": "sign", "Reciprocal": "reciprocal", "Not": "logical_not", "IsNaN": "isnan", "BitwiseNot": "invert",
}  # fmt: skip
_BINARY = {
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "Equal": "equal", "Less": "less", "LessOrEqual": "less_equal",
    "Greater": "greater", "GreaterOrEqual": "greater_equal", "And": "logical_and", "Or": "logical_or",
    "Xor": "logical_xor", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}  # fmt: skip


@op(*_NUMPY)
def _(node, x):
    return getattr(xp(x), _NUMPY[node.type])(x)


@op(*_BINARY)
def _(node, a, b):
    axis = node.get("axis")
    # Before operator set 7, b begins at this axis of a.
    if node.get("broadcast") and axis is not None:
        b = b.reshape(np.shape(b) + (1,) * (a.ndim - axis - b.ndim))
    return getattr(xp(a, b), _BINARY[node.type])(*spread(a, b))


@op("Gelu")
def _(node, x):
    return jax.nn.gelu(jnp.asarray(x), approximate=node.get("approximate", "none") == "tanh")


@op("Identity")
def _(node, x):
    return x


@op("Mod")
def _(node, a, b):
    return (xp(a, b).fmod if node.get("fmod") else xp(a, b).mod)(*spread(a, b))


@op("Pow")
def _(node, a, b):
    return cast(xp(a, b).power(*spread(a, b)), a.dtype)


@op("Relu")
def _(node, x):
    if known(x):
        return np.maximum(x, x.dtype.type(0))
    return jax.nn.relu(x)


@op("Where")
def _(node, condition, a, b):
    return xp(condition, a, b).where(*spread(condition, a, b))


@op("BitShift")
def _(node, x, by):
    shifts = {"LEFT": lax.shift_left, "RIGHT": lax.shift_right_arithmetic}
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        shifts["RIGHT"] = lax.shift_right_logical
    return shifts[node.get("direction")](*jnp.broadcast_arrays(*spread(x, by)))


@op("Div")
def _(node, a, b):
    a, b = spread(a, b)
    if np.issubdtype(a.dtype, np.integer):  # towards zero
        if known(a, b):
            return np.asarray(a - np.fmod(a, b)) // b
        return lax.div(*jnp.broadcast_arrays(a, b))
    return xp(a, b).divide(a, b)


@op("Sum", "Mean", "Min", "Max")
def _(node, *values):
    reduce = {"Min": "minimum", "Max": "maximum"}.get(node.type, "add")
    total = functools.reduce(getattr(xp(*values), reduce), spread(*values))
    if node.type == "Mean":
        return total / len(values)
    return total


@op("Dropout")
def _(node, x, ratio=None, training=None):
    if training is not None and node.known(training, "training_mode").item():
        raise ConversionError(f"{node}: training_mode is set; graphs are read for inference")
    return x, np.ones(x.shape, bool)


@op("Clip")
def _(node, x, low=None, high=None):
    given = []
    bounds = []
    for name, value in (("min", low), ("max", high)):
        if value is None:
            value = node.get(name)
        if value is not None:
            value = bound(x, value)
            given.append(value)
        bounds.append(value)
    if given:
        return xp(x, *given).clip(x, *bounds)
    return x


def bound(x, value):
    """A bound in the type of x; a known integer that this cannot hold is its largest or smallest."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    if known(value) and jnp.issubdtype(x.dtype, jnp.integer):
        value = np.clip(value, jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
    return value.astype(x.dtype).reshape((1,) * x.ndim)


@op("IsInf")
def _(node, x):
    signs = [jnp.isposinf] * node.get("detect_positive", 1) + [jnp.isneginf] * node.get(
        "detect_negative", 1
    )
    return functools.reduce(jnp.logical_or, [sign(x) for sign in signs], jnp.zeros(x.shape, bool))


def _scaled(x, value: float):
    return jnp.asarray(value, x.dtype)


def _affine(x, alpha=1.0, beta=0.0):
    return _scaled(x, alpha) * x + _scaled(x, beta)


def _hard_sigmoid(x, alpha=0.2, beta=0.5):
    return jnp.clip(_affine(x, alpha, beta), 0, 1)


def _hard_swish(x):
    return x * _hard_sigmoid(x, 1 / 6, 0.5)


def _leaky_relu(x, alpha=0.01):
    return jnp.where(x >= 0, x, _scaled(x, alpha) * x)


def _thresholded_relu(x, alpha=1.0):
    return jnp.where(x > _scaled(x, alpha), x, jnp.zeros_like(x))


def _scaled_tanh(x, alpha=1.0, beta=1.0):
    return _scaled(x, alpha) * jnp.tanh(_scaled(x, beta) * x)


def _elu(x, alpha=1.0):
    return jnp.where(x >= 0, x, _scaled(x, alpha) * jnp.expm1(jnp.minimum(x, 0)))


def _selu(x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return _scaled(x, gamma) * _elu(x, alpha)


def _softsign(x):
    return x / (1 + jnp.abs(x))


# Functions of x and of the attributes that they name. RNN, GRU and LSTM have them too, but for Selu.
ACTIVATIONS = {
    "Relu": jax.nn.relu,
    "Tanh": jnp.tanh,
    "Sigmoid": jax.nn.sigmoid,
    "Affine": _affine,
    "LeakyRelu": _leaky_relu,
    "ThresholdedRelu": _thresholded_relu,
    "ScaledTanh": _scaled_tanh,
    "HardSigmoid": _hard_sigmoid,
    "Elu": _elu,
    "Softsign": _softsign,
    "Softplus": jax.nn.softplus,
}


@functools.cache
def settings_of(activation) -> tuple[str, ...]:
    """The attributes that an activation reads."""
    return tuple(name for name in inspect.signature(activation).parameters if name != "x")


FUNCTIONS = {name: ACTIVATIONS[name] for name in ACTIVATIONS if name not in ("Relu", "Tanh")}
FUNCTIONS |= {
    "Selu": _selu,
    "Celu": jax.nn.celu,
    "Erf": lax.erf,
    "HardSwish": _hard_swish,
    "Mish": jax.nn.mish,
}


@op(*FUNCTIONS)
def _(node, x):
    function = FUNCTIONS[node.type]
    settings = {}
    for name in settings_of(function):
        if name in node.attributes:
            settings[name] = node.get(name)
    return function(jnp.asarray(x), **settings)


@op("PRelu")
def _(node, x, slope):
    x, slope = spread(x, slope)
    return jnp.where(x < 0, slope * x, x)
