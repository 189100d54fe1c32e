"""Convolutions and transposed convolutions over one, two, three or more dimensions, with their gradients.

Shapes: N batch, C channels, G groups, M output channels. Order NCHW: x [N, C, *spatial], filter [M, C/G, *kernel]; order
NHWC: x [N, *spatial, C], filter [M, *kernel, C/G]. The filter of a transposed convolution is [C, M/G, *kernel] or
[C, *kernel, M/G].

XLA on a CPU runs a grouped convolution much slower than its parts. There, depthwise convolutions become sums of shifted
images, and others become one convolution per group. On other devices they stay one operation of XLA.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ir import Ints
from jrnn.nets.ops.images.windows import (
    CAFFE,
    NOTSET,
    Window,
    elements_at,
    make_window,
    spatial_axes,
    spatial_sizes,
    takes_window,
)
from jrnn.nets.ops.values import check_float, check_shape, describe, raise_if, takes
from jrnn.nets.registry import gradient, op

LETTERS = "DHWUVXYZ"  # one for each spatial dimension
MOST_SHIFTS = 128  # the largest kernel volume that becomes a sum, one term per place
MOST_PARTS = 32  # the largest number of groups that become convolutions of their own


@dataclass(frozen=True)
class Convolution:
    """How the kernel moves: `dilation` spreads the kernel's elements, `spread` the image's."""

    stride: Ints
    padding: tuple[tuple[int, int], ...]
    dilation: Ints
    spread: Ints
    channels_last: bool
    group: int

    @property
    def channel(self) -> int:
        """The axis of channels in an image."""
        return len(self.stride) + 1 if self.channels_last else 1


@functools.partial(jax.jit, static_argnums=2)  # one program, where operators run one by one
def convolve(x: Any, filter: Any, c: Convolution) -> Any:
    """The convolution of an image and a filter that fit together."""
    kernel = spatial_sizes(filter, c.channels_last)
    if c.group == 1:
        return _whole(x, filter, c)
    if x.shape[c.channel] == c.group and math.prod(kernel) <= MOST_SHIFTS:
        on_cpu = functools.partial(_shifted, c=c)
    elif c.group <= MOST_PARTS:
        on_cpu = functools.partial(_in_parts, c=c)
    else:
        return _whole(x, filter, c)
    return lax.platform_dependent(x, filter, cpu=on_cpu, default=functools.partial(_whole, c=c))


def _whole(x: Any, filter: Any, c: Convolution) -> Any:
    letters = LETTERS[: len(c.stride)]
    image, kernel = (
        (f"N{letters}C", f"O{letters}I") if c.channels_last else (f"NC{letters}", f"OI{letters}")
    )
    return lax.conv_general_dilated(
        x,
        filter,
        c.stride,
        c.padding,
        lhs_dilation=c.spread,
        rhs_dilation=c.dilation,
        dimension_numbers=(image, kernel, image),
        feature_group_count=c.group,
    )


def _in_parts(x: Any, filter: Any, c: Convolution) -> Any:
    parts = zip(jnp.split(x, c.group, c.channel), jnp.split(filter, c.group, 0))
    return jnp.concatenate([_whole(image, f, replace(c, group=1)) for image, f in parts], c.channel)


def _shifted(x: Any, filter: Any, c: Convolution) -> Any:
    """A depthwise convolution: for each place of the kernel, the shifted image times one number per channel."""
    axis = c.channel
    kernel = spatial_sizes(filter, c.channels_last)
    spatial = spatial_axes(x.ndim, c.channels_last)
    wide = jnp.promote_types(x.dtype, jnp.float32)  # narrower types are summed as wide as XLA does
    config = [(0, 0, 0)] * x.ndim
    for k, a in enumerate(spatial):
        config[a] = (*c.padding[k], c.spread[k] - 1)
    padded = lax.pad(x, jnp.zeros((), x.dtype), config).astype(wide)
    # [N, G, M/G, *spatial]: every channel makes M/G others
    padded = jnp.expand_dims(padded, axis + 1)
    spatial = [a + (a > axis) for a in spatial]
    per_place = filter.reshape(c.group, -1, math.prod(kernel)).astype(wide)  # [G, M/G, K]: C/G is 1
    sizes = [
        (padded.shape[a] - c.dilation[k] * (kernel[k] - 1) - 1) // c.stride[k] + 1
        for k, a in enumerate(spatial)
    ]
    total: Any = 0
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        weights = jnp.expand_dims(
            per_place[..., number], [a for a in range(padded.ndim) if a not in (axis, axis + 1)]
        )
        total = total + weights * elements_at(padded, spatial, c, place, sizes)
    shape = [*total.shape[:axis], filter.shape[0], *total.shape[axis + 2 :]]
    return total.reshape(shape).astype(x.dtype)


def _check_group(x: Any, channels_last: bool, group: int) -> int:
    """The number of channels of x; OpError where `group` does not divide it."""
    channels = x.shape[-1 if channels_last else 1]
    if group < 1 or channels % group:
        raise OpError(
            f"group {group} must be at least 1 and divide the {channels} channels of x {describe(x)}"
        )
    return channels


def _finish(y: Any, bias: Any, channels_last: bool) -> Any:
    """y plus one number per channel, if there is a bias."""
    if bias is None:
        return y
    channel = y.ndim - 1 if channels_last else 1
    check_shape(bias, (y.shape[channel],), "bias")
    return y + jnp.expand_dims(bias, [k for k in range(y.ndim) if k != channel])


def _gradients(
    forward: Callable, x: Any, filter: Any, dy: Any, channels_last: bool, no_bias: bool
) -> tuple[Any, ...]:
    """The gradients of filter, bias (unless no_bias) and x, for y = forward(x, filter) + bias."""
    (dfilter,) = jax.linear_transpose(lambda f: forward(x, f), filter)(dy)
    (dx,) = jax.linear_transpose(lambda v: forward(v, filter), x)(dy)
    channel = dy.ndim - 1 if channels_last else 1
    return (
        (dfilter, dx)
        if no_bias
        else (dfilter, dy.sum([k for k in range(dy.ndim) if k != channel]), dx)
    )


def _direct(x: Any, filter: Any, window: Window, group: int) -> tuple[Callable, bool]:
    """The convolution as a function of x and filter, after checks; and whether channels come last."""
    check_float(x, "x")
    raise_if(
        window.whole,
        "global_pooling is an argument of pooling; a convolution has the kernel of its filter",
    )
    w = window.for_image(x)
    if len(window.kernel) != x.ndim - 2:
        raise OpError(
            f"x is {describe(x)}: give kernels with {x.ndim - 2} sizes, was given {list(window.kernel)}"
        )
    per_group = _check_group(x, w.channels_last, group) // group
    tail = (*w.kernel, per_group) if w.channels_last else (per_group, *w.kernel)
    if filter.ndim != x.ndim or filter.shape[1:] != tail or filter.shape[0] % group:
        raise OpError(
            f"filter is {describe(filter)} and x is {describe(x)} with group {group}; filter must be {['M', *tail]}, M a "
            f"multiple of {group}"
        )
    sizes = spatial_sizes(x, w.channels_last)
    w.output_sizes(sizes)  # raises where the kernel does not fit
    ones = (1,) * len(sizes)
    how = Convolution(
        stride=w.stride,
        padding=w.padding(sizes),
        dilation=w.dilation,
        spread=ones,
        channels_last=w.channels_last,
        group=group,
    )
    return lambda v, f: convolve(v, f, how), w.channels_last


def conv(x, filter, bias=None, *, window, group: int = 1):
    forward, channels_last = _direct(x, filter, window, group)
    return _finish(forward(x, filter), bias, channels_last)


def conv_relu(x, filter, bias=None, *, window, group: int = 1):
    return jax.nn.relu(conv(x, filter, bias, window=window, group=group))


def conv_gradient(x, filter, dy, *, window, group: int = 1, no_bias: bool = False):
    forward, channels_last = _direct(x, filter, window, group)
    return _gradients(forward, x, filter, dy, channels_last, no_bias)


def _make_gradient(g) -> None:
    """Filter first, then bias if there is one, then x if wanted."""
    biased = len(g.op.inputs) == 3
    outputs = [g.grad_input(1)] + ([g.grad_input(2)] if biased else [])
    if not g.arg("no_gradient_to_input", 0):
        outputs.append(g.grad_input(0))
    args = {} if biased else {"no_bias": 1}
    g.emit(g.op.type + "Gradient", [g.input(0), g.input(1), g.grad_output(0)], outputs, **args)


for _type in ("Conv", "Conv1D", "Conv2D", "Conv3D"):
    op(_type)(takes_window(conv))
    op(_type + "Gradient", outputs=(1, 3))(takes_window(conv_gradient))
    gradient(_type)(_make_gradient)
op("ConvRelu", gradient="forbidden")(takes_window(conv_relu))


def _extra(
    *,
    adj: int | None = None,
    adj_h: int | None = None,
    adj_w: int | None = None,
    adjs: Ints = (),
):
    """A function of the window: how many elements each dimension of the result gets beyond what the windows reach."""

    def extra(w: Window) -> Ints:
        rank = len(w.kernel)
        if adj is not None:
            sizes = (adj,) * rank
        elif adj_h is not None and adj_w is not None:
            sizes = (adj_h, adj_w)
        else:
            sizes = adjs or (0,) * rank
        if len(sizes) != rank or any(not 0 <= e <= s for e, s in zip(sizes, w.stride)):
            raise OpError(
                f"adjs {list(sizes)} must be {rank} numbers between 0 and the strides {list(w.stride)}"
            )
        return sizes

    return extra


def _transposed(
    x: Any, filter: Any, window: Window, group: int, extra: Callable
) -> tuple[Callable, bool]:
    """The transposed convolution as a function of x and filter, after checks; and whether channels come last."""
    check_float(x, "x")
    w = window.for_image(x)
    if window.whole or w.legacy_pad == CAFFE or any(d != 1 for d in w.dilation):
        raise OpError("takes no global_pooling, dilation or legacy_pad 3; leave them out")
    channels = x.shape[-1 if w.channels_last else 1]
    if (
        filter.ndim != x.ndim
        or filter.shape[0] != channels
        or spatial_sizes(filter, w.channels_last) != w.kernel
    ):
        wanted = [channels, *w.kernel, "M/G"] if w.channels_last else [channels, "M/G", *w.kernel]
        raise OpError(
            f"filter is {describe(filter)} and x is {describe(x)}; filter must be {wanted}"
        )
    _check_group(x, w.channels_last, group)
    rank = len(w.kernel)
    more = extra(w)
    # compat: legacy padding means none here
    pads = w.pads if w.legacy_pad == NOTSET else (0,) * (2 * rank)
    padding = []
    for k, size in enumerate(w.kernel):
        padding.append((size - 1 - pads[k], size - 1 - pads[k + rank] + more[k]))
    ones = (1,) * rank
    how = Convolution(
        stride=ones,
        padding=tuple(padding),
        dilation=ones,
        spread=w.stride,
        channels_last=w.channels_last,
        group=group,
    )

    def forward(image: Any, weights: Any) -> Any:
        return convolve(image, _grouped_filter(weights, group, w.channels_last), how)

    return forward, w.channels_last


def _grouped_filter(filter: Any, group: int, channels_last: bool) -> Any:
    """filter as the forward convolution's, [M, *kernel, C/G] or [M, C/G, *kernel], with the kernel reversed."""
    channels = filter.shape[0]
    f = filter if channels_last else jnp.moveaxis(filter, 1, -1)  # [C, *kernel, M/G]
    kernel = f.shape[1:-1]
    f = jnp.flip(f, tuple(range(1, f.ndim - 1))).reshape(
        group, channels // group, *kernel, f.shape[-1]
    )
    f = jnp.moveaxis(jnp.swapaxes(f, 1, -1), -1, 2)  # [G, M/G, C/G, *kernel]
    f = f.reshape(-1, channels // group, *kernel)
    return jnp.moveaxis(f, 1, -1) if channels_last else f


@op("ConvTranspose")
@takes(extra=_extra, window=make_window)
def conv_transpose(x, filter, bias=None, *, window, extra, group: int = 1):
    forward, channels_last = _transposed(x, filter, window, group, extra)
    return _finish(forward(x, filter), bias, channels_last)


@op("ConvTransposeGradient", outputs=(1, 3))
@takes(extra=_extra, window=make_window)
def conv_transpose_gradient(x, filter, dy, *, window, extra, group: int = 1, no_bias: bool = False):
    forward, channels_last = _transposed(x, filter, window, group, extra)
    return _gradients(forward, x, filter, dy, channels_last, no_bias)


gradient("ConvTranspose")(_make_gradient)
