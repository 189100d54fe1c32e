"""Operators that work element by element."""

import functools

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


op(*_NUMPY)(lambda node, x: getattr(xp(x), _NUMPY[node.type])(x))


@op(*_BINARY)
def _(node, a, b):
    axis = node.get("axis")
    # Before operator set 7, b begins at this axis of a.
    if node.get("broadcast") and axis is not None:
        b = b.reshape(np.shape(b) + (1,) * (a.ndim - axis - b.ndim))
    return getattr(xp(a, b), _BINARY[node.type])(*spread(a, b))


op("Celu")(lambda node, x: jax.nn.celu(jnp.asarray(x), node.get("alpha", 1.0)))
op("Erf")(lambda node, x: lax.erf(jnp.asarray(x)))
op("Gelu")(
    lambda node, x: jax.nn.gelu(
        jnp.asarray(x), approximate=node.get("approximate", "none") == "tanh"
    )
)
op("HardSwish")(lambda node, x: x * ACTIVATIONS["HardSigmoid"][0](jnp.asarray(x), 1 / 6, 0.5))
op("Identity")(lambda node, x: x)
op("Mish")(lambda node, x: x * jnp.tanh(jax.nn.softplus(jnp.asarray(x))))
op("Mod")(lambda node, a, b: (xp(a, b).fmod if node.get("fmod") else xp(a, b).mod)(*spread(a, b)))
op("Pow")(lambda node, a, b: cast(xp(a, b).power(*spread(a, b)), a.dtype))
op("Relu")(lambda node, x: np.maximum(x, x.dtype.type(0)) if known(x) else jax.nn.relu(x))
op("Where")(lambda node, condition, a, b: xp(condition, a, b).where(*spread(condition, a, b)))


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
    return total / len(values) if node.type == "Mean" else total


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
        value = node.get(name) if value is None else value
        if value is not None:
            value = bound(x, value)
            given.append(value)
        bounds.append(value)
    return xp(x, *given).clip(x, *bounds) if given else x


def bound(x, value):
    """A bound in the type of x; a known integer that this cannot hold is its largest or smallest."""
    value = np.asarray(value) if not isinstance(value, jax.Array) else value
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


ACTIVATIONS = {  # name: (function of x, alpha and beta; their defaults), as RNN, GRU and LSTM use too
    "Relu": (lambda x, a, b: jax.nn.relu(x), None, None),
    "Tanh": (lambda x, a, b: jnp.tanh(x), None, None),
    "Sigmoid": (lambda x, a, b: jax.nn.sigmoid(x), None, None),
    "Affine": (lambda x, a, b: _scaled(x, a) * x + _scaled(x, b), 1.0, 0.0),
    "LeakyRelu": (lambda x, a, b: jnp.where(x >= 0, x, _scaled(x, a) * x), 0.01, None),
    "ThresholdedRelu": (
        lambda x, a, b: jnp.where(x > _scaled(x, a), x, jnp.zeros_like(x)),
        1.0,
        None,
    ),
    "ScaledTanh": (lambda x, a, b: _scaled(x, a) * jnp.tanh(_scaled(x, b) * x), 1.0, 1.0),
    "HardSigmoid": (lambda x, a, b: jnp.clip(_scaled(x, a) * x + _scaled(x, b), 0, 1), 0.2, 0.5),
    "Elu": (
        lambda x, a, b: jnp.where(x >= 0, x, _scaled(x, a) * jnp.expm1(jnp.minimum(x, 0))),
        1.0,
        None,
    ),
    "Softsign": (lambda x, a, b: x / (1 + jnp.abs(x)), None, None),
    "Softplus": (lambda x, a, b: jax.nn.softplus(x), None, None),
}


@op("Sigmoid", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", "Softsign", "Softplus")
def _(node, x):
    function, alpha, beta = ACTIVATIONS[node.type]
    return function(jnp.asarray(x), node.get("alpha", alpha), node.get("beta", beta))


@op("Selu")
def _(node, x):
    x = jnp.asarray(x)
    alpha = node.get("alpha", 1.67326319217681884765625)
    gamma = node.get("gamma", 1.05070102214813232421875)
    return _scaled(x, gamma) * ACTIVATIONS["Elu"][0](x, alpha, None)


@op("PRelu")
def _(node, x, slope):
    x, slope = spread(x, slope)
    return jnp.where(x < 0, slope * x, x)
