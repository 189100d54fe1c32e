"""Arithmetic, powers, comparisons and logic, with their gradients.

Binary operators broadcast: by numpy's rules, or with argument `broadcast` by Caffe2's (see `match`). Their gradient
operators read the gradient first, then the inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.ir import Shape
from jrnn.nets.ops.values import as_float, describe, flat_at, raise_if, takes
from jrnn.nets.registry import SEED, gradient, op


class Matched(NamedTuple):
    """Shapes of the same rank to which `a` and `b` are reshaped, and the shape `out` to which both then broadcast."""

    a: Shape
    b: Shape
    out: Shape


def match(a: Any, b: Any, broadcast: bool, axis: int, axis_str: str, order: str) -> Matched:
    """Matches the shapes of a binary operator's inputs.

    With `broadcast`, the dimensions of b match the dimensions of a from `axis` on (-1: the last ones), leading and
    trailing dimensions of size 1 of b are broadcast, and the result has the shape of a. Without, numpy's rules hold.
    `axis_str` names the axis by its letter in `order`.

    >>> a, b = np.zeros((2, 3, 4)), np.zeros(3)
    >>> match(a, b, True, 1, "", "NCHW")
    Matched(a=(2, 3, 4), b=(1, 3, 1), out=(2, 3, 4))
    """
    if not broadcast:
        rank = max(np.ndim(a), np.ndim(b))
        a_shape, b_shape = ((1,) * (rank - np.ndim(x)) + x.shape for x in (a, b))
        try:
            return Matched(a_shape, b_shape, np.broadcast_shapes(a_shape, b_shape))
        except ValueError:
            raise OpError(
                f"a is {describe(a)} and b is {describe(b)}; their shapes must be equal or broadcast as numpy's do "
                "(argument broadcast=1 matches b with dimensions of a from `axis` on)"
            ) from None
    if np.size(b) == 1:
        return Matched(a.shape, (1,) * np.ndim(a), a.shape)
    if axis == -1 and axis_str:
        if len(axis_str) != 1 or axis_str not in order:
            raise OpError(
                f"argument 'axis_str' is {axis_str!r}; it must be a letter of argument 'order', {order!r}"
            )
        axis = order.index(axis_str)
    elif axis == -1:
        axis = np.ndim(a) - np.ndim(b)
    b_shape = (1,) * axis + b.shape + (1,) * (np.ndim(a) - axis - np.ndim(b))
    ones = [k for k, size in enumerate(b.shape) if size != 1]
    fits = 0 <= axis <= np.ndim(a) - np.ndim(b) and all(
        b.shape[k] == a.shape[axis + k]
        for k in range(ones[0] if ones else 0, (ones[-1] + 1) if ones else 0)
    )
    raise_if(
        not fits,
        f"with broadcast=1 the shape of b must equal the dimensions of a from axis {axis} on",
        a=a,
        b=b,
    )
    return Matched(a.shape, b_shape, a.shape)


def spread(x: Any, shape: Shape, out: Shape) -> Any:
    """An input reshaped to its matched shape and broadcast to the shape of the result."""
    return jnp.broadcast_to(jnp.reshape(x, shape), out)


def collect(grad: Any, shape: Shape, original: Shape) -> Any:
    """The transpose of `spread`: sums a gradient over the dimensions that were broadcast.

    >>> collect(jnp.ones((2, 3)), (1, 3), (3,)).tolist()
    [2.0, 2.0, 2.0]
    """
    axes = tuple(
        k for k, (small, big) in enumerate(zip(shape, grad.shape)) if small == 1 and big != 1
    )
    return (
        jnp.sum(grad, axes, dtype=grad.dtype).reshape(original) if axes else grad.reshape(original)
    )


@op("Sum", inplace={0: 0})
def sum_(x, *xs):
    for other in xs:
        if other.shape != x.shape:
            raise OpError(
                f"adds {describe(x)} and {describe(other)}; Sum does not broadcast, shapes must be equal"
            )
        x = jnp.add(x, other)
    return jnp.asarray(x)


@gradient("Sum")
def _(g):
    for k in range(len(g.op.inputs)):
        g.set_grad(k, g.grad_output_slice(0))


def _match(
    *, broadcast: bool = False, axis: int = -1, axis_str: str = "", order: str = "NCHW"
) -> Callable:
    return lambda a, b: match(a, b, broadcast, axis, axis_str, order)


def _register(
    type: str, fn: Callable, kinds: str, wanted: str, gradient: str = "forbidden", **traits: Any
) -> None:
    """Registers `fn` of two broadcast inputs that hold the same kind of number, one of `kinds`."""

    @op(type, gradient=gradient, **traits)
    @takes(match=_match)
    def binary(a, b, *, match):
        pair = {"f" if is_floating(x) else x.dtype.kind for x in (a, b)}
        raise_if(
            len(pair) != 1 or not pair <= set(kinds),
            f"both must hold {wanted}, and the same type",
            a=a,
            b=b,
        )
        m = match(a, b)
        return fn(spread(a, m.a, m.out), spread(b, m.b, m.out))


def _register_with_gradient(type: str, fn: Callable, gradients: Callable) -> None:
    """Also registers the gradient operator; `gradients(dc, a, b)` are the gradients of the broadcast inputs."""
    _register(type, fn, "iuf", "numbers", f"{type}Gradient(dy, a, b) -> a, b", inplace={0: 0})

    @op(type + "Gradient", outputs=2, inplace={0: 0})
    @takes(match=_match)
    def backward(dc, a, b, *, match):
        m = match(a, b)
        da, db = gradients(dc, spread(a, m.a, m.out), spread(b, m.b, m.out))
        return collect(da, m.a, a.shape), collect(db, m.b, b.shape)


_register_with_gradient("Add", jnp.add, lambda dc, a, b: (dc, dc))
_register_with_gradient("Sub", jnp.subtract, lambda dc, a, b: (dc, -dc))
_register_with_gradient("Mul", jnp.multiply, lambda dc, a, b: (dc * b, dc * a))


def _divide(a, b):
    """Integers are truncated towards zero, as in C."""
    dtype = jnp.result_type(a, b)
    return lax.div(a.astype(dtype), b.astype(dtype))


_register("Div", _divide, "iuf", "numbers", "DivGradient(dy, a, b, y) -> a, b", inplace={0: 0})


@op("DivGradient", outputs=2, inplace={0: 0})
@takes(match=_match)
def div_gradient(dc, a, b, c=None, *, match):
    if c is None:
        # compat: nets of before 2018 give (b, c, dc). The shape of a is the shape of c.
        old_inputs = (dc, a, b)
        b, c, dc = old_inputs
        a = c
    m = match(a, b)
    over_b = spread(b, m.b, m.out)
    return collect(dc / over_b, m.a, a.shape), collect(-dc * c / over_b, m.b, b.shape)


_register("EQ", jnp.equal, "iufb", "numbers or booleans")
_register("NE", jnp.not_equal, "iufb", "numbers or booleans")
_register("LT", jnp.less, "iufb", "numbers or booleans")
_register("LE", jnp.less_equal, "iufb", "numbers or booleans")
_register("GT", jnp.greater, "iufb", "numbers or booleans")
_register("GE", jnp.greater_equal, "iufb", "numbers or booleans")
_register("And", jnp.logical_and, "b", "booleans")
_register("Or", jnp.logical_or, "b", "booleans")
_register("Xor", jnp.logical_xor, "b", "booleans", inplace={0: 0})
_register("BitwiseAnd", jnp.bitwise_and, "ib", "integers or booleans", inplace={0: 0})
_register("BitwiseOr", jnp.bitwise_or, "ib", "integers or booleans", inplace={0: 0})
_register("BitwiseXor", jnp.bitwise_xor, "ib", "integers or booleans", inplace={0: 0})


@op("Not", gradient="forbidden")
def not_(x):
    raise_if(x.dtype != bool, "it must hold booleans", x=x)
    return jnp.logical_not(x)


@op("Pow", inplace={0: 0})
def pow_(
    x,
    y=None,
    *,
    exponent: float | None = None,
    broadcast: bool = False,
    axis: int = -1,
    axis_str: str = "",
    order: str = "NCHW",
):
    raise_if(
        (y is None) == (exponent is None),
        "takes either a second input or argument 'exponent'; give one of them",
    )
    if y is None:
        return jnp.power(as_float(x), exponent)
    if not broadcast and x.shape != y.shape:
        raise OpError(
            f"x is {describe(x)}, the exponent {describe(y)}; give equal shapes, or argument broadcast=1"
        )
    m = match(as_float(x), as_float(y), True, axis, axis_str, order)
    return jnp.power(x, spread(y, m.b, m.out))


@gradient("Pow")
def pow_gradient_maker(g):
    x = g.input(0)
    dz = g.grad_output(0)
    z = g.temporary(dz + "_times_power")
    power = g.temporary(x + "_power")
    if len(g.op.inputs) == 1:
        exponent = g.arg("exponent")
        g.emit("Pow", [x], [power], copy_args=False, exponent=exponent - 1.0)
        g.emit("Mul", [power, dz], [z], copy_args=False)
        g.emit("Scale", [z], [g.grad_input(0)], copy_args=False, scale=exponent)
        return
    y = g.input(1)
    how = {
        name: g.arg(name)
        for name in ("broadcast", "axis", "axis_str", "order")
        if g.arg("broadcast", 0)
    }
    one, less, logarithm = (g.temporary(y + end) for end in ("_one", "_less_one", "_log"))
    g.emit(SEED, [y], [one], copy_args=False, value=1.0)
    g.emit("Sub", [y, one], [less], copy_args=False)
    g.emit("Pow", [x, less], [power], copy_args=False, **how)
    g.emit("Mul", [power, dz], [z], copy_args=False)
    g.emit("Mul", [z, y], [g.grad_input(0)], copy_args=False, **how)
    g.emit("Log", [x], [logarithm], copy_args=False)
    scaled = g.temporary(y + "_log_times_power")
    g.emit("Mul", [logarithm, g.output(0)], [scaled], copy_args=False)
    if not how:
        g.emit("Mul", [scaled, dz], [g.grad_input(1)], copy_args=False)
        return
    spread_out = g.temporary(g.op.inputs[1] + "_grad_autogen_pre_red")
    g.emit("Mul", [scaled, dz], [spread_out], copy_args=False)
    del how["broadcast"]
    g.emit("SumReduceLike", [spread_out, y], [g.grad_input(1)], copy_args=False, **how)


@op("SumReduceLike")
def sum_reduce_like(x, like, *, axis: int = -1, axis_str: str = "", order: str = "NCHW"):
    """Sums `x` over the dimensions in which `like` was broadcast to it."""
    m = match(x, like, True, axis, axis_str, order)
    return collect(jnp.asarray(x), m.b, like.shape)


@op("RowMul")
def row_mul(x, w):
    raise_if(
        x.ndim == 0 or w.size != x.shape[0], "w must have one element for each row of x", x=x, w=w
    )
    return as_float(x) * jnp.reshape(w, (-1, *(1,) * (x.ndim - 1)))


@gradient("RowMul")
def _(g):
    products = g.temporary(f"{g.op.inputs[1]}_gradbefore_aggregate")
    g.emit("RowMul", [g.grad_output(0), g.input(1)], [g.grad_input(0)])
    g.emit("Mul", [g.grad_output(0), g.input(0)], [products])
    g.emit("ReduceTailSum", [products], [g.grad_input(1)])


@op("ReduceTailSum")
def reduce_tail_sum(x):
    """[N, ...] -> [N], the sums of the rows."""
    return jnp.sum(flat_at(as_float(x), 1), axis=1)
