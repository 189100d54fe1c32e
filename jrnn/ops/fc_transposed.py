"""FCTransposed: a fully connected layer whose weight is [features, outputs].

Shapes: M rows of x, K features, N features of the result.
"""

from __future__ import annotations

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, check_shape, describe, flat_at
from jrnn.ops.values import canonical_axis
from jrnn.registry import gradient, op


def _matrices(x, w, axis, axis_w):
    """x as [M, K] and w as [K, N]."""
    axis = canonical_axis(axis, x.ndim)
    x2, w2 = flat_at(x, axis), flat_at(w, canonical_axis(axis_w, w.ndim, "axis_w"))
    if x2.shape[1] != w2.shape[0]:
        raise OpError(
            f"x {describe(x)} has {x2.shape[1]} features from axis {axis} on, but w is {describe(w)}; "
            f"w must be [{x2.shape[1]}, out]"
        )
    return x2, w2, x.shape[:axis]


@op("FCTransposed")
def fc_transposed(x, w, b, *, axis: int = 1, axis_w: int = 1):
    """y = x w + b, with x flattened from `axis` on and w at `axis_w`."""
    check_float(x, "x")
    x2, w2, leading = _matrices(x, w, axis, axis_w)
    check_shape(b, (w2.shape[1],), "b")
    return (x2 @ w2 + b[None, :]).reshape(*leading, w2.shape[1])


@op("FCTransposedGradient", outputs=(2, 3))
def fc_transposed_gradient(x, w, dy, *, axis: int = 1, axis_w: int = 1):
    x2, w2, leading = _matrices(x, w, axis, axis_w)
    check_shape(dy, (*leading, w2.shape[1]), "dy")
    dy2 = dy.reshape(x2.shape[0], w2.shape[1])
    return (x2.T @ dy2).reshape(w.shape), dy2.sum(0), (dy2 @ w2.T).reshape(x.shape)


@gradient("FCTransposed")
def _(g):
    inputs = [g.input(0), g.input(1), g.grad_output(0)]
    g.emit("FCTransposedGradient", inputs, [g.grad_input(1), g.grad_input(2), g.grad_input(0)])
