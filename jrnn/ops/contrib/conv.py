"""Convolutions over one, two, three or more dimensions, with their gradients.

Shapes: N batch, C channels, G groups, M output channels. Order NCHW: x [N, C, *spatial], filter [M, C/G, *kernel]; order
NHWC: x [N, *spatial, C], filter [M, *kernel, C/G].
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, check_shape, describe
from jrnn.ops.contrib.grouped import Convolution, convolve
from jrnn.ops.contrib.window import Window, spatial_axes, takes_window
from jrnn.registry import gradient, op

TYPES = ("Conv", "Conv1D", "Conv2D", "Conv3D")


def _checked(x: Any, filter: Any, window: Window, group: int) -> Window:
    """The window for x; OpError where filter, kernel, groups and channels do not belong together."""
    check_float(x, "x")
    if window.whole:
        raise OpError("global_pooling is an argument of pooling; a convolution has the kernel of its filter")
    w = window.for_image(x)
    if len(window.kernel) != x.ndim - 2:
        raise OpError(f"x is {describe(x)}: give kernels with {x.ndim - 2} sizes, was given {list(window.kernel)}")
    channels = x.shape[-1 if w.channels_last else 1]
    if group < 1 or channels % group:
        raise OpError(f"group {group} must be at least 1 and divide the {channels} channels of x {describe(x)}")
    per_group = channels // group
    tail = (*w.kernel, per_group) if w.channels_last else (per_group, *w.kernel)
    if filter.ndim != x.ndim or filter.shape[1:] != tail or filter.shape[0] % group:
        raise OpError(
            f"filter is {describe(filter)} and x is {describe(x)} with group {group}; filter must be {['M', *tail]}, M a "
            f"multiple of {group}"
        )
    return w


def _convolve(x: Any, filter: Any, w: Window, group: int) -> Any:
    sizes = tuple(x.shape[a] for a in spatial_axes(x.ndim, w.channels_last))
    w.output_sizes(sizes)  # raises where the kernel does not fit
    ones = (1,) * len(sizes)
    return convolve(x, filter, Convolution(w.stride, w.padding(sizes), w.dilation, ones, w.channels_last, group))


def add_bias(y: Any, b: Any, channels_last: bool) -> Any:
    """y plus one number for each of its channels."""
    channel = y.ndim - 1 if channels_last else 1
    check_shape(b, (y.shape[channel],), "bias")
    return y + jnp.expand_dims(b, [k for k in range(y.ndim) if k != channel])


def bias_gradient(dy: Any, channels_last: bool) -> Any:
    """The sum of dy over all but channels."""
    channel = dy.ndim - 1 if channels_last else 1
    return dy.sum([k for k in range(dy.ndim) if k != channel])


def convolution(x: Any, filter: Any, window: Window, group: int) -> Any:
    """The convolution without a bias; OpError where its inputs do not belong together."""
    return _convolve(x, filter, _checked(x, filter, window, group), group)


@takes_window
def conv(x, filter, bias=None, *, window, group: int = 1):
    y = convolution(x, filter, window, group)
    return y if bias is None else add_bias(y, bias, window.channels_last)


@takes_window
def conv_gradient(x, filter, dy, *, window, group: int = 1, no_bias: bool = False):
    """The gradients of filter, bias (but for no_bias) and x."""
    w = _checked(x, filter, window, group)
    (dfilter,) = jax.linear_transpose(lambda f: _convolve(x, f, w, group), filter)(dy)
    (dx,) = jax.linear_transpose(lambda v: _convolve(v, filter, w, group), x)(dy)
    return (dfilter, dx) if no_bias else (dfilter, bias_gradient(dy, w.channels_last), dx)


def make_conv_gradient(g) -> None:
    """The gradient of convolutions and transposed ones: filter first, then bias if there is one, then x if wanted."""
    biased = len(g.op.inputs) == 3
    outputs = [g.grad_input(1)] + ([g.grad_input(2)] if biased else [])
    if not g.arg("no_gradient_to_input", 0):
        outputs.append(g.grad_input(0))
    args = {} if biased else {"no_bias": 1}
    g.emit(g.op.type + "Gradient", [g.input(0), g.input(1), g.grad_output(0)], outputs, **args)


for _type in TYPES:
    op(_type)(conv)
    op(_type + "Gradient", outputs=(1, 3))(conv_gradient)
    gradient(_type)(make_conv_gradient)
