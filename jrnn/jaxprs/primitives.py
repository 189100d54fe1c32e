"""Tables of primitives: which may move out of a loop, which are worth moving, linear, or cheap to repeat.

A primitive that is in no table stays in the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs

# One value per element of the operands. Cheap enough to be computed again in the reverse loop instead of stored.
# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt",
    "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "polynomial", "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# They pick, repeat or reorder elements of the operand: free where the result is used, a copy where it is stored.
VIEWS = frozenset((
    "broadcast_in_dim", "broadcast_to", "expand_dims", "reshape", "slice", "split", "squeeze", "tile", "transpose",
    "unstack",
))
_CHEAP = ELEMENTWISE | VIEWS | frozenset((
    "concatenate", "iota", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "reduce_xor",
    "rev", "stack",
))
_CONTRACTIONS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))
GENERATORS = frozenset(("random_bits", "random_fold_in", "random_split"))  # of random numbers
# Contractions, lookups, solvers and draws.
_HEAVY = _CONTRACTIONS | GENERATORS | frozenset((
    "cholesky", "eig", "eigh", "fft", "gather", "lu", "qr", "svd", "triangular_solve",
))
_PURE = frozenset((
    "approx_top_k", "argmax", "argmin", "bessel_i0e", "bessel_i1e", "cumlogsumexp", "cummax", "cummin", "cumprod",
    "cumsum", "dynamic_slice", "dynamic_update_slice", "igamma", "igamma_grad_a", "igammac", "polygamma",
    "random_unwrap", "random_wrap", "reduce_prod", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    "regularized_incomplete_beta", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
    "select_and_gather_add", "select_and_scatter_add", "sort", "threefry2x32", "top_k", "zeta",
))
# fmt: on
# Functions that cost many instructions per value: worth computing for several slices at once.
ACTIVATIONS = frozenset(("logistic", "tanh", "exp", "log1p", "expm1", "erf", "sin", "cos", "sqrt", "rsqrt"))
# Linear in their only operand.
_LINEAR = frozenset((
    "broadcast_in_dim", "copy", "copy_p", "neg", "reduce_sum", "reshape", "rev", "slice", "split", "squeeze", "transpose",
))  # fmt: skip
# For floating-point operands, the result jumps where an operand changes by a rounding error.
_DISCONTINUOUS = frozenset((
    "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "rem", "round", "sign",
))  # fmt: skip
ADDITIONS = frozenset(("add", "add_any"))
COPIES = frozenset(("copy", "copy_p", "name"))  # of the operand
# They communicate over devices or mapped axes, and stay in the loop.
COLLECTIVES = frozenset((
    "all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "pvary",
))  # fmt: skip
_MOVABLE = _CHEAP | _HEAVY | _PURE


def is_movable(eqn: jaxprs.Eqn) -> bool:
    """Returns True if an equation may be evaluated for all steps, under `vmap` over time."""
    return eqn.primitive.name in _MOVABLE and not eqn.effects and not draws_differently_under_vmap(eqn)


def why_it_stays(eqn: jaxprs.Eqn) -> str:
    """Returns the reason why an equation is not movable."""
    if eqn.effects:
        return "it has side effects"
    if draws_differently_under_vmap(eqn):
        return "only threefry keys draw the same numbers under vmap"
    if any(True for _ in jaxprs.sub_jaxprs(eqn)):
        return "it is control flow"
    return "a collective" if eqn.primitive.name in COLLECTIVES else "jrnn does not know this primitive"


def is_known(eqn: jaxprs.Eqn) -> bool:
    return eqn.primitive.name in _MOVABLE or eqn.primitive.name in COLLECTIVES


def draws_differently_under_vmap(eqn: jaxprs.Eqn) -> bool:
    """Returns True if `vmap` changes the random numbers: for all keys except JAX's default, threefry's."""
    extended = [a.aval.dtype for a in eqn.invars if not isinstance(a.aval.dtype, jnp.dtype)]  # others have no keys
    return any(jnp.issubdtype(dtype, jax.dtypes.prng_key) and dtype.name != "key<fry>" for dtype in extended)


def is_heavy(eqn: jaxprs.Eqn) -> bool:
    """Returns True for contractions, lookups, solvers and draws. A split names those that leave a loop, and repeats none."""
    return eqn.primitive.name in _HEAVY


def is_contraction(eqn: jaxprs.Eqn) -> bool:
    return eqn.primitive.name in _CONTRACTIONS


def is_cheap(eqn: jaxprs.Eqn) -> bool:
    return eqn.primitive.name in _CHEAP


def is_discontinuous(eqn: jaxprs.Eqn) -> bool:
    """Returns True if the result jumps where a floating-point operand changes by a rounding error."""
    name = eqn.primitive.name
    jumps = name in _DISCONTINUOUS or (name == "convert_element_type" and not _is_inexact(eqn.outvars[0]))
    return jumps and any(map(_is_inexact, eqn.invars))


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def is_view(eqn: jaxprs.Eqn) -> bool:
    return eqn.primitive.name in VIEWS


def is_retyping(eqn: jaxprs.Eqn) -> bool:
    """Returns True for a conversion that changes only whether a type is weak."""
    same = all(a.aval.dtype == eqn.outvars[0].aval.dtype for a in eqn.invars)
    return eqn.primitive.name == "convert_element_type" and same


def is_linear(eqn: jaxprs.Eqn) -> bool:
    """Returns True if an equation is linear in its only operand. Floating-point conversions count as linear."""
    if eqn.primitive.name == "convert_element_type":
        return _is_inexact(eqn.invars[0]) and _is_inexact(eqn.outvars[0])
    return eqn.primitive.name in _LINEAR and len(eqn.invars) == 1


def registering(table: dict[str, Callable]) -> Callable[..., Callable[[Callable], Callable]]:
    """Returns the decorator `@rule(*names)`, which enters a function into `table` under each of the names."""

    def rule(*names: str) -> Callable[[Callable], Callable]:
        def register(function: Callable) -> Callable:
            for name in names:
                assert name not in table, f"{name} is registered twice"
                table[name] = function
            return function

        return register

    return rule
