"""Selecting: rows by a boolean mask, elements by a condition; Unique, Mod, and checks for NaN and infinity.

The number of rows that a mask selects is part of the result's shape, so BooleanMask needs a mask that is known when the net
is traced.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.ops.lengths import per_row
from jrnn.nets.ops.values import (
    STRINGS,
    as_float,
    check_integers,
    check_rank,
    check_same_shape,
    describe,
    is_concrete,
    raise_if,
)
from jrnn.nets.registry import SEED, gradient, op


def _check_mask(mask: Any) -> None:
    check_rank(mask, 1, "mask")
    raise_if(mask.dtype != bool, "it must hold booleans", mask=mask)


@op("BooleanMask", outputs=(1, 2), dynamic=True, gradient="BooleanMaskGradient(mask, dy)")
def boolean_mask(data, mask):
    """The rows of `data` whose mask is true, and their indices."""
    _check_mask(mask)
    if mask.shape != data.shape[:1]:
        raise OpError(
            f"data is {describe(data)}, mask {describe(mask)}; mask must have one element per row of data"
        )
    chosen = np.flatnonzero(np.asarray(mask))
    return data[chosen], chosen.astype(np.int64)


def put_where(mask: Any, rows: Any, otherwise: Any, name: str) -> Any:
    """Puts the rows, in order, where the mask is true, and the rows of `otherwise` elsewhere."""
    if is_concrete(mask):
        count = int(np.sum(np.asarray(mask)))
        if count != rows.shape[0]:
            raise OpError(
                f"{name} selects {count} elements and has {rows.shape[0]} values; give as many"
            )
    if rows.shape[0] == 0:
        return otherwise
    taken = jnp.take(rows, jnp.cumsum(mask) - 1, axis=0, mode="clip")
    return jnp.where(per_row(mask, taken), taken, otherwise)


@op("BooleanMaskGradient")
def boolean_mask_gradient(mask, dy):
    """Puts rows back where the mask is true, and zeros elsewhere."""
    _check_mask(mask)
    return put_where(mask, dy, jnp.zeros(mask.shape + dy.shape[1:], dy.dtype), "mask")


@op("BooleanUnmask", gradient="stops")
def boolean_unmask(*pairs):
    """Merges vectors, given as mask_1, values_1, mask_2, values_2, ...

    Each element is the next one of the first vector whose mask is true there.
    """
    masks = pairs[::2]
    values = pairs[1::2]
    raise_if(
        not pairs or len(masks) != len(values),
        f"takes masks and values in pairs, was given {len(pairs)} inputs",
    )
    free = np.ones(masks[0].shape, bool)
    merged = jnp.zeros(masks[0].shape, values[0].dtype)
    for k, (mask, vector) in enumerate(zip(masks, values)):
        _check_mask(mask)
        check_rank(vector, 1, f"values #{k}")
        if mask.shape != masks[0].shape or vector.dtype != values[0].dtype:
            raise OpError(
                f"mask #{k} is {describe(mask)}, values {describe(vector)}; give one length and type"
            )
        merged = put_where(mask & free, vector, merged, f"mask #{k}")
        free = free & ~mask
    if is_concrete(free) and np.any(np.asarray(free)):
        raise OpError(f"no mask is true at position {int(np.argmax(np.asarray(free)))}")
    return jax.lax.stop_gradient(merged)


@op("Unique", outputs=(1, 2), gradient="forbidden", dynamic=True)
def unique(x):
    """The distinct values of a vector of integers, sorted, and for each element the index of its value among them."""
    check_rank(x, 1, "x")
    check_integers(x, "x")
    values, index = np.unique(np.asarray(x), return_inverse=True)
    return values, index.astype(np.int32)


def _choose(rows: Any, x: Any, y: Any) -> Any:
    strings = x.dtype.kind in STRINGS and y.dtype.kind in STRINGS
    raise_if(x.dtype != y.dtype and not strings, "they must hold the same type", x=x, y=y)
    if strings:
        return np.where(rows, x, y)
    return jnp.where(rows, x, y)


def _by_rows(condition: Any, x: Any, y: Any) -> Any:
    """Row k of x where element k of the vector `condition` is true, else row k of y."""
    check_same_shape("x and y", x, y)
    if condition.shape != x.shape[:1]:
        raise OpError(
            f"the condition is {describe(condition)}; it must be a vector with one element for each row of x"
        )
    return _choose(per_row(condition, x), x, y)


def _check_boolean(condition: Any) -> None:
    if condition.dtype != bool:
        raise OpError(f"the condition is {describe(condition)}; it must hold booleans")


@op("Where", inplace={0: 1})
def where(condition, x, y, *, broadcast_on_rows: bool = False):
    _check_boolean(condition)
    if broadcast_on_rows:
        return _by_rows(condition, x, y)
    check_same_shape("the condition, x and y", condition, x, y)
    return _choose(condition, x, y)


@gradient("Where")
def _(g):
    """Caffe2 has no gradient of Where. Zeros are chosen, not multiplied: a NaN of the other branch does not get through."""
    condition = g.input(0)
    dy = g.grad_output(0)
    zeros = g.temporary(dy + "_zeros")
    g.emit(SEED, [dy], [zeros], copy_args=False, value=0.0)
    g.emit("Where", [condition, dy, zeros], [g.grad_input(1)])
    g.emit("Where", [condition, zeros, dy], [g.grad_input(2)])


@op("Conditional", gradient="stops")
def conditional(condition, x, y):
    _check_boolean(condition)
    chosen = _by_rows(condition, x, y)
    return chosen if chosen.dtype.kind in STRINGS else jax.lax.stop_gradient(chosen)


@op("Mod", inplace={0: 0})
def mod(x, *, divisor: int, sign_follow_divisor: bool = False):
    """The remainder of a division that rounds towards zero, or with sign_follow_divisor, down."""
    check_integers(x, "x")
    raise_if(divisor == 0, "argument 'divisor' is 0; it must not be")
    by = jnp.asarray(divisor, x.dtype)
    return jnp.mod(x, by) if sign_follow_divisor else jnp.fmod(x, by)


op("IsNaN")(lambda x: jnp.isnan(as_float(x)).astype(jnp.uint8))


@op("ReplaceNaN", gradient="forbidden", inplace={0: 0})
def replace_nan(x, *, value: float = 0.0):
    return jnp.where(jnp.isnan(as_float(x)), jnp.asarray(value, x.dtype), x)


def _check_finite(x: Any) -> None:
    """Raises OpError for an infinity or a NaN. Traced values are not known and pass."""
    if is_concrete(x) and not np.isfinite(np.asarray(x)).all():
        wrong = np.flatnonzero(~np.isfinite(np.asarray(x)))
        raise OpError(
            f"{wrong.size} elements of x are not finite; element {wrong[0]} is {np.ravel(x)[wrong[0]]}"
        )


@op("NanCheck", copies=True, inplace={0: 0}, gradient="NanCheck(dy)")
def nan_check(x, *to_print):
    _check_finite(as_float(x))
    return x


@op("EnforceFinite", outputs=0, gradient="forbidden")
def enforce_finite(x):
    _check_finite(as_float(x))
    return ()
