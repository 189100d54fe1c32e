"""Products of matrices: FC, FCTransposed, ElementwiseLinear, MatMul and BatchMatMul, with their gradients.

Shapes: M rows of x, K features, N features of the result.
"""

from collections.abc import Callable

import jax.numpy as jnp

from jrnn.errors import GradientError, OpError
from jrnn.nets.ops.values import (
    canonical_axis,
    check_float,
    check_shape,
    describe,
    flat_at,
    raise_if,
)
from jrnn.nets.registry import gradient, op


def _register_fc(type: str, transposed: bool) -> Callable:
    """y = x w^T + b with w [N, K], or y = x w + b with w [K, N]; x is flattened at `axis`, and w at `axis_w`."""

    def matrices(x, w, axis, axis_w):
        """x as [M, K] and w as [K, N]."""
        axis = canonical_axis(axis, x.ndim)
        x2 = flat_at(x, axis)
        w2 = flat_at(w, canonical_axis(axis_w, w.ndim, "axis_w"))
        w2 = w2 if transposed else w2.T
        if x2.shape[1] != w2.shape[0]:
            wanted = f"[{x2.shape[1]}, out]" if transposed else f"[out, {x2.shape[1]}]"
            raise OpError(
                f"x {describe(x)} has {x2.shape[1]} features from axis {axis} on, but w is {describe(w)}; w must be {wanted}"
            )
        return x2, w2, x.shape[:axis]

    @op(type, gradient=f"{type}Gradient(x, w, dy) -> w, b, x")
    def forward(x, w, b, *, axis: int = 1, axis_w: int = 1):
        check_float(x, "x")
        x2, w2, leading = matrices(x, w, axis, axis_w)
        check_shape(b, (w2.shape[1],), "b")
        return (x2 @ w2 + b[None, :]).reshape(*leading, w2.shape[1])

    @op(type + "Gradient", outputs=(2, 3))
    def backward(x, w, dy, *, axis: int = 1, axis_w: int = 1):
        x2, w2, leading = matrices(x, w, axis, axis_w)
        check_shape(dy, (*leading, w2.shape[1]), "dy")
        dy2 = dy.reshape(x2.shape[0], w2.shape[1])
        dw = x2.T @ dy2 if transposed else dy2.T @ x2
        return dw.reshape(w.shape), dy2.sum(0), (dy2 @ w2.T).reshape(x.shape)

    return forward


fc = _register_fc("FC", transposed=False)
_register_fc("FCTransposed", transposed=True)


@op("ElementwiseLinear", gradient="ElementwiseLinearGradient(dy, x, w) -> x, w, b")
def elementwise_linear(x, w, b, *, axis: int = 1):
    """y = x * w + b, with vectors w and b over all dimensions of x from `axis` on."""
    x2 = flat_at(x, canonical_axis(axis, x.ndim))
    check_shape(w, x2.shape[1:], "w")
    check_shape(b, x2.shape[1:], "b")
    return (x2 * w[None, :] + b[None, :]).reshape(x.shape)


@op("ElementwiseLinearGradient", outputs=3)
def elementwise_linear_gradient(dy, x, w, *, axis: int = 1):
    axis = canonical_axis(axis, x.ndim)
    dy2 = flat_at(dy, axis)
    x2 = flat_at(x, axis)
    return (dy2 * w[None, :]).reshape(x.shape), (dy2 * x2).sum(0), dy2.sum(0)


@op("MatMul")
def matmul(
    a, b, shape_like=None, *, axis_a: int = 1, axis_b: int = 1, trans_a: bool = False, trans_b: bool = False
):  # fmt: skip
    """The product of a and b, each flattened to a matrix; the result has the shape of `shape_like` if it is given."""
    a2 = flat_at(a, canonical_axis(axis_a, a.ndim, "axis_a"))
    b2 = flat_at(b, canonical_axis(axis_b, b.ndim, "axis_b"))
    a2 = a2.T if trans_a else a2
    b2 = b2.T if trans_b else b2
    if a2.shape[1] != b2.shape[0]:
        raise OpError(
            f"a is {describe(a)}, a matrix {list(a2.shape)}, and b is {describe(b)}, a matrix {list(b2.shape)}; the columns "
            "of a must be as many as the rows of b"
        )
    y = a2 @ b2
    return y if shape_like is None else y.reshape(shape_like.shape)


# The gradients of y = op(a) op(b) for each (trans_a, trans_b): (left, right, trans_a, trans_b) for da, then for db.
_PRODUCTS = {
    (False, False): (("dy", "b", 0, 1), ("a", "dy", 1, 0)),
    (False, True): (("dy", "b", 0, 0), ("dy", "a", 1, 0)),
    (True, False): (("b", "dy", 0, 1), ("a", "dy", 0, 0)),
    (True, True): (("b", "dy", 1, 1), ("dy", "a", 1, 1)),
}


def _products(g):
    """For both inputs: the blobs to multiply for its gradient, their names in _PRODUCTS, and the arguments."""
    blobs = {"a": g.input(0), "b": g.input(1), "dy": g.grad_output(0)}
    for left, right, trans_a, trans_b in _PRODUCTS[
        bool(g.arg("trans_a", 0)), bool(g.arg("trans_b", 0))
    ]:
        yield (
            [blobs[left], blobs[right]],
            (left, right),
            {"trans_a": trans_a or None, "trans_b": trans_b or None},
        )


@gradient("MatMul")
def _(g):
    axes = {"a": g.arg("axis_a", 1), "b": g.arg("axis_b", 1)}
    for k, (blobs, (left, right), args) in enumerate(_products(g)):
        # the axes themselves; Caffe2 passes a truth value, which is wrong
        args |= {"axis_a": axes.get(left), "axis_b": axes.get(right)}
        g.emit("MatMul", [*blobs, g.input(k)], [g.grad_input(k)], copy_args=False, **args)


@op("BatchMatMul")
def batch_matmul(a, b, *, trans_a: bool = False, trans_b: bool = False, broadcast: bool = False):
    """Matrix products of the last two dimensions. Leading dimensions must be equal, or with `broadcast` they broadcast."""
    raise_if(a.ndim == 0 or b.ndim == 0, "both must have a dimension at least", a=a, b=b)
    a3 = a
    if a.ndim == 1:
        a3 = a[None, :]  # a vector a is a row
    elif trans_a:
        a3 = jnp.swapaxes(a, -1, -2)
    b3 = b
    if b.ndim == 1:
        b3 = b[:, None]  # a vector b is a column
    elif trans_b:
        b3 = jnp.swapaxes(b, -1, -2)
    if a3.shape[-1] != b3.shape[-2]:
        raise OpError(
            f"a is {describe(a)} and b is {describe(b)}: {a3.shape[-1]} columns of a meet {b3.shape[-2]} rows of b"
            f" (trans_a={int(trans_a)}, trans_b={int(trans_b)}); they must be as many"
        )
    if not broadcast and a3.shape[:-2] != b3.shape[:-2]:
        raise OpError(
            f"a is {describe(a)}, b {describe(b)}; leading dimensions must be equal, or argument broadcast 1"
        )
    try:
        leading = jnp.broadcast_shapes(a3.shape[:-2], b3.shape[:-2])
    except ValueError:
        raise OpError(
            f"a is {describe(a)} and b is {describe(b)}; their leading dimensions do not broadcast"
        ) from None
    y = jnp.matmul(
        jnp.broadcast_to(a3, leading + a3.shape[-2:]), jnp.broadcast_to(b3, leading + b3.shape[-2:])
    )
    y = y[..., 0, :] if a.ndim == 1 else y
    y = y[..., 0] if b.ndim == 1 else y
    return y.reshape(1) if y.ndim == 0 else y


@gradient("BatchMatMul")
def _(g):
    if g.arg("broadcast", 0):
        raise GradientError(
            "BatchMatMul with broadcast=1 has no gradient; Tile or ExpandDims inputs to equal shapes"
        )
    for k, (blobs, _, args) in enumerate(_products(g)):
        g.emit("BatchMatMul", blobs, [g.grad_input(k)], copy_args=False, **args)
