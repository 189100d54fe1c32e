"""Comparisons, logic and bits, without gradients. They broadcast as the arithmetic operators do."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.broadcasting import binary
from jrnn.ops.checks import describe
from jrnn.registry import op


def _register(type: str, fn: Callable, kinds: str = "iufb", wanted: str = "numbers or booleans", **traits: Any) -> None:
    @op(type, gradient="forbidden", **traits)
    def compare(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
        return binary(fn, a, b, kinds, wanted, broadcast, axis, axis_str, order)


_register("EQ", jnp.equal)
_register("NE", jnp.not_equal)
_register("LT", jnp.less)
_register("LE", jnp.less_equal)
_register("GT", jnp.greater)
_register("GE", jnp.greater_equal)
_register("And", jnp.logical_and, "b", "booleans")
_register("Or", jnp.logical_or, "b", "booleans")
_register("Xor", jnp.logical_xor, "b", "booleans", inplace={0: 0})
_register("BitwiseAnd", jnp.bitwise_and, "ib", "integers or booleans", inplace={0: 0})
_register("BitwiseOr", jnp.bitwise_or, "ib", "integers or booleans", inplace={0: 0})
_register("BitwiseXor", jnp.bitwise_xor, "ib", "integers or booleans", inplace={0: 0})


@op("Not", gradient="forbidden")
def not_(x):
    if x.dtype != bool:
        raise OpError(f"x is {describe(x)}; it must hold booleans")
    return jnp.logical_not(x)
