"""Pooling over windows of images: maximum, average, and p-norm, with their gradients.

Shapes: x [N, C, *spatial] (order NCHW) or [N, *spatial, C] (NHWC); y the same with one element a window.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ops.images.windows import CAFFE, Window, spatial_axes, spatial_sizes, takes_window
from jrnn.nets.ops.values import check_float, raise_if
from jrnn.nets.ops.vjp import op_with_vjp


def _for_pooling(window: Window, x: Any) -> Window:
    """The window for x; OpError if a window could contain only padding."""
    check_float(x, "x")
    w = window.for_image(x)
    raise_if(
        any(d != 1 for d in w.dilation),
        f"pooling takes no dilation, was given {list(w.dilation)}",
    )
    if not w.whole and any(p >= k for p, k in zip(w.pads, w.kernel * 2)):
        raise OpError(f"pads {list(w.pads)} must be smaller than kernels {list(w.kernel)}")
    sizes = spatial_sizes(x, w.channels_last)
    for k, (size, count) in enumerate(zip(sizes, w.output_sizes(sizes))):
        start = (count - 1) * w.stride[k] - w.padding(sizes)[k][0]
        if w.legacy_pad == CAFFE and start >= size:
            raise OpError(
                f"with legacy_pad 3 the last window of spatial dimension {k} begins at {start}, past the image of {size}; "
                "give a stride that is not larger than the kernel"
            )
    return w


def _reduce(x: Any, w: Window, start: float, combine: Any) -> Any:
    axes = spatial_axes(x.ndim, w.channels_last)
    kernel = [1] * x.ndim
    stride = [1] * x.ndim
    for k, a in enumerate(axes):
        kernel[a] = w.kernel[k]
        stride[a] = w.stride[k]
    return lax.reduce_window(
        operand=w.pad(x, start),
        # A concrete initial value, by which JAX recognizes the reduction and knows its gradient.
        init_value=np.asarray(start, x.dtype),
        computation=combine,
        window_dimensions=tuple(kernel),
        window_strides=tuple(stride),
        padding="VALID",
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(x: Any, w: Window) -> Any:
    return _reduce(x, w, -np.inf, lax.max)


@_max_pool.defjvp
def _max_pool_jvp(w, primals, tangents):
    """The gradient goes to every element equal to the maximum, as in MaxPoolGradient; JAX's own rule picks the first."""
    (x,) = primals
    (t,) = tangents
    y = _max_pool(x, w)
    return y, _of_greatest(x, y, t, w)


@functools.partial(jax.jit, static_argnums=3)  # one program, where operators run one by one
def _of_greatest(x: Any, y: Any, t: Any, w: Window) -> Any:
    if w.whole:
        return jnp.where(x == y, t, 0).sum(spatial_axes(x.ndim, w.channels_last), keepdims=True)
    slices = zip(w.slices(x, -np.inf), w.slices(t, 0))
    terms = [jnp.where(part == y, tangent, 0) for part, tangent in slices]
    return functools.reduce(jnp.add, terms)


def max_pool(x, *, window):
    return _max_pool(x, _for_pooling(window, x))


def _counts(x: Any, w: Window, include_pad: bool) -> Any:
    """The number of elements of each window, in a shape that broadcasts with y; padding counts only with include_pad."""
    if include_pad:
        return np.asarray(w.volume, x.dtype)
    sizes = spatial_sizes(x, w.channels_last)
    counts = np.ones((1,) * x.ndim)
    for k, a in enumerate(spatial_axes(x.ndim, w.channels_last)):
        starts = np.arange(w.output_sizes(sizes)[k]) * w.stride[k] - w.padding(sizes)[k][0]
        inside = np.minimum(starts + w.kernel[k], sizes[k]) - np.maximum(starts, 0)
        counts = counts * inside.reshape([-1 if d == a else 1 for d in range(x.ndim)])
    return counts.astype(x.dtype)


def average_pool(x, *, window, count_include_pad: bool = False):
    w = _for_pooling(window, x)
    total = _reduce(x, w, 0.0, lax.add)
    return total / jnp.broadcast_to(_counts(x, w, count_include_pad), total.shape)


for _name, _pool in (("MaxPool", max_pool), ("AveragePool", average_pool)):
    for _type in (_name, _name + "1D", _name + "2D", _name + "3D"):
        op_with_vjp(_type, gradient=f"{_type}Gradient(x, y, dy)")(takes_window(_pool))


@op_with_vjp("LpPool", gradient="LpPoolGradient(x, y, dy)")
@takes_window
def lp_pool(x, *, window, p: float = 2.0):
    """(sum |x|^p)^(1/p) over each window; the derivative is 0 where x is 0."""
    raise_if(p <= 0, f"p must be positive, is {p}")
    w = _for_pooling(window, x)
    # A power of 0 has no finite derivative: 1 takes its place, and the result of it is not read.
    powers = jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** p)
    total = _reduce(powers, w, 0.0, lax.add)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / p))
