"""Comparisons and logic: boolean results, without gradients. They broadcast as the arithmetic operators do."""

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.broadcasting import check_kinds, match, spread
from jrnn.ops.checks import describe
from jrnn.registry import op


def _binary(fn, a, b, kinds, wanted, broadcast, axis, axis_str, order):
    check_kinds(a, b, kinds, wanted)
    m = match(a, b, broadcast, axis, axis_str, order)
    return fn(spread(a, m.a, m.out), spread(b, m.b, m.out))


def _comparison(type, fn, kinds="iufb", wanted="numbers or booleans"):
    @op(type, gradient="forbidden")
    def compare(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
        return _binary(fn, a, b, kinds, wanted, broadcast, axis, axis_str, order)

    return compare


equal = _comparison("EQ", jnp.equal)
not_equal = _comparison("NE", jnp.not_equal)
less = _comparison("LT", jnp.less)
less_equal = _comparison("LE", jnp.less_equal)
greater = _comparison("GT", jnp.greater)
greater_equal = _comparison("GE", jnp.greater_equal)
and_ = _comparison("And", jnp.logical_and, "b", "booleans")
or_ = _comparison("Or", jnp.logical_or, "b", "booleans")


@op("Not", gradient="forbidden")
def not_(x):
    if x.dtype != bool:
        raise OpError(f"x is {describe(x)}; it must hold booleans")
    return jnp.logical_not(x)
