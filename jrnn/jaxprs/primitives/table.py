"""The table of primitives: one row for each, with all that passes, costs and evaluators know of it.

A new primitive is one row here. A primitive without a row stays in its loop, and is a call to the cost model. Rows that only
name what their kind says are one line for several primitives. `row.py` has the columns. The files next to it have functions
that rows name: `shapes` for axes and sizes, `slopes` for enclosures, `numpy_rules` for numpy, and `definitions`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from jrnn.jaxprs.primitives import (
    definitions,
    numpy_indexing,
    numpy_rules,
    numpy_solvers,
    shapes,
    slopes,
)
from jrnn.jaxprs.primitives.row import Kind, Row, row

UNKNOWN = row("unknown")
TABLE: dict[str, Row] = {}


def enter(names: str, kind: Kind, **columns: Any) -> None:
    """Enters the row of primitives of a kind."""
    shared = row(kind, **columns)
    for name in names.split():
        assert name not in TABLE, f"{name} has two rows"
        TABLE[name] = shared


elementwise = functools.partial(enter, kind="elementwise")
_UNIT = (-1.0, 1.0)
_POSITIVE = (0.0, np.inf)
_AFTER_FIRST = range(1, 99)
_AFTER_SECOND = range(2, 99)
_COPY: dict[str, Any] = {
    "linear": "jointly",
    "copies": True,
    "picks": True,
    "numpy": numpy_rules.same,
}

# Sums and products.
elementwise("add", linear="jointly", neutral=0, commutes=True, monotone=True, numpy="real")
elementwise(
    "add_any",
    linear="jointly",
    neutral=0,
    commutes=True,
    monotone=True,
    numpy="real add",
)
elementwise("sub", linear="jointly", neutral=0, monotone=True, numpy="real subtract")
elementwise("neg", linear="jointly", monotone=True, numpy="real negative")
elementwise(
    "mul",
    linear="each",
    neutral=1,
    commutes=True,
    monotone=True,
    numpy="real multiply",
)
elementwise("div", neutral=1, cost=0.3, numpy="float divide")
elementwise("rem", cost=3.0, jumps=True, numpy="f fmod")  # of floats XLA:CPU calls fmod
elementwise("mulhi", commutes=True)
elementwise("square", even=True, slope=slopes.far_from_zero, numpy="real")
elementwise(
    "one_minus_square",
    definition=definitions.one_minus_square,
    even=True,
    slope=slopes.far_from_zero,
    numpy=numpy_rules.one_minus_square,
)
elementwise("integer_pow", even=True, slope=slopes.power, numpy=numpy_rules.integer_pow)
elementwise("polynomial", definition=definitions.polynomial)
elementwise("pow", cost=8.0, numpy="fc power")

# Functions. Costs were measured on XLA:CPU.
elementwise(
    "tanh",
    cost=1.0,
    activation=True,
    image=_UNIT,
    slope=slopes.near_zero,
    numpy="float",
)
elementwise(
    "logistic",
    cost=1.0,
    activation=True,
    image=(0.0, 1.0),
    slope=slopes.near_zero,
    numpy=numpy_rules.logistic,
)
elementwise(
    "exp",
    cost=1.0,
    activation=True,
    image=_POSITIVE,
    monotone=True,
    slope=slopes.at_upper_end,
    numpy="float",
)
elementwise(
    "expm1",
    cost=1.0,
    activation=True,
    image=(-1.0, np.inf),
    slope=slopes.at_upper_end,
    numpy="float",
)
elementwise("log1p", cost=1.0, activation=True, slope=slopes.above(-1), numpy="float")
elementwise(
    "erf",
    cost=1.0,
    activation=True,
    image=_UNIT,
    slope=slopes.near_zero,
    numpy="f scipy.special.erf",
)
elementwise(
    "sin cos",
    cost=3.5,
    activation=True,
    image=_UNIT,
    slope=slopes.wave,
    numpy="float",
)
elementwise(
    "sqrt",
    cost=0.3,
    activation=True,
    image=_POSITIVE,
    slope=slopes.above(0),
    numpy="float",
)
elementwise(
    "rsqrt",
    cost=0.3,
    activation=True,
    image=_POSITIVE,
    slope=slopes.above(0),
    numpy=numpy_rules.rsqrt,
)
elementwise("log", cost=1.0, slope=slopes.above(0), numpy="float")
elementwise("log2", definition=definitions.log2, cost=1.0)
elementwise(
    "exp2",
    definition=definitions.exp2,
    cost=1.0,
    image=_POSITIVE,
    numpy="f",
)
elementwise("cbrt", cost=1.0, slope=slopes.near_zero, numpy="f")
elementwise("tan", definition=definitions.tan, cost=7.0, numpy="float")
elementwise("sinh cosh", cost=4.0, slope=slopes.far_from_zero, numpy="float")
elementwise("asin", cost=16.0, slope=slopes.arc)
elementwise("acos", cost=16.0, slope=slopes.arc, rounds_inside=True)
elementwise("atan", cost=16.0, slope=slopes.near_zero)
elementwise("asinh", cost=6.0, slope=slopes.near_zero)
elementwise("acosh", cost=6.0, slope=slopes.above(1), rounds_inside=True)
elementwise("atanh", cost=6.0, slope=slopes.inside)
elementwise("atan2", cost=16.0, numpy="f arctan2")
elementwise(
    "erfc",
    cost=4.0,
    image=(0.0, 2.0),
    slope=slopes.near_zero,
    numpy="f scipy.special.erfc",
)
elementwise("erf_inv", cost=4.0, slope=slopes.inside)
elementwise("lgamma", cost=16.0, numpy="f scipy.special.gammaln")
elementwise("digamma", cost=16.0, numpy="f scipy.special.digamma")
# Series and iterations, measured with jax 0.12.
enter("bessel_i0e", "special", cost=5.0, slope=slopes.constant(1.0))
enter("bessel_i1e", "special", cost=5.0, slope=slopes.constant(0.5))
enter("igamma igammac", "special", cost=500.0)
enter("igamma_grad_a polygamma", "special", cost=1000.0)
enter("regularized_incomplete_beta zeta", "special", cost=700.0)

# What picks, compares and rounds.
elementwise("abs", image=_POSITIVE, even=True, numpy="real")
elementwise("sign", jumps=True, image=_UNIT, numpy="if")
elementwise(
    "max",
    picks=True,
    neutral=-np.inf,
    commutes=True,
    monotone=True,
    numpy="iufV maximum",
)
elementwise(
    "min",
    picks=True,
    neutral=np.inf,
    commutes=True,
    monotone=True,
    numpy="iufV minimum",
)
elementwise("clamp", picks=True, monotone=True, numpy=numpy_rules.clamp)
elementwise(
    "select_n",
    linear="jointly",
    positions=(0,),
    picks=True,
    numpy=numpy_rules.select_n,
)
elementwise("ceil floor", jumps=True, numpy="fV")
elementwise("round", jumps=True)
elementwise("eq", jumps=True, commutes=True, numpy="any equal")
elementwise("ne", jumps=True, commutes=True, numpy="any not_equal")
_ORDERS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
for _name, _function in _ORDERS.items():
    elementwise(_name, jumps=True, numpy=f"any {_function}")
elementwise("le_to lt_to", jumps=True)  # by the bits: -0 is before 0, and NaN is last
elementwise("is_finite", jumps=True, numpy="fV isfinite")
elementwise("and", commutes=True, numpy="b logical_and")
elementwise("or", commutes=True, numpy="b logical_or")
elementwise("xor", commutes=True)
elementwise("not", numpy="b logical_not")
elementwise("shift_left shift_right_arithmetic shift_right_logical")
elementwise("clz population_count")
elementwise("nextafter", stops=True)

# Copies, types and complex numbers. A conversion is linear if its types are inexact (`is_linear`).
elementwise("copy name", **_COPY, cost=0.0)
elementwise("stop_gradient", **_COPY, stops=True, cost=0.0)
elementwise("convert_element_type", picks=True, numpy=numpy_rules.convert_element_type)
elementwise("reduce_precision", picks=True)
elementwise("bitcast_convert_type", stops=True)
elementwise("conj imag real", numpy="c")
elementwise("complex")

# Views and placements.
enter(
    "reshape",
    "view",
    linear="jointly",
    reshapes=True,
    axes=shapes.reshape,
    resize=shapes.result_shape("new_sizes"),
    numpy=numpy_rules.reshape,
)
enter(
    "squeeze",
    "view",
    linear="jointly",
    reshapes=True,
    axes=shapes.without("dimensions"),
    numpy=numpy_rules.with_parameter(np.squeeze, "dimensions"),
)
enter(
    "broadcast_in_dim",
    "view",
    linear="jointly",
    reshapes=True,
    axes=shapes.broadcast,
    resize=shapes.result_shape("shape"),
    numpy=numpy_rules.broadcast_in_dim,
)
enter("broadcast_to", "view", linear="jointly")
enter("tile", "view", linear="jointly", axes=shapes.tile)
enter(
    "transpose",
    "view",
    linear="jointly",
    axes=shapes.transpose,
    numpy=numpy_rules.with_parameter(np.transpose, "permutation"),
)
enter(
    "slice",
    "view",
    linear="jointly",
    cuts=True,
    axes=shapes.same,
    resize=shapes.ends_of_slice,
    numpy=numpy_rules.strided_slice,
)
enter(
    "split",
    "view",
    linear="jointly",
    cuts=True,
    axes=shapes.along_others("axis"),
    numpy=numpy_rules.split,
)
enter(
    "unstack",
    "view",
    linear="jointly",
    cuts=True,
    axes=shapes.without("axis"),
    numpy=numpy_rules.unstack,
)
enter(
    "concatenate",
    "placement",
    linear="jointly",
    picks=True,
    axes=shapes.along_others("dimension"),
    numpy=numpy_rules.joined(np.concatenate, "dimension"),
)
enter("pad", "placement", linear="jointly", picks=True, axes=shapes.pad, numpy=numpy_rules.pad)
enter(
    "rev",
    "placement",
    linear="jointly",
    picks=True,
    axes=shapes.along_others("dimensions"),
    numpy=numpy_rules.with_parameter(np.flip, "dimensions"),
)
# An operation of its own, as XLA writes it.
enter(
    "stack",
    "placement",
    linear="jointly",
    picks=True,
    cost=None,
    axes=shapes.stack,
    numpy=numpy_rules.joined(np.stack, "axis"),
)
enter(
    "iota",
    "placement",
    axes=shapes.nothing,
    resize=shapes.result_shape("shape"),
    numpy=numpy_rules.iota,
)

# Reductions. XLA:CPU does not vectorize the ones with `cheap=False`.
enter("reduce_sum", "reduction", linear="jointly", numpy=numpy_rules.reduction(np.sum))
enter("reduce_max", "reduction", picks=True, numpy=numpy_rules.reduction(np.max))
enter("reduce_min", "reduction", picks=True, numpy=numpy_rules.reduction(np.min, "iuf"))
enter("reduce_and", "reduction", numpy=numpy_rules.reduction(np.all, "b"))
enter("reduce_or", "reduction", numpy=numpy_rules.reduction(np.any, "b"))
enter("reduce_xor", "reduction")
enter("reduce_prod argmax argmin", "reduction", cheap=False)
enter("cumsum", "running", cost=7.0, linear="jointly", numpy=numpy_rules.cumsum)
enter("cumprod cumlogsumexp", "running", cost=7.0)
enter("cummax cummin", "running", cost=7.0, picks=True)
enter("reduce_window_sum", "window", linear="jointly")
enter("reduce_window_max reduce_window_min", "window")
enter("select_and_gather_add select_and_scatter_add", "window")

# Products, solvers and orders.
enter("dot_general", "product", linear="each", axes=shapes.product, numpy=numpy_rules.dot_general)
enter("rounded_product", "product", linear="each", numpy=numpy_rules.rounded_product)
enter("conv_general_dilated", "product", linear="each", calls=6.0)
enter("ragged_dot_general", "product", linear="each")
enter("cholesky", "solver", numpy=numpy_solvers.cholesky)
enter("triangular_solve", "solver", numpy=numpy_solvers.triangular_solve)
enter("eig eigh lu qr svd", "solver")
enter("fft", "transform")
enter("sort", "order", cost=8.0)  # for each doubling of the length
enter("top_k approx_top_k", "order", cost=7.0)

# Lookups and updates. A slice is a copy.
enter("gather", "lookup", linear="jointly", positions=(1,), numpy=numpy_indexing.gather)
enter(
    "dynamic_slice",
    "lookup",
    linear="jointly",
    positions=_AFTER_FIRST,
    picks=True,
    heavy=False,
    numpy=numpy_indexing.dynamic_slice,
)
enter(
    "dynamic_update_slice",
    "update",
    calls=0.0,
    linear="jointly",
    positions=_AFTER_SECOND,
    picks=True,
    numpy=numpy_indexing.dynamic_update_slice,
)
enter(
    "scatter",
    "update",
    linear="jointly",
    positions=(1,),
    numpy=numpy_indexing.scatter(operator.setitem),
)
enter(
    "scatter-add",
    "update",
    linear="jointly",
    positions=(1,),
    numpy=numpy_indexing.scatter(np.add.at),
)
enter("scatter-sub", "update", linear="jointly", positions=(1,))
enter("scatter-max scatter-min scatter-mul", "update", positions=(1,))

# Random numbers.
enter("random_bits random_fold_in random_split threefry2x32", "draw")
enter("random_unwrap random_wrap", "key")
# Drawn by rejection, at one step after the other: 200 ns with jax 0.12.
enter("random_gamma", "unknown", cost=300.0)

# What stays in the loop.
enter("all_gather all_to_all pmax pmin ppermute psum psum_invariant", "collective")
enter("axis_index", "collective", cost=0.0)
enter("pvary", "collective", **_COPY, cost=0.0, axes=shapes.same)
enter("optimization_barrier", "barrier", **{**_COPY, "numpy": numpy_rules.each})
enter(
    "custom_partitioning debug_callback debug_print ffi_call io_callback pure_callback", "library"
)
enter("cholesky_update geqp3 geqrf hessenberg householder_product ormqr", "library")
enter("schur symmetric_product tridiagonal tridiagonal_solve", "library")
enter("cond scan while", "control")
