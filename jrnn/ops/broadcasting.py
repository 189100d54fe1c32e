"""How binary operators match the shapes of their inputs: numpy's way, or Caffe2's own where argument `broadcast` is 1."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe


class Matched(NamedTuple):
    """Shapes of the same rank to which `a` and `b` are reshaped, and the shape `out` to which both then spread."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]


def match(a: Any, b: Any, broadcast: bool, axis: int, axis_str: str, order: str) -> Matched:
    """Matches the shapes of a binary operator's inputs.

    With `broadcast`, the dimensions of b stand beside those of a from `axis` on (-1: at the end), dimensions of size 1 at
    the edges of b spread, and the result has the shape of a. Without, numpy's rules hold. `axis_str` names the axis by
    its letter in `order`.

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
            raise OpError(f"argument 'axis_str' is {axis_str!r}; it must be a letter of argument 'order', {order!r}")
        axis = order.index(axis_str)
    elif axis == -1:
        axis = np.ndim(a) - np.ndim(b)
    spread = (1,) * axis + b.shape + (1,) * (np.ndim(a) - axis - np.ndim(b))
    ones = [k for k, size in enumerate(b.shape) if size != 1]
    fits = 0 <= axis <= np.ndim(a) - np.ndim(b) and all(
        b.shape[k] == a.shape[axis + k] for k in range(ones[0] if ones else 0, (ones[-1] + 1) if ones else 0)
    )
    if not fits:
        raise OpError(
            f"a is {describe(a)} and b is {describe(b)}; with broadcast=1 the shape of b must be that of dimensions of a "
            f"from axis {axis} on"
        )
    return Matched(a.shape, spread, a.shape)


def spread(x: Any, shape: tuple[int, ...], out: tuple[int, ...]) -> Any:
    """An input reshaped to its matched shape and broadcast to the shape of the result."""
    return jnp.broadcast_to(jnp.reshape(x, shape), out)


def binary(fn: Callable, a: Any, b: Any, kinds: str, wanted: str, *how: Any) -> Any:
    """`fn` of two inputs that hold these kinds of numbers, matched as the arguments `how` of `match` say."""
    check_kinds(a, b, kinds, wanted)
    m = match(a, b, *how)
    return fn(spread(a, m.a, m.out), spread(b, m.b, m.out))


def collect(grad: Any, shape: tuple[int, ...], original: tuple[int, ...]) -> Any:
    """The reverse of `spread` for gradients: sums over the dimensions that were spread.

    >>> collect(jnp.ones((2, 3)), (1, 3), (3,)).tolist()
    [2.0, 2.0, 2.0]
    """
    axes = tuple(k for k, (small, big) in enumerate(zip(shape, grad.shape)) if small == 1 and big != 1)
    return jnp.sum(grad, axes, dtype=grad.dtype).reshape(original) if axes else grad.reshape(original)


def check_kinds(a: Any, b: Any, kinds: str, wanted: str) -> None:
    """Raises OpError unless both inputs hold the same kind of number, one of `kinds`."""
    pair = {"f" if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype.kind for x in (a, b)}
    if len(pair) != 1 or not pair <= set(kinds):
        raise OpError(f"a is {describe(a)} and b is {describe(b)}; both must hold {wanted}, and the same type")
