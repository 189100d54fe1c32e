"""Every elementwise primitive of the table has a rule in each room that needs one, or is an exception with a reason.

A primitive that a new JAX puts into derivatives, as 1 - x^2 into that of tanh, otherwise shows up in users' programs first.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jrnn
from jrnn.convert.emitter import RULES as CAFFE2
from jrnn.jaxprs import inlined, primitives
from jrnn.jaxprs.by_numpy import evaluate_by_numpy
from jrnn.jaxprs.flat import body_of
from jrnn.jaxprs.primitives.table import TABLE
from jrnn.loops.kernels.native import steps
from jrnn.loops.newton.enclosure import _RULES, Box, enclosed, rule_of_row

NAMES = primitives.with_kind("elementwise", "special")
COMPLEX = dict.fromkeys(("conj", "imag", "real", "complex"), "reals alone")
BITS = dict.fromkeys(
    ("mulhi", "clz", "population_count", "nextafter", "bitcast_convert_type"),
    "no operator reads the bits of numbers",
)
BY_BITS = dict.fromkeys(("le_to", "lt_to"), "no operator compares numbers by their bits")
SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")
SERIES = ("igamma", "igamma_grad_a", "igammac", "polygamma", "regularized_incomplete_beta", "zeta")
BESSEL = ("bessel_i0e", "bessel_i1e")
GAMMA = ("lgamma", "digamma")

NO_OPERATOR = dict.fromkeys(
    (*SERIES, *BESSEL, *GAMMA), "no operator, and a series of too many terms"
)
NO_ENCLOSURE = {
    **COMPLEX,
    **dict.fromkeys((*BITS, *SHIFTS), "it reads bits, or jumps"),
    **dict.fromkeys(SERIES, "no bound of the derivative is known"),
    **dict.fromkeys(GAMMA, "how it is rounded near its zeros is not known"),
    "rem": "it jumps where the quotient is a whole number",
}
NO_INSTRUCTION = {
    **COMPLEX,
    **dict.fromkeys(
        (*BITS, *SHIFTS, *BY_BITS), "the kernel computes floating-point numbers and booleans"
    ),
    **dict.fromkeys((*SERIES, *BESSEL, *GAMMA), "no cell has it"),
    **dict.fromkeys(("sinh", "cosh", "asin", "acos", "atan", "atan2"), "no cell has it"),
    **dict.fromkeys(("asinh", "acosh", "atanh", "cbrt", "erfc", "erf_inv"), "no cell has it"),
    **dict.fromkeys(("rem", "pow"), "the library of C++ computes it, one number at a time"),
    "reduce_precision": "it rounds to types that are not in memory",
}
AS_AN_ADDITION = {  # without a cost of their own
    **dict.fromkeys(("add", "add_any", "sub", "neg", "mul", "square", "abs", "sign"), "one"),
    **dict.fromkeys(("one_minus_square", "integer_pow", "polynomial"), "a few products"),
    **dict.fromkeys(("max", "min", "clamp", "select_n", "ceil", "floor", "round"), "one"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite", *BY_BITS), "one"),
    **dict.fromkeys(("and", "or", "xor", "not", *SHIFTS, *BITS), "one"),
    **dict.fromkeys(("convert_element_type", "reduce_precision", *COMPLEX), "one"),
}
DEFINED = primitives.where(lambda row: row.definition is not None)
KERNEL = {
    *steps.ELEMENTWISE,
    *steps.SWAPPED,
    *steps.OF_BOOLEANS,
    *DEFINED,
    *("clamp", "round", "convert_element_type", "integer_pow"),
    *primitives.where(lambda row: row.copies),
}
ROOMS = {
    "Caffe2": (CAFFE2.keys() | DEFINED, NO_OPERATOR | BITS | BY_BITS | COMPLEX),
    "Newton's enclosure": (
        _RULES.keys() | primitives.where(lambda row: rule_of_row(row) is not None),
        NO_ENCLOSURE,
    ),
    "the kernel": (KERNEL, NO_INSTRUCTION),
    "costs": (
        primitives.where(lambda row: row.cost is not None),
        AS_AN_ADDITION,
    ),
}


def wanting(rules, exceptions):
    """The primitives that are in neither of the two, and those that are in both."""
    return NAMES - set(rules) - set(exceptions), set(exceptions) & set(rules)


@pytest.mark.parametrize("room", ROOMS)
def test_each_has_a_rule_or_a_reason(room):
    missing, needless = wanting(*ROOMS[room])
    assert not missing, f"give {room} a rule, or an exception with its reason"
    assert not needless and ROOMS[room][1].keys() <= NAMES


def test_each_has_a_rule_of_onnx_or_a_reason():
    pytest.importorskip("onnxruntime")
    from jrnn.onnx.emit import RULES

    missing, needless = wanting(RULES.keys() | DEFINED, NO_OPERATOR | BITS | COMPLEX)
    assert not missing and not needless


def test_a_series_costs_more_than_a_function():
    assert all(TABLE[name].cost > TABLE["tanh"].cost for name in primitives.with_kind("special"))


FUNCTIONS = {
    name: getattr(lax, name)
    for name in (
        *("tanh", "logistic", "exp", "expm1", "log1p", "erf", "sin", "cos", "sqrt", "rsqrt", "log"),
        *("exp2", "cbrt", "tan", "sinh", "cosh", "acos", "asin", "asinh", "atan", "atanh"),
        *("erfc", "erf_inv", "abs", "square", "neg"),
    )
} | {
    "acosh": lambda x: lax.acosh(1 + x),
    "log2": jnp.log2,
    "pow": lambda x: x**1.7,
    "powers": lambda x: x**5 / x**-2,
    "atan2": lambda x: lax.atan2(x, 0.5 - x),
    "remainder": lambda x: lax.rem(x, x[::-1]),
    "pick": lambda x: jnp.clip(jnp.maximum(x, 1 - x), 0.3, 0.8) + jnp.where(x > 0.5, x, 0),
}
if hasattr(lax, "polynomial"):
    FUNCTIONS["polynomial"] = lambda x: lax.polynomial(x, [0.5, x[0], -2.0])
X = np.random.default_rng(0).uniform(0.15, 0.85, 6).astype(np.float32)


def values_and_gradients(x):
    """Each function, and its gradient in the primitives that this JAX writes it with."""
    return {
        name: (f(x), jax.grad(lambda x, f=f: jnp.sum(f(x)))(x)) for name, f in FUNCTIONS.items()
    }


def test_functions_and_their_gradients_convert():
    """`from_jax` compares the values with the function's."""
    package = jrnn.from_jax(values_and_gradients, X)
    assert len(package.output_names) == 2 * len(FUNCTIONS)


def test_functions_and_their_gradients_are_exported():
    """`to_onnx` compares the values with the function's."""
    pytest.importorskip("onnxruntime")
    model = jrnn.to_onnx(values_and_gradients, X)
    assert len(model.graph.output) == 2 * len(FUNCTIONS)


def test_a_layer_and_its_gradient_convert():
    def loss(w, xs):
        def step(state, x):
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h]) @ w, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        (h, _), _ = lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), xs)
        return jnp.sum(h)

    w = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    assert jrnn.from_jax(jax.grad(loss), w, np.ones((4, 3), np.float32))


def test_numpy_evaluates_functions_and_their_gradients_in_wide_numbers():
    """So that derived programs are compared with their loops: JAX writes some gradients by the bits of numbers."""
    closed, shapes = jax.make_jaxpr(values_and_gradients, return_shape=True)(X)
    leaves = evaluate_by_numpy(closed.jaxpr, closed.consts, [X], wide=True)
    assert all(v.dtype == np.float64 and np.isfinite(v).all() for v in leaves)
    wide = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    slope = 2 / np.sqrt(np.pi) * np.exp(-(X.astype(np.float64) ** 2))
    np.testing.assert_allclose(wide["erf"][1], slope, rtol=1e-6)


def test_gradients_have_enclosures():
    """Newton's certificate bounds the slopes of a step."""
    smooth = {name: f for name, f in FUNCTIONS.items() if name != "remainder"}

    def gradients(x):
        return [jax.grad(lambda x, f=f: jnp.sum(f(x)))(x) for f in smooth.values()]

    program = inlined(jax.make_jaxpr(gradients)(X), body_of)

    def radii(x):
        boxes, _ = enclosed(program, [Box(x, jnp.full_like(x, 1e-3))])
        return [box.radius for box in boxes]

    assert jax.eval_shape(radii, X)  # an equation without a rule raises
