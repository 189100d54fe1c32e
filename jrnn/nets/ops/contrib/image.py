"""Borders, sizes and regions of images: PadImage, ResizeNearest (also 3-D), UpsampleBilinear, RoIAlign, with gradients.

Shapes: N images, C channels; x is [N, C, H, W] (order NCHW) or [N, H, W, C] (NHWC). RoIAlign averages bilinear samples over
P x Q bins in each of R regions; rois is [R, 5] of (image, x1, y1, x2, y2), or [R, 4] of the first image; y is [R, C, P, Q]
or [R, P, Q, C].
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.memory import check_size
from jrnn.nets.ops.contrib.window import (
    NOTSET,
    Window,
    check_image,
    is_channels_last,
    spatial_axes,
    takes_window,
)
from jrnn.nets.ops.values import check_float, check_rank, describe, is_concrete, raise_if, takes
from jrnn.nets.ops.vjp import op_with_vjp, pulled_back
from jrnn.nets.registry import op

MODES = ("constant", "reflect", "edge")


def _pads(x: Any, window: Window, mode: str) -> dict[int, tuple[int, int]]:
    """Spatial axis -> its padding before and after."""
    check_image(x)
    if mode not in MODES:
        raise OpError(f"mode {mode!r} is unknown; it must be one of {', '.join(MODES)}")
    rank = x.ndim - 2
    if (
        window.legacy_pad != NOTSET
        or window.whole
        or any(v != 1 for v in (*window.stride, *window.dilation))
    ):
        raise OpError(
            "takes no stride, dilation, legacy_pad or global_pooling; give pad, pads or pad_t, l, b, r"
        )
    if len(window.pads) != 2 * rank:
        raise OpError(
            f"pads {list(window.pads)} must have {2 * rank} entries for an image {describe(x)}"
        )
    axes = spatial_axes(x.ndim, window.channels_last)
    return {a: (window.pads[k], window.pads[k + rank]) for k, a in enumerate(axes)}


def _sources(size: int, before: int, after: int, mode: str) -> np.ndarray:
    """The source of each element of a padded line, for the modes that repeat the image."""
    check_size((before + size + after,), np.int64)
    indices = np.arange(-before, size + after)
    if mode == "edge":
        return np.clip(indices, 0, size - 1)
    indices = np.abs(indices)
    indices = np.minimum(indices, 2 * size - indices - 2)
    if indices.min() < 0:
        raise OpError(
            f"reflects {before} and {after} elements of a line of {size}; give smaller pads or another mode"
        )
    return indices


def _padded(x: Any, window: Window, mode: str, value: float) -> Any:
    """x with a border of `value` (constant), of its mirror image (reflect), or of its outermost elements (edge)."""
    pads = _pads(x, window, mode)
    if mode == "constant":
        return jnp.pad(x, [pads.get(a, (0, 0)) for a in range(x.ndim)], constant_values=value)
    for a, (before, after) in pads.items():
        x = jnp.take(x, _sources(x.shape[a], before, after, mode), axis=a)
    return x


@op("PadImage", gradient="PadImageGradient(dy)")
@takes_window
def pad_image(x, *, window, mode: str = "constant", value: float = 0.0):
    return _padded(x, window, mode, value)


@op("PadImageGradient")
@takes_window
def pad_image_gradient(dy, *, window, mode: str = "constant", value: float = 0.0):
    sizes = list(dy.shape)
    for a, (before, after) in _pads(dy, window, mode).items():
        sizes[a] -= before + after
        raise_if(
            sizes[a] < 1,
            f"it must be larger than the pads {before} and {after} in dimension {a}",
            dy=dy,
        )
    return pulled_back(lambda x: _padded(x, window, mode, value), jnp.zeros(sizes, dy.dtype), dy)


def scale_factors(scales: Any, args: Sequence[float]) -> tuple[np.float32, ...]:
    """The factor of each dimension, from a blob or from arguments; float32, as Caffe2 rounds with it."""
    if scales is not None:
        given = np.asarray(scales)
        raise_if(
            given.shape != (len(args),),
            f"it must be a vector of {len(args)} numbers",
            scales=scales,
        )
        args = given.tolist()
    raise_if(min(args) <= 0, f"scales {list(args)} must be positive")
    return tuple(np.float32(a) for a in args)


def _scaled(size: int, scale: np.float32) -> int:
    return check_size((int(np.float32(size) * scale),), np.int64)[0]


def _nearest(size: int, out: int, scale: np.float32) -> np.ndarray:
    """For each of `out` elements, its source in a line of `size`."""
    return np.minimum((np.arange(out, dtype=np.float32) / scale).astype(int), size - 1)


def stretched(x: Any, scales: tuple[np.float32, ...], axes: tuple[int, ...]) -> Any:
    """x with elements repeated or dropped along some axes."""
    for a, scale in zip(axes, scales):
        size = x.shape[a]
        x = jnp.take(x, _nearest(size, _scaled(size, scale), scale), axis=a)
    return x


@op_with_vjp("ResizeNearest", dynamic=True, gradient="ResizeNearestGradient(dy, x, scales)")
def resize_nearest(
    x, scales=None, *, width_scale: float = 1.0, height_scale: float = 1.0, order: str = "NCHW"
):
    """x enlarged by repeating elements, or shrunk by dropping them; `scales` (height, width) replaces the arguments."""
    check_image(x, 4)
    check_float(x, "x")
    return stretched(
        x,
        scale_factors(scales, (height_scale, width_scale)),
        spatial_axes(4, is_channels_last(order)),
    )


def _check_nchw(order: str) -> None:
    if is_channels_last(order):
        raise OpError(
            f"order {order!r} is not offered; it must be NCHW (put NHWC2NCHW before and NCHW2NHWC after)"
        )


@op_with_vjp("ResizeNearest3D", gradient="ResizeNearest3DGradient(dy, x)")
def resize_nearest_3d(
    x,
    *,
    temporal_scale: float = 1.0,
    height_scale: float = 1.0,
    width_scale: float = 1.0,
    order: str = "NCHW",
):
    check_image(x, 5)
    _check_nchw(order)
    check_float(x, "x")
    return stretched(x, scale_factors(None, (temporal_scale, height_scale, width_scale)), (2, 3, 4))


def _blend(size: int, out: int, dtype: Any) -> np.ndarray:
    """[out, size] weights by which `out` points, evenly spaced from end to end, interpolate a line of `size`."""
    check_size((out, size), np.float64)
    step = np.float32(size - 1) / np.float32(out - 1) if out > 1 else np.float32(0)
    at = step * np.arange(out, dtype=np.float32)
    low = at.astype(int)
    high = np.minimum(low + 1, size - 1)
    part = at - low.astype(np.float32)
    weights = np.zeros((out, size), np.float32)
    np.add.at(weights, (np.arange(out), low), 1 - part)
    np.add.at(weights, (np.arange(out), high), part)
    return weights.astype(dtype)


@op_with_vjp("UpsampleBilinear", dynamic=True, gradient="UpsampleBilinearGradient(dy, x, scales)")
def upsample_bilinear(
    x, scales=None, *, width_scale: float = 1.0, height_scale: float = 1.0, order: str = "NCHW"
):
    """x [N, C, H, W] interpolated to H * height_scale by W * width_scale; corners keep their places."""
    check_image(x, 4)
    check_float(x, "x")
    _check_nchw(order)
    scales = scale_factors(scales, (height_scale, width_scale))
    rows, columns = (_blend(n, _scaled(n, s), x.dtype) for n, s in zip(x.shape[2:], scales))
    return jnp.einsum("nchw,ih,jw->ncij", x, rows, columns, precision="highest")


_TOGETHER = 16  # regions at a time; each reads a whole image


def _weights(start: Any, size: Any, bins: int, length: int, sampling_ratio: int) -> Any:
    """The weight of each of `length` places in each bin of a region: [R, bins, length].

    A bin is the mean of evenly spaced samples. A sample is bilinear between places, and 0 farther than one place outside.
    """
    width = jnp.maximum(size, 1) / bins
    counts = (
        jnp.full(size.shape, sampling_ratio)
        if sampling_ratio > 0
        else jnp.ceil(width).astype(jnp.int32)
    )
    first = jnp.arange(bins)[None, :]
    places = jnp.arange(length)[None, None, :]

    def add(k: Any, total: Any) -> Any:
        at = start[:, None] + (first + ((k + 0.5) / counts)[:, None]) * width[:, None]
        seen = (at >= -1) & (at <= length) & (k < counts)[:, None]
        hats = jnp.maximum(1 - jnp.abs(jnp.clip(at, 0, length - 1)[..., None] - places), 0)
        return total + jnp.where(seen[..., None], hats, 0)

    zeros = jnp.zeros((size.size, bins, length), size.dtype)
    total = lax.fori_loop(
        0, jnp.max(counts, initial=1), add, zeros
    )  # as often as the largest region needs
    return total / counts[:, None, None]


def _regions(
    *,
    spatial_scale: float = 1.0,
    pooled_h: int = 1,
    pooled_w: int = 1,
    sampling_ratio: int = -1,
    order: str = "NCHW",
) -> Callable[[Any, Any], tuple]:
    last = is_channels_last(order)

    def prepared(x: Any, rois: Any) -> tuple:
        """Whether channels come last; images [N, C, H, W]; each region's image; its weights of rows and columns."""
        check_float(x, "x")
        check_rank(x, 4, "x")
        check_rank(rois, 2, "rois")
        raise_if(
            rois.shape[1] not in (4, 5),
            "its rows must be (image, x1, y1, x2, y2) or (x1, y1, x2, y2)",
            rois=rois,
        )
        images = jnp.moveaxis(jnp.asarray(x), -1, 1) if last else jnp.asarray(x)
        rois = lax.stop_gradient(jnp.asarray(rois))
        image = (
            rois[:, 0].astype(jnp.int32)
            if rois.shape[1] == 5
            else jnp.zeros(rois.shape[0], jnp.int32)
        )
        if (
            is_concrete(image)
            and ((np.asarray(image) < 0) | (np.asarray(image) >= x.shape[0])).any()
        ):
            raise OpError(f"rois names an image that is not one of the {x.shape[0]} in x")
        x1, y1, x2, y2 = (
            rois[:, -4 + k].astype(x.dtype) * np.asarray(spatial_scale, x.dtype) for k in range(4)
        )
        rows = _weights(y1, y2 - y1, pooled_h, images.shape[2], sampling_ratio)
        columns = _weights(x1, x2 - x1, pooled_w, images.shape[3], sampling_ratio)
        return last, images, image, rows.astype(x.dtype), columns.astype(x.dtype)

    return prepared


@op_with_vjp("RoIAlign", gradient="RoIAlignGradient(x, rois, dy)")
@takes(regions=_regions)
def roi_align(x, rois, *, regions):
    last, images, image, rows, columns = regions(x, rois)

    def one(region):
        number, r, c = region
        return jnp.einsum("ph,chw,qw->cpq", r, images[number], c)

    if rois.shape[0]:
        y = lax.map(one, (image, rows, columns), batch_size=_TOGETHER)
    else:
        y = jnp.zeros((0, images.shape[1], rows.shape[1], columns.shape[1]), x.dtype)
    return jnp.moveaxis(y, 1, -1) if last else y
