"""Primitives that Caffe2 has no operator for, but whose definition by other primitives it can compute.

The definitions are JAX functions, which are traced and converted in their place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emit import BOOL, FLOAT, Emitter
from jrnn.convert.flat import Node
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError


def _truncated(x: Any) -> Any:
    return jnp.where(x < 0, jnp.ceil(x), jnp.floor(x))


def _round_to_even(x: Any) -> Any:
    below = jnp.floor(x)
    rest, odd = x - below, below - 2 * jnp.floor(below * 0.5)
    return below + jnp.where(rest == 0.5, odd, (rest > 0.5).astype(x.dtype))


def _round_from_zero(x: Any) -> Any:
    size = jnp.abs(x)
    below = jnp.floor(size)
    return jnp.sign(x) * (below + (size - below >= 0.5).astype(x.dtype))


@rule("round")
def _(e: Emitter, node: Node, x):
    even = node.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return e.call(_round_to_even if even else _round_from_zero, x)


def _remainder(a: Any, b: Any) -> Any:
    rest = a - _truncated(a / b) * b
    # the quotient is rounded: where that carried it over a whole number, the rest is one divisor off
    size = jnp.abs(b)
    rest = jnp.where(jnp.abs(rest) >= size, rest - jnp.sign(rest) * size, rest)
    return jnp.where(rest * jnp.sign(a) < 0, rest + jnp.sign(a) * size, rest)


@rule("rem")
def _(e: Emitter, node: Node, a, b):
    return e.call(_remainder if a.dtype == FLOAT else lambda a, b: a - lax.div(a, b) * b, a, b)


def _atan2(y: Any, x: Any) -> Any:
    of_ratio = jnp.arctan(y / jnp.where(x == 0, 1.0, x))
    turned = of_ratio + jnp.where(x < 0, jnp.where(y < 0, -np.pi, np.pi), 0.0)
    return jnp.where(x == 0, jnp.sign(y) * (np.pi / 2), turned)


_DEFINITIONS: dict[str, Callable] = {
    "asinh": lambda x: jnp.sign(x) * jnp.log(jnp.abs(x) + jnp.sqrt(x * x + 1.0)),
    "acosh": lambda x: jnp.log(x + jnp.sqrt(x * x - 1.0)),
    "atanh": lambda x: 0.5 * jnp.log((1.0 + x) / (1.0 - x)),
    "atan2": _atan2,
}


@rule(*_DEFINITIONS)
def _(e: Emitter, node: Node, *xs):
    return e.call(_DEFINITIONS[node.name], *xs)


# Reductions and running results by halves --------------------------------------------------------------------------------


def halved(combine: Callable, axes: tuple[int, ...], x: Any) -> Any:
    """The elements along axes combined, first with second half, until one is left."""
    for axis in sorted(axes, reverse=True):
        while (size := x.shape[axis]) > 1:
            half = size // 2
            low, high = lax.slice_in_dim(x, 0, half, axis=axis), lax.slice_in_dim(x, half, 2 * half, axis=axis)
            odd = [lax.slice_in_dim(x, size - 1, size, axis=axis)] if size % 2 else []
            x = jnp.concatenate([combine(low, high), *odd], axis)
        x = jnp.squeeze(x, axis)
    return x


@rule("reduce_prod", "reduce_xor")
def _(e: Emitter, node: Node, x):
    combine = jnp.multiply if node.name == "reduce_prod" else lax.bitwise_xor
    return e.call(partial(halved, combine, node.params["axes"]), x)


def running(combine: Callable, axis: int, reverse: bool, x: Any) -> Any:
    """Each element combined with all before it: with the one before, then with the two, the four before that."""
    size, step = x.shape[axis], 1
    cut = partial(lax.slice_in_dim, axis=axis)
    while step < size:
        if reverse:
            both = combine(cut(x, 0, size - step), cut(x, step, size))
            x = jnp.concatenate([both, cut(x, size - step, size)], axis)
        else:
            both = combine(cut(x, step, size), cut(x, 0, size - step))
            x = jnp.concatenate([cut(x, 0, step), both], axis)
        step *= 2
    return x


_COMBINES = {
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


@rule(*_COMBINES)
def _(e: Emitter, node: Node, x):
    return e.call(partial(running, _COMBINES[node.name], node.params["axis"], node.params["reverse"]), x)


# Shifts of bits --------------------------------------------------------------------------------------------------------


def _shift_right(x: Any, amount: Any, powers: Any) -> Any:
    for part in (amount // 2, amount - amount // 2):  # 2**31 is no int32, but both halves are
        divisor = powers[part]
        quotient = lax.div(x, divisor)
        x = jnp.where(quotient * divisor > x, quotient - 1, quotient)
    return x


def _shift_right_logical(x: Any, amount: Any, powers: Any) -> Any:
    last = len(powers) - 1
    return _shift_right(x, amount, powers) & (powers[last - amount] * 2 - 1)


_SHIFTS = {
    "shift_left": lambda x, amount, powers: x * powers[amount],
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right_logical,
}


@rule(*_SHIFTS)
def _(e: Emitter, node: Node, x, amount):
    if x.dtype == BOOL:
        raise ConversionError(f"{node.name} of booleans: convert to int32 before")
    bits = x.dtype.itemsize * 8
    powers = np.asarray([1 << k for k in range(bits - 1)] + [-(1 << (bits - 1))], x.dtype)
    return e.call(lambda x, amount: _SHIFTS[node.name](x, amount, jnp.asarray(powers)), x, amount)
