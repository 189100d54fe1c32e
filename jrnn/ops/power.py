"""Powers, and products of the rows of a matrix with numbers."""

from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.broadcasting import collect, match, spread
from jrnn.ops.checks import describe, flat_at
from jrnn.ops.values import as_float
from jrnn.registry import SEED, gradient, op


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
    if (y is None) == (exponent is None):
        raise OpError("takes either a second input or argument 'exponent'; give one of them")
    if y is None:
        return jnp.power(as_float(x), exponent)
    if not broadcast and x.shape != y.shape:
        raise OpError(
            f"x is {describe(x)}, the exponent {describe(y)}; they need equal shapes, or argument broadcast=1"
        )
    m = match(as_float(x), as_float(y), True, axis, axis_str, order)
    return jnp.power(x, spread(y, m.b, m.out))


@gradient("Pow")
def _(g):
    x, dz = g.input(0), g.grad_output(0)
    z, power = g.temporary(dz + "_times_power"), g.temporary(x + "_power")
    if len(g.op.inputs) == 1:
        exponent = g.arg("exponent")
        g.emit("Pow", [x], [power], copy_args=False, exponent=exponent - 1.0)
        g.emit("Mul", [power, dz], [z], copy_args=False)
        g.emit("Scale", [z], [g.grad_input(0)], copy_args=False, scale=exponent)
        return
    y = g.input(1)
    how = {name: g.arg(name) for name in ("broadcast", "axis", "axis_str", "order") if g.arg("broadcast", 0)}
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


def _row_factors(x: Any, w: Any) -> Any:
    """`w` in a shape that lies beside x: one factor for each element of its first dimension."""
    if x.ndim == 0 or w.size != x.shape[0]:
        raise OpError(f"x is {describe(x)} and w is {describe(w)}; w must have one element for each row of x")
    return jnp.reshape(w, (-1, *(1,) * (x.ndim - 1)))


@op("RowMul")
def row_mul(x, w):
    return as_float(x) * _row_factors(x, w)


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
