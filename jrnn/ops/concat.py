"""Concat and Split, which are each other's gradients."""

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.values import canonical_axis
from jrnn.registry import gradient, op


def _axis(axis, order, rank):
    """The axis that the arguments name: `axis`, or the channels in `order`; by default the channels of NCHW."""
    if axis is not None and order is not None:
        raise OpError(f"was given both axis {axis} and order {order!r}; give one of them")
    if axis is None:
        if order not in (None, "NCHW", "NHWC"):
            raise OpError(f"argument 'order' is {order!r}; it must be 'NCHW' or 'NHWC'")
        axis = 3 if order == "NHWC" else 1
    return canonical_axis(axis, rank)


@op("Concat", outputs=2, gradient="Split(dy, y1) -> *")
def concat(x, *xs, axis: int | None = None, order: str | None = None, add_axis: bool = False):
    """The inputs one after the other along `axis`, or stacked on a new one; and the size that each has along it."""
    xs = (x, *xs)
    axis = _axis(axis, order, x.ndim + add_axis)
    for k, other in enumerate(xs):
        same = [d for d in range(other.ndim) if add_axis or d != axis]
        if other.ndim != x.ndim or any(other.shape[d] != x.shape[d] for d in same):
            where = "" if add_axis else f" but for axis {axis}"
            raise OpError(f"input {k} is {describe(other)} and input 0 is {describe(x)}; shapes must be equal{where}")
        if other.dtype.kind != x.dtype.kind:
            raise OpError(f"input {k} is {describe(other)} and input 0 is {describe(x)}; data types must be equal")
    if add_axis:
        return jnp.stack(xs, axis), np.ones(len(xs), np.int32)
    return jnp.concatenate(xs, axis), np.array([other.shape[axis] for other in xs], np.int32)


@op("Split", outputs=(1, None))
def split(
    x,
    sizes=None,
    *,
    op,
    axis: int | None = None,
    order: str | None = None,
    split: tuple[int, ...] = (),
    add_axis: bool = False,
):
    """Parts of x along `axis`: of the given sizes, else equal ones; with `add_axis`, slices without that axis."""
    axis = _axis(axis, order, x.ndim)
    count, length = len(op.outputs), x.shape[axis]
    if sizes is not None:
        if split:
            raise OpError("was given both an input and an argument 'split'; give one of them")
        split = tuple(int(s) for s in np.asarray(sizes))
    if add_axis:
        split = (1,) * count
    elif not split:
        if length % count:
            raise OpError(f"x is {describe(x)}: {length} along axis {axis} do not split into {count} equal outputs")
        split = (length // count,) * count
    if len(split) != count or sum(split) != length or min(split) < 0:
        raise OpError(
            f"x is {describe(x)}; the sizes {list(split)} must be {count}, one an output, and add up to {length}, the size "
            f"of axis {axis}"
        )
    parts = jnp.split(x, np.cumsum(split)[:-1].tolist(), axis)
    return tuple(jnp.squeeze(part, axis) if add_axis else part for part in parts)


@gradient("Split")
def _(g):
    inputs = [g.grad_output(k) for k in range(len(g.op.outputs))]
    g.emit("Concat", inputs, [g.grad_input(0), f"_{g.op.inputs[0]}_grad_dims"])
