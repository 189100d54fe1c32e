"""Sliding windows over images: kernel, stride, dilation and padding as the wire describes them, and their positions.

Shapes: N batch, C channels, K kernel volume. An image is [N, C, *spatial] (order NCHW) or [N, *spatial, C] (NHWC), with one,
two, three or more spatial dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ir import Ints, Shape
from jrnn.nets.ops.values import raise_if, takes

# legacy_pad on the wire
NOTSET, VALID, SAME, CAFFE = range(4)

Pads = tuple[tuple[int, int], ...]


def is_channels_last(order: str) -> bool:
    """Whether `order` is NHWC; OpError where it is neither that nor NCHW.

    >>> is_channels_last("NCHW")
    False
    """
    raise_if(
        order not in ("NCHW", "nchw", "NHWC", "nhwc"),
        f"order {order!r} is unknown; it must be NCHW or NHWC",
    )
    return order in ("NHWC", "nhwc")


def spatial_axes(rank: int, channels_last: bool) -> Ints:
    """The axes of an image of `rank` dimensions that are neither batch nor channels."""
    return tuple(range(1, rank - 1)) if channels_last else tuple(range(2, rank))


def spatial_sizes(x: Any, channels_last: bool) -> Shape:
    """The sizes of an image, or of the kernel of a filter, without batch and channels."""
    return x.shape[1:-1] if channels_last else x.shape[2:]


def check_image(x: Any, rank: int | None = None) -> None:
    """Raises OpError unless `x` has batch, channels and spatial dimensions (`rank` dimensions in all)."""
    raise_if(
        rank is not None and x.ndim != rank,
        f"x must be an image of {rank} dimensions, is {list(x.shape)}",
    )
    if x.ndim < 3:
        raise OpError(
            f"x must be an image of batch, channels and at least one spatial dimension, is {list(x.shape)}"
        )


@dataclass(frozen=True)
class Window:
    """Kernel, stride, dilation and padding, consistent with each other, but not yet checked against an image."""

    kernel: Ints
    stride: Ints
    dilation: Ints
    pads: Ints  # all heads, then all tails
    legacy_pad: int
    whole: bool  # global_pooling: the kernel is the image
    channels_last: bool

    def for_image(self, x: Any) -> Window:
        """The window with one entry per spatial dimension of `x`; OpError if it has fewer."""
        check_image(x)
        rank = x.ndim - 2
        if self.whole:
            ones = (1,) * rank
            sizes = spatial_sizes(x, self.channels_last)
            return replace(
                self,
                kernel=sizes,
                stride=ones,
                dilation=ones,
                pads=(0,) * (2 * rank),
                legacy_pad=NOTSET,
            )
        raise_if(
            not self.kernel,
            "kernel is required: give kernel, kernel_h and kernel_w, kernels, or global_pooling",
        )
        if len(self.kernel) < rank:
            raise OpError(
                f"has {len(self.kernel)} kernel sizes {list(self.kernel)} and an image {list(x.shape)} with {rank} spatial "
                f"dimensions; give kernels with {rank} sizes"
            )
        # compat: `kernel` means two dimensions; on images with one, the first is used
        n = len(self.kernel)
        return replace(
            self,
            kernel=self.kernel[:rank],
            stride=self.stride[:rank],
            dilation=self.dilation[:rank],
            pads=self.pads[:rank] + self.pads[n : n + rank],
        )

    def extent(self, k: int) -> int:
        """The number of elements that the kernel spans in dimension `k`."""
        return self.dilation[k] * (self.kernel[k] - 1) + 1

    def padding(self, sizes: Shape) -> Pads:
        """The padding before and after each spatial dimension, given their sizes; negative padding crops."""
        return tuple(self._padding(k, size) for k, size in enumerate(sizes))

    def _padding(self, k: int, size: int) -> tuple[int, int]:
        stride = self.stride[k]
        span = self.extent(k)
        if self.legacy_pad == VALID:
            return 0, 0
        if self.legacy_pad == SAME:
            raise_if(
                self.dilation[k] != 1,
                f"legacy_pad SAME takes no dilation, dilation is {self.dilation[k]}",
            )
            needed = (-(-size // stride) - 1) * stride + self.kernel[k] - size
            # compat: truncated towards 0, also if a stride above the kernel makes it negative
            head = int(needed / 2)
            return head, needed - head
        head = self.pads[k]
        tail = self.pads[k + len(self.kernel)]
        if self.legacy_pad == CAFFE:
            room = size + 2 * head - span
            more = -(-room // stride) - room // stride  # 1 if the last window is only partly inside
            if head > 0 and (room // stride + more) * stride >= size + head:
                more -= 1
            if more < 0:
                raise OpError(
                    f"legacy_pad 3 with pad {head}, stride {stride} and a kernel of {span} leaves out a window that fits in "
                    f"an image of {size}; give a smaller pad or stride"
                )
            return head, head + more * stride
        return head, tail

    def output_sizes(self, sizes: Shape) -> Shape:
        """How many windows fit in each dimension; OpError where none does."""
        lengths = []
        for k, (size, (head, tail)) in enumerate(zip(sizes, self.padding(sizes))):
            room = size + head + tail - self.extent(k)
            if room < 0:
                raise OpError(
                    f"kernel of {self.extent(k)} elements (with dilation) is larger than the image of {size} with padding "
                    f"{head} and {tail} in spatial dimension {k}"
                )
            lengths.append(room // self.stride[k] + 1)
        return tuple(lengths)

    def pad(self, x: Any, fill: float) -> Any:
        """x with its padding filled with `fill`."""
        axes = spatial_axes(x.ndim, self.channels_last)
        config = [(0, 0, 0)] * x.ndim
        for a, (head, tail) in zip(axes, self.padding(spatial_sizes(x, self.channels_last))):
            config[a] = (head, tail, 0)
        return lax.pad(x, jnp.asarray(fill, x.dtype), config)

    def slices(self, x: Any, fill: float) -> Iterator[Any]:
        """For each of the K places in the kernel, the elements of all windows at that place."""
        axes = spatial_axes(x.ndim, self.channels_last)
        outputs = self.output_sizes(spatial_sizes(x, self.channels_last))
        padded = self.pad(x, fill)
        for place in itertools.product(*(range(k) for k in self.kernel)):
            yield elements_at(padded, axes, self, place, outputs)

    def spread(self, parts: Iterable[Any], shape: Shape) -> Any:
        """The transpose of `slices`: adds the parts up at their places, into an image of `shape`."""
        axes = spatial_axes(len(shape), self.channels_last)
        padding = self.padding(tuple(shape[a] for a in axes))
        total: Any = 0
        for part, place in zip(parts, itertools.product(*(range(k) for k in self.kernel))):
            config = [(0, 0, 0)] * len(shape)
            for k, a in enumerate(axes):
                start = place[k] * self.dilation[k]
                covered = start + (part.shape[a] - 1) * self.stride[k] + 1
                head, _ = padding[k]
                config[a] = (start - head, shape[a] + head - covered, self.stride[k] - 1)
            total = total + lax.pad(part, jnp.zeros((), part.dtype), config)
        return total

    @property
    def volume(self) -> int:
        """K, the number of places in the kernel."""
        return math.prod(self.kernel)


def _per_dimension(name: str, many: Ints, one: int | None, sides: tuple[int | None, ...]) -> Ints:
    """A setting from its three forms on the wire: `kernels`, `kernel`, or `kernel_h` and `kernel_w`; () if absent."""
    if one is not None:
        return (one,) * len(sides) + many[len(sides) :]
    if None not in sides and not many:
        return sides
    return many


def make_window(
    *,
    kernel: int | None = None,
    kernel_h: int | None = None,
    kernel_w: int | None = None,
    kernels: Ints = (),
    stride: int | None = None,
    stride_h: int | None = None,
    stride_w: int | None = None,
    strides: Ints = (),
    dilation: int | None = None,
    dilation_h: int | None = None,
    dilation_w: int | None = None,
    dilations: Ints = (),
    pad: int | None = None,
    pad_t: int | None = None,
    pad_l: int | None = None,
    pad_b: int | None = None,
    pad_r: int | None = None,
    pads: Ints = (),
    legacy_pad: int = NOTSET,
    global_pooling: bool = False,
    order: str = "NCHW",
) -> Window:
    sides = (pad_t, pad_l, pad_b, pad_r)
    given = bool(pads) or pad is not None or None not in sides
    if legacy_pad not in (NOTSET, VALID, SAME, CAFFE):
        raise OpError(
            f"legacy_pad {legacy_pad} is unknown; it must be 0 (none), 1 (valid), 2 (same) or 3 (Caffe's)"
        )
    if legacy_pad in (VALID, SAME) and given:
        raise OpError(
            "legacy_pad VALID and SAME set the padding themselves; leave pad, pads and pad_t, l, b, r out"
        )
    k = _per_dimension("kernel", kernels, kernel, (kernel_h, kernel_w))
    rank = len(k) or 2
    s = _per_dimension("stride", strides, stride, (stride_h, stride_w)) or (1,) * rank
    d = _per_dimension("dilation", dilations, dilation, (dilation_h, dilation_w)) or (1,) * rank
    p = _per_dimension("pad", pads, pad, sides) or (0,) * (2 * rank)
    for name, values, wanted in (("stride", s, rank), ("dilation", d, rank), ("pad", p, 2 * rank)):
        if len(values) != wanted:
            raise OpError(
                f"{name}s {list(values)} has {len(values)} entries; kernels {list(k)} asks for {wanted}"
            )
    sizes = () if global_pooling else k  # Caffe's translator writes kernel 0 next to global_pooling
    if any(v < 1 for v in (*sizes, *s, *d)) or any(v < 0 for v in p):
        raise OpError(
            f"kernels {list(k)}, strides {list(s)}, dilations {list(d)} must be positive, pads {list(p)} not negative"
        )
    if global_pooling and (any(p) or any(v != 1 for v in (*s, *d))):
        raise OpError("global_pooling takes the whole image; leave pad, stride and dilation out")
    return Window(
        kernel=k,
        stride=s,
        dilation=d,
        pads=p,
        legacy_pad=legacy_pad,
        whole=global_pooling,
        channels_last=is_channels_last(order),
    )


takes_window = takes(window=make_window)


def elements_at(padded: Any, axes: Sequence[int], window: Any, place: Ints, counts: Ints) -> Any:
    """The elements at one place of the kernel of all windows: `counts` of them along each spatial axis.

    The window has a stride and a dilation for each of these axes.
    """
    starts = [0] * padded.ndim
    limits = list(padded.shape)
    strides = [1] * padded.ndim
    for k, a in enumerate(axes):
        starts[a] = place[k] * window.dilation[k]
        strides[a] = window.stride[k]
        limits[a] = starts[a] + (counts[k] - 1) * window.stride[k] + 1
    return lax.slice(padded, starts, limits, strides)
