"""Sum, Add, Sub, Mul and Div, with their gradients.

The binary ones broadcast: see `broadcasting.match`. Their gradient operators read the gradient first, then the inputs.
"""

import jax.numpy as jnp
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.broadcasting import binary, collect, match, spread
from jrnn.ops.checks import describe
from jrnn.registry import gradient, op


@op("Sum", inplace={0: 0})
def sum_(x, *xs):
    for other in xs:
        if other.shape != x.shape:
            raise OpError(f"adds {describe(x)} and {describe(other)}; Sum does not broadcast, shapes must be equal")
        x = jnp.add(x, other)
    return jnp.asarray(x)


@gradient("Sum")
def _(g):
    for k in range(len(g.op.inputs)):
        g.set_grad(k, g.grad_output_slice(0))


def _binary(fn, a, b, *how):
    return binary(fn, a, b, "iuf", "numbers", *how)


@op("Add", inplace={0: 0}, gradient="AddGradient(dy, a, b) -> a, b")
def add(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    return _binary(jnp.add, a, b, broadcast, axis, axis_str, order)


@op("AddGradient", outputs=2, inplace={0: 0})
def add_gradient(dc, a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    m = match(a, b, broadcast, axis, axis_str, order)
    return collect(dc, m.a, a.shape), collect(dc, m.b, b.shape)


@op("Sub", inplace={0: 0}, gradient="SubGradient(dy, a, b) -> a, b")
def sub(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    return _binary(jnp.subtract, a, b, broadcast, axis, axis_str, order)


@op("SubGradient", outputs=2, inplace={0: 0})
def sub_gradient(dc, a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    m = match(a, b, broadcast, axis, axis_str, order)
    return collect(dc, m.a, a.shape), collect(-dc, m.b, b.shape)


@op("Mul", inplace={0: 0}, gradient="MulGradient(dy, a, b) -> a, b")
def mul(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    return _binary(jnp.multiply, a, b, broadcast, axis, axis_str, order)


@op("MulGradient", outputs=2, inplace={0: 0})
def mul_gradient(dc, a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    m = match(a, b, broadcast, axis, axis_str, order)
    da, db = dc * spread(b, m.b, m.out), dc * spread(a, m.a, m.out)
    return collect(da, m.a, a.shape), collect(db, m.b, b.shape)


@op("Div", inplace={0: 0}, gradient="DivGradient(dy, a, b, y) -> a, b")
def div(a, b, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    return _binary(_divide, a, b, broadcast, axis, axis_str, order)


def _divide(a, b):
    """Integers are truncated towards zero, as in C."""
    dtype = jnp.result_type(a, b)
    return lax.div(a.astype(dtype), b.astype(dtype))


@op("DivGradient", outputs=2, inplace={0: 0})
def div_gradient(dc, a, b, c=None, *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    if c is None:  # compat: nets of before 2018 give (b, c, dc)
        dc, a, b, c = b, a, dc, a
    m = match(a, b, broadcast, axis, axis_str, order)
    over_b = spread(b, m.b, m.out)
    return collect(dc / over_b, m.a, a.shape), collect(-dc * c / over_b, m.b, b.shape)
