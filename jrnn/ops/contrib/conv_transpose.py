"""Transposed convolutions: the gradient of a convolution with respect to its input, as a layer.

Shapes: N batch, C channels, G groups, M output channels. Order NCHW: x [N, C, *spatial], filter [C, M/G, *kernel]; order
NHWC: x [N, *spatial, C], filter [C, *kernel, M/G].
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, describe
from jrnn.ops.contrib.conv import add_bias, bias_gradient, make_conv_gradient
from jrnn.ops.contrib.grouped import Convolution, convolve
from jrnn.ops.contrib.window import CAFFE, NOTSET, Window, takes_window
from jrnn.registry import gradient, op


def _extra(adj: int | None, adj_h: int | None, adj_w: int | None, adjs: tuple[int, ...], w: Window) -> tuple[int, ...]:
    """How many elements each dimension of the result gets beyond what the windows reach."""
    rank = len(w.kernel)
    if adj is not None:
        found = (adj,) * rank
    elif adj_h is not None and adj_w is not None:
        found = (adj_h, adj_w)
    else:
        found = adjs or (0,) * rank
    if len(found) != rank or any(not 0 <= e <= s for e, s in zip(found, w.stride)):
        raise OpError(f"adjs {list(found)} must be {rank} numbers from 0 to strides {list(w.stride)}, one a dimension")
    return found


def _checked(x: Any, filter: Any, window: Window, group: int) -> Window:
    check_float(x, "x")
    w = window.for_image(x)
    if window.whole or w.legacy_pad == CAFFE or any(d != 1 for d in w.dilation):
        raise OpError("takes no global_pooling, dilation or legacy_pad 3; leave them out")
    channels = x.shape[-1 if w.channels_last else 1]
    spatial = filter.shape[1:-1] if w.channels_last else filter.shape[2:]
    if filter.ndim != x.ndim or filter.shape[0] != channels or spatial != w.kernel:
        wanted = [channels, *w.kernel, "M/G"] if w.channels_last else [channels, "M/G", *w.kernel]
        raise OpError(f"filter is {describe(filter)} and x is {describe(x)}; filter must be {wanted}")
    if group < 1 or channels % group:
        raise OpError(f"group {group} must be at least 1 and divide the {channels} channels of x {describe(x)}")
    return w


def _grouped_filter(filter: Any, group: int, channels_last: bool) -> Any:
    """filter as the forward convolution's, [M, *kernel, C/G] or [M, C/G, *kernel], with the kernel turned round."""
    channels = filter.shape[0]
    f = filter if channels_last else jnp.moveaxis(filter, 1, -1)  # [C, *kernel, M/G]
    kernel = f.shape[1:-1]
    f = jnp.flip(f, tuple(range(1, f.ndim - 1))).reshape(group, channels // group, *kernel, f.shape[-1])
    f = jnp.moveaxis(jnp.swapaxes(f, 1, -1), -1, 2)  # [G, M/G, C/G, *kernel]
    f = f.reshape(-1, channels // group, *kernel)
    return jnp.moveaxis(f, 1, -1) if channels_last else f


def _transpose(x: Any, filter: Any, w: Window, group: int, extra: tuple[int, ...]) -> Any:
    rank = len(w.kernel)
    # compat: legacy padding means none here
    pads = w.pads if w.legacy_pad == NOTSET else (0,) * (2 * rank)
    padding = tuple((w.kernel[k] - 1 - pads[k], w.kernel[k] - 1 - pads[k + rank] + extra[k]) for k in range(rank))
    ones = (1,) * rank
    how = Convolution(ones, padding, ones, w.stride, w.channels_last, group)
    return convolve(x, _grouped_filter(filter, group, w.channels_last), how)


@op("ConvTranspose")
@takes_window
def conv_transpose(
    x,
    filter,
    bias=None,
    *,
    window,
    group: int = 1,
    adj: int | None = None,
    adj_h: int | None = None,
    adj_w: int | None = None,
    adjs: tuple[int, ...] = (),
):
    w = _checked(x, filter, window, group)
    y = _transpose(x, filter, w, group, _extra(adj, adj_h, adj_w, adjs, w))
    return y if bias is None else add_bias(y, bias, w.channels_last)


@op("ConvTransposeGradient", outputs=(1, 3))
@takes_window
def conv_transpose_gradient(
    x,
    filter,
    dy,
    *,
    window,
    group: int = 1,
    adj: int | None = None,
    adj_h: int | None = None,
    adj_w: int | None = None,
    adjs: tuple[int, ...] = (),
    no_bias: bool = False,
):
    """The gradients of filter, bias (but for no_bias) and x."""
    w = _checked(x, filter, window, group)
    extra = _extra(adj, adj_h, adj_w, adjs, w)
    (dfilter,) = jax.linear_transpose(lambda f: _transpose(x, f, w, group, extra), filter)(dy)
    (dx,) = jax.linear_transpose(lambda v: _transpose(v, filter, w, group, extra), x)(dy)
    return (dfilter, dx) if no_bias else (dfilter, bias_gradient(dy, w.channels_last), dx)


gradient("ConvTranspose")(make_conv_gradient)
