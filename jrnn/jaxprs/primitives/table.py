"""The table of primitives: one row for each, with all that passes, costs and evaluators know of it.

A new primitive is one row here. A primitive without a row stays in its loop, and is a call to the cost model. Code that
computes something for one primitive alone, such as how its axes follow, is a rule of the file that needs it; `rule_of`
finds the rule of a kind for those without one of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Literal, NamedTuple

import numpy as np

# elementwise: one value per element of the operands, cheap enough to be computed again in the reverse loop.
# special: functions of elements by series of many terms, which are not repeated.
# view: picks, repeats or reorders elements of one operand; free where the result is used, a copy where it is stored.
# placement: makes an array of parts or of nothing.
# reduction, running: over axes that go, or stay.
# product, solver, transform, order, window, lookup, update: as their names say.
# draw, key: random numbers, and keys as words.
# collective: communicates over devices or mapped axes.
# library: calls of libraries and callbacks.  barrier: returns each operand.  control: runs jaxprs.
Kind = Literal[
    "elementwise", "special", "view", "placement", "reduction", "running", "product", "solver", "transform", "order",
    "window", "lookup", "update", "draw", "key", "collective", "library", "barrier", "control", "unknown",
]  # fmt: skip
_STAY: frozenset[Kind] = frozenset(("collective", "library", "barrier", "control", "unknown"))
_CHEAP: frozenset[Kind] = frozenset(("elementwise", "view", "placement", "reduction"))
_HEAVY: frozenset[Kind] = frozenset(("product", "solver", "transform", "draw", "lookup"))
_FREE: frozenset[Kind] = frozenset(("view", "placement", "key"))


class Row(NamedTuple):
    """What is known of a primitive.

    Attributes:
        kind: see `Kind`.
        linear: "jointly" in all its operands but `positions`, or "each" for one that is linear in each operand; "" for
            others.
        positions: the operands that are indices or predicates.
        cost: the time of one element, compared with one of tanh; None for that of an addition, 0.0 for what is free.
        image: numbers between which all results lie.
        numpy: the kinds of types for which numpy computes the same, and numpy's function: "kinds", "kinds name" or
            (kinds, function). V is bfloat16.
        neutral: the second operand for which the result is the first one.
        commutes: the operands may be swapped.
        copies: the result is the operand, and the derivative is 1 or 0.
        stops: the derivative is 0, whatever the result is.
        picks: every element of the result is one of the operands (but `positions`), or one that rounding makes of it.
        jumps: for floating-point operands, the result jumps where an operand changes by a rounding error.
        activation: costs many instructions per value, so that it is worth computing for several slices at once.
        reshapes: a view of all elements in their order, in another shape; it may repeat them.
        cuts: a view of a part of the elements.
        moves: may be evaluated for all steps; by default, what its kind says.
        cheap: cheap enough to be computed again in the reverse loop; by default, what its kind says.
        heavy: worth naming where it leaves a loop, and never computed twice; by default, what its kind says.
    """

    kind: Kind
    linear: Literal["jointly", "each", ""] = ""
    positions: Container[int] = ()
    cost: float | None = None
    image: tuple[float, float] | None = None
    numpy: str | tuple[str, Callable[..., Any]] | None = None
    neutral: float | None = None
    commutes: bool = False
    copies: bool = False
    stops: bool = False
    picks: bool = False
    jumps: bool = False
    activation: bool = False
    reshapes: bool = False
    cuts: bool = False
    moves: bool = False
    cheap: bool = False
    heavy: bool = False


UNKNOWN = Row("unknown")
TABLE: dict[str, Row] = {}


def enter(names: str, kind: Kind, **columns: Any) -> None:
    """Enters the rows of primitives of a kind, by default with what the kind says of moving, repeating and time."""
    defaults: dict[str, Any] = {
        "moves": kind not in _STAY,
        "cheap": kind in _CHEAP,
        "heavy": kind in _HEAVY,
    }
    defaults |= {"picks": kind == "view", "cost": 0.0 if kind in _FREE else None}
    row = Row(kind, **{**defaults, **columns})
    for name in names.split():
        assert name not in TABLE, f"{name} has two rows"
        TABLE[name] = row


ANY = "biufcV"
REAL = "iufcV"
FLOAT = "fcV"
_UNIT = (-1.0, 1.0)
_AFTER_FIRST = range(1, 99)
_AFTER_SECOND = range(2, 99)

# Sums and products.
enter("add", "elementwise", linear="jointly", neutral=0, commutes=True, numpy=REAL)
enter("add_any", "elementwise", linear="jointly", neutral=0, commutes=True, numpy=f"{REAL} add")
enter("sub", "elementwise", linear="jointly", neutral=0, numpy=f"{REAL} subtract")
enter("neg", "elementwise", linear="jointly", numpy=f"{REAL} negative")
enter("mul", "elementwise", linear="each", neutral=1, commutes=True, numpy=f"{REAL} multiply")
enter("div", "elementwise", neutral=1, cost=0.3, numpy=f"{FLOAT} divide")
enter("rem", "elementwise", cost=3.0, jumps=True, numpy="f fmod")  # of floats XLA:CPU calls fmod
enter("mulhi", "elementwise", commutes=True)
enter("square", "elementwise", numpy=REAL)
enter("one_minus_square", "elementwise", numpy=(FLOAT, lambda x: 1 - x * x))
enter("integer_pow polynomial", "elementwise")
enter("pow", "elementwise", cost=8.0, numpy="fc power")

# Functions. Costs were measured on XLA:CPU.
enter("tanh", "elementwise", cost=1.0, activation=True, image=_UNIT, numpy=FLOAT)
enter(
    "logistic",
    "elementwise",
    cost=1.0,
    activation=True,
    image=(0.0, 1.0),
    numpy=(FLOAT, lambda x: 1 / (1 + np.exp(-x))),
)
enter("exp", "elementwise", cost=1.0, activation=True, image=(0.0, np.inf), numpy=FLOAT)
enter("expm1", "elementwise", cost=1.0, activation=True, image=(-1.0, np.inf), numpy=FLOAT)
enter("log1p", "elementwise", cost=1.0, activation=True, numpy=FLOAT)
enter("erf", "elementwise", cost=1.0, activation=True, image=_UNIT, numpy="f scipy.special.erf")
enter("sin cos", "elementwise", cost=3.5, activation=True, image=_UNIT, numpy=FLOAT)
enter("sqrt", "elementwise", cost=0.3, activation=True, image=(0.0, np.inf), numpy=FLOAT)
enter(
    "rsqrt",
    "elementwise",
    cost=0.3,
    activation=True,
    image=(0.0, np.inf),
    numpy=(FLOAT, lambda x: 1 / np.sqrt(x)),
)
enter("log", "elementwise", cost=1.0, numpy=FLOAT)
enter("log2", "elementwise", cost=1.0)
enter("exp2", "elementwise", cost=1.0, image=(0.0, np.inf), numpy="f")
enter("cbrt", "elementwise", cost=1.0, numpy="f")
enter("tan", "elementwise", cost=7.0, numpy=FLOAT)
enter("sinh cosh", "elementwise", cost=4.0, numpy=FLOAT)
enter("acos asin atan", "elementwise", cost=16.0)
enter("acosh asinh atanh", "elementwise", cost=6.0)
enter("atan2", "elementwise", cost=16.0, numpy="f arctan2")
enter("erfc", "elementwise", cost=4.0, image=(0.0, 2.0), numpy="f scipy.special.erfc")
enter("erf_inv", "elementwise", cost=4.0)
enter("lgamma", "elementwise", cost=16.0, numpy="f scipy.special.gammaln")
enter("digamma", "elementwise", cost=16.0, numpy="f scipy.special.digamma")
# Series and iterations, measured with jax 0.12.
enter("bessel_i0e bessel_i1e", "special", cost=5.0)
enter("igamma igammac", "special", cost=500.0)
enter("igamma_grad_a polygamma", "special", cost=1000.0)
enter("regularized_incomplete_beta zeta", "special", cost=700.0)

# What picks, compares and rounds.
enter("abs", "elementwise", image=(0.0, np.inf), numpy=REAL)
enter("sign", "elementwise", jumps=True, image=_UNIT, numpy="if")
enter("max", "elementwise", picks=True, neutral=-np.inf, commutes=True, numpy="iufV maximum")
enter("min", "elementwise", picks=True, neutral=np.inf, commutes=True, numpy="iufV minimum")
enter(
    "clamp",
    "elementwise",
    picks=True,
    numpy=("iufV", lambda low, x, high: np.minimum(np.maximum(x, low), high)),
)
enter("select_n", "elementwise", linear="jointly", positions=(0,), picks=True)
enter("ceil floor", "elementwise", jumps=True, numpy="fV")
enter("round", "elementwise", jumps=True)
enter("eq", "elementwise", jumps=True, commutes=True, numpy=f"{ANY} equal")
enter("ne", "elementwise", jumps=True, commutes=True, numpy=f"{ANY} not_equal")
enter("lt", "elementwise", jumps=True, numpy=f"{ANY} less")
enter("le", "elementwise", jumps=True, numpy=f"{ANY} less_equal")
enter("gt", "elementwise", jumps=True, numpy=f"{ANY} greater")
enter("ge", "elementwise", jumps=True, numpy=f"{ANY} greater_equal")
enter("is_finite", "elementwise", jumps=True, numpy="fV isfinite")
enter("and", "elementwise", commutes=True, numpy="b logical_and")
enter("or", "elementwise", commutes=True, numpy="b logical_or")
enter("xor", "elementwise", commutes=True)
enter("not", "elementwise", numpy="b logical_not")
enter(
    "shift_left shift_right_arithmetic shift_right_logical clz population_count nextafter",
    "elementwise",
)

# Copies, types and complex numbers. A conversion is linear if its types are inexact (`is_linear`).
enter("copy", "elementwise", linear="jointly", copies=True, picks=True, cost=0.0)
enter("name", "elementwise", linear="jointly", copies=True, picks=True, cost=0.0)
enter(
    "stop_gradient", "elementwise", linear="jointly", copies=True, picks=True, stops=True, cost=0.0
)
enter("convert_element_type reduce_precision", "elementwise", picks=True)
enter("bitcast_convert_type", "elementwise")
enter("conj imag real", "elementwise", numpy="c")
enter("complex", "elementwise", numpy=("f", lambda x, y: x + 1j * y))

# Views and placements.
enter("reshape squeeze broadcast_in_dim", "view", linear="jointly", reshapes=True)
enter("broadcast_to tile transpose", "view", linear="jointly")
enter("slice split unstack", "view", linear="jointly", cuts=True)
enter("concatenate pad rev", "placement", linear="jointly", picks=True)
enter(
    "stack", "placement", linear="jointly", picks=True, cost=None
)  # an operation of its own, as XLA writes it
enter("iota", "placement")

# Reductions.
enter("reduce_sum", "reduction", linear="jointly")
enter("reduce_max reduce_min", "reduction", picks=True)
enter("reduce_and reduce_or reduce_xor", "reduction")
enter("reduce_prod argmax argmin", "reduction", cheap=False)  # XLA:CPU does not vectorize them
enter("cumsum", "running", linear="jointly")
enter("cumprod cumlogsumexp", "running")
enter("cummax cummin", "running", picks=True)
enter("reduce_window_sum", "window", linear="jointly")
enter("reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add", "window")

# Products, solvers and orders.
enter("dot_general conv_general_dilated ragged_dot_general", "product", linear="each")
enter("cholesky eig eigh lu qr svd triangular_solve", "solver")
enter("fft", "transform")
enter("sort top_k approx_top_k", "order")

# Lookups and updates.
enter("gather", "lookup", linear="jointly", positions=(1,))
enter(
    "dynamic_slice", "lookup", linear="jointly", positions=_AFTER_FIRST, picks=True, heavy=False
)  # a copy
enter("dynamic_update_slice", "update", linear="jointly", positions=_AFTER_SECOND, picks=True)
enter("scatter scatter-add scatter-sub", "update", linear="jointly", positions=(1,))
enter("scatter-max scatter-min scatter-mul", "update", positions=(1,))

# Random numbers.
enter("random_bits random_fold_in random_split threefry2x32", "draw")
enter("random_unwrap random_wrap", "key")

# What stays in the loop.
enter("all_gather all_to_all pmax pmin ppermute psum psum_invariant", "collective")
enter("axis_index", "collective", cost=0.0)
enter("pvary", "collective", linear="jointly", copies=True, picks=True, cost=0.0)
enter("optimization_barrier", "barrier", linear="jointly", copies=True, picks=True)
enter(
    "cholesky_update custom_partitioning debug_callback debug_print ffi_call geqp3 geqrf hessenberg householder_product "
    "io_callback ormqr pure_callback schur symmetric_product tridiagonal tridiagonal_solve",
    "library",
)
enter("cond scan while", "control")
