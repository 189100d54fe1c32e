"""Convolutions in groups of channels, in the form that is fastest on the device.

XLA on a CPU runs a grouped convolution much slower than its parts. There, depthwise convolutions become sums of shifted
images, and others become one convolution for each group. On other devices they stay one operation of XLA.

Shapes: N batch, C channels, G groups, M output channels. An image is [N, C, *spatial] or [N, *spatial, C], a filter
[M, C/G, *kernel] or [M, *kernel, C/G].
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LETTERS = "DHWUVXYZ"  # one for each spatial dimension
MOST_SHIFTS = 128  # places of a kernel, each of which is one term of the sum
MOST_PARTS = 32  # groups that become convolutions of their own


def dimension_numbers(rank: int, channels_last: bool) -> tuple[str, str, str]:
    """XLA's description of how image, filter and result are laid out, for `rank` spatial dimensions.

    >>> dimension_numbers(2, False)
    ('NCDH', 'OIDH', 'NCDH')
    """
    letters = LETTERS[:rank]
    image = f"N{letters}C" if channels_last else f"NC{letters}"
    return image, f"O{letters}I" if channels_last else f"OI{letters}", image


@dataclass(frozen=True)
class Convolution:
    """What slides how: `dilation` is the kernel's, `spread` the distance between the image's elements."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...]
    channels_last: bool
    group: int

    @property
    def channel(self) -> int:
        """The axis of channels in an image."""
        return len(self.stride) + 1 if self.channels_last else 1


@functools.partial(jax.jit, static_argnums=2)  # one program, where operators run one by one
def convolve(x: Any, filter: Any, c: Convolution) -> Any:
    """The convolution of an image and a filter that fit together."""
    if c.group == 1:
        return _whole(x, filter, c)
    kernel = filter.shape[1:-1] if c.channels_last else filter.shape[2:]
    if x.shape[c.channel] == c.group and math.prod(kernel) <= MOST_SHIFTS:
        on_cpu = functools.partial(_shifted, c=c)
    elif c.group <= MOST_PARTS:
        on_cpu = functools.partial(_in_parts, c=c)
    else:
        return _whole(x, filter, c)
    return lax.platform_dependent(x, filter, cpu=on_cpu, default=functools.partial(_whole, c=c))


def _whole(x: Any, filter: Any, c: Convolution) -> Any:
    return lax.conv_general_dilated(
        x,
        filter,
        c.stride,
        c.padding,
        lhs_dilation=c.spread,
        rhs_dilation=c.dilation,
        dimension_numbers=dimension_numbers(len(c.stride), c.channels_last),
        feature_group_count=c.group,
    )


def _in_parts(x: Any, filter: Any, c: Convolution) -> Any:
    one = Convolution(c.stride, c.padding, c.dilation, c.spread, c.channels_last, 1)
    parts = zip(jnp.split(x, c.group, c.channel), jnp.split(filter, c.group, 0))
    return jnp.concatenate([_whole(image, f, one) for image, f in parts], c.channel)


def _shifted(x: Any, filter: Any, c: Convolution) -> Any:
    """A depthwise convolution: for each place of the kernel the image moved there, times one number a channel."""
    rank, axis = len(c.stride), c.channel
    kernel = filter.shape[1:-1] if c.channels_last else filter.shape[2:]
    spatial = range(1, rank + 1) if c.channels_last else range(2, rank + 2)
    wide = jnp.promote_types(x.dtype, jnp.float32)  # sums of narrower types are as wide as XLA's own
    config = [(0, 0, 0)] * x.ndim
    for k, a in enumerate(spatial):
        config[a] = (*c.padding[k], c.spread[k] - 1)
    padded = lax.pad(x, jnp.zeros((), x.dtype), config).astype(wide)
    # [N, G, M/G, *spatial]: every channel makes M/G others
    padded = jnp.expand_dims(padded, axis + 1)
    spatial = [a + (a > axis) for a in spatial]
    per_place = filter.reshape(c.group, -1, math.prod(kernel)).astype(wide)  # [G, M/G, K]: C/G is 1
    sizes = [(padded.shape[a] - c.dilation[k] * (kernel[k] - 1) - 1) // c.stride[k] + 1 for k, a in enumerate(spatial)]
    total: Any = 0
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        starts, limits, strides = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for k, a in enumerate(spatial):
            starts[a], strides[a] = place[k] * c.dilation[k], c.stride[k]
            limits[a] = starts[a] + (sizes[k] - 1) * c.stride[k] + 1
        weights = jnp.expand_dims(per_place[..., number], [a for a in range(padded.ndim) if a not in (axis, axis + 1)])
        total = total + weights * lax.slice(padded, starts, limits, strides)
    shape = [*total.shape[:axis], filter.shape[0], *total.shape[axis + 2 :]]
    return total.reshape(shape).astype(x.dtype)
