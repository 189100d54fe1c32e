"""Where, Conditional, Mod, and checks for NaN and infinity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.values import STRINGS, as_float, check_integers, check_same_shape, is_concrete
from jrnn.registry import op


def _choose(rows: Any, x: Any, y: Any) -> Any:
    strings = x.dtype.kind in STRINGS and y.dtype.kind in STRINGS
    if x.dtype != y.dtype and not strings:
        raise OpError(f"x is {describe(x)} and y is {describe(y)}; they must hold the same type")
    if strings:
        return np.where(rows, x, y)
    return jnp.where(rows, x, y)


def _by_rows(condition: Any, x: Any, y: Any) -> Any:
    """Row k of x or of y, as element k of the vector `condition` says."""
    check_same_shape("x and y", x, y)
    if condition.shape != x.shape[:1]:
        raise OpError(f"the condition is {describe(condition)}; it must be a vector with one element for each row of x")
    return _choose(jnp.reshape(condition, (-1, *(1,) * (x.ndim - 1))), x, y)


def _check_boolean(condition: Any) -> None:
    if condition.dtype != bool:
        raise OpError(f"the condition is {describe(condition)}; it must hold booleans")


@op("Where", gradient="forbidden", inplace={0: 1})
def where(condition, x, y, *, broadcast_on_rows: bool = False):
    _check_boolean(condition)
    if broadcast_on_rows:
        return _by_rows(condition, x, y)
    check_same_shape("the condition, x and y", condition, x, y)
    return _choose(condition, x, y)


@op("Conditional", gradient="stops")
def conditional(condition, x, y):
    _check_boolean(condition)
    chosen = _by_rows(condition, x, y)
    return chosen if chosen.dtype.kind in STRINGS else jax.lax.stop_gradient(chosen)


@op("Mod", inplace={0: 0})
def mod(x, *, divisor: int, sign_follow_divisor: bool = False):
    """The remainder of a division that rounds to zero, or with sign_follow_divisor, down."""
    check_integers(x, "x")
    if divisor == 0:
        raise OpError("argument 'divisor' is 0; it must not be")
    by = jnp.asarray(divisor, x.dtype)
    return jnp.mod(x, by) if sign_follow_divisor else jnp.fmod(x, by)


@op("IsNaN")
def is_nan(x):
    return jnp.isnan(as_float(x)).astype(jnp.uint8)


@op("ReplaceNaN", gradient="forbidden", inplace={0: 0})
def replace_nan(x, *, value: float = 0.0):
    return jnp.where(jnp.isnan(as_float(x)), jnp.asarray(value, x.dtype), x)


def _check_finite(x: Any) -> None:
    """Raises OpError for an infinity or a NaN; what is traced is let through, as its values are not known."""
    if is_concrete(x) and not np.isfinite(np.asarray(x)).all():
        wrong = np.flatnonzero(~np.isfinite(np.asarray(x)))
        raise OpError(
            f"{wrong.size} elements of x are not finite; the first is {np.ravel(x)[wrong[0]]}, element {wrong[0]}"
        )


@op("NanCheck", copies=True, inplace={0: 0}, gradient="NanCheck(dy)")
def nan_check(x, *to_print):
    _check_finite(as_float(x))
    return x


@op("EnforceFinite", outputs=0, gradient="forbidden")
def enforce_finite(x):
    _check_finite(as_float(x))
    return ()
