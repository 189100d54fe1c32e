"""RoIAlign: averages of bilinear samples over regions of images, with its gradient.

Shapes: N images, C channels, R regions, P x Q bins of each. x [N, C, H, W] (order NCHW) or [N, H, W, C] (NHWC); rois [R, 5]
of (image, x1, y1, x2, y2), or [R, 4] of the first image; y [R, C, P, Q] or [R, P, Q, C].
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, check_rank, check_shape, describe
from jrnn.ops.contrib.window import is_channels_last
from jrnn.ops.values import is_concrete
from jrnn.registry import op

_TOGETHER = 16  # regions at a time: each reads a whole image


def _weights(start: Any, size: Any, bins: int, length: int, sampling_ratio: int) -> Any:
    """How much each of `length` places counts in each bin of a region: [R, bins, length].

    A bin is the mean of samples at even distances; a sample is bilinear between places, and 0 beyond one place outside.
    """
    width = jnp.maximum(size, 1) / bins
    counts = jnp.full(size.shape, sampling_ratio) if sampling_ratio > 0 else jnp.ceil(width).astype(jnp.int32)
    first, places = jnp.arange(bins)[None, :], jnp.arange(length)[None, None, :]

    def add(k: Any, total: Any) -> Any:
        at = start[:, None] + (first + ((k + 0.5) / counts)[:, None]) * width[:, None]
        seen = (at >= -1) & (at <= length) & (k < counts)[:, None]
        hats = jnp.maximum(1 - jnp.abs(jnp.clip(at, 0, length - 1)[..., None] - places), 0)
        return total + jnp.where(seen[..., None], hats, 0)

    zeros = jnp.zeros((size.size, bins, length), size.dtype)
    total = lax.fori_loop(0, jnp.max(counts, initial=1), add, zeros)  # as often as the largest region needs
    return total / counts[:, None, None]


def _prepared(x: Any, rois: Any, spatial_scale: float, pooled: tuple[int, int], sampling_ratio: int, order: str):
    """Images as [N, C, H, W], the image of each region, and the weights of its rows and columns, in x's type."""
    check_float(x, "x")
    check_rank(x, 4, "x")
    check_rank(rois, 2, "rois")
    if rois.shape[1] not in (4, 5):
        raise OpError(f"rois is {describe(rois)}; its rows must be (image, x1, y1, x2, y2) or (x1, y1, x2, y2)")
    images = jnp.moveaxis(jnp.asarray(x), -1, 1) if is_channels_last(order) else jnp.asarray(x)
    rois = lax.stop_gradient(jnp.asarray(rois))
    has_index = rois.shape[1] == 5
    image = rois[:, 0].astype(jnp.int32) if has_index else jnp.zeros(rois.shape[0], jnp.int32)
    if is_concrete(image) and ((np.asarray(image) < 0) | (np.asarray(image) >= x.shape[0])).any():
        raise OpError(f"rois names an image that is not one of the {x.shape[0]} in x")
    x1, y1, x2, y2 = (rois[:, -4 + k].astype(x.dtype) * np.asarray(spatial_scale, x.dtype) for k in range(4))
    rows = _weights(y1, y2 - y1, pooled[0], images.shape[2], sampling_ratio)
    columns = _weights(x1, x2 - x1, pooled[1], images.shape[3], sampling_ratio)
    return images, image, rows.astype(x.dtype), columns.astype(x.dtype)


@op("RoIAlign", gradient="RoIAlignGradient(x, rois, dy)")
def roi_align(
    x,
    rois,
    *,
    spatial_scale: float = 1.0,
    pooled_h: int = 1,
    pooled_w: int = 1,
    sampling_ratio: int = -1,
    order: str = "NCHW",
):
    images, image, rows, columns = _prepared(x, rois, spatial_scale, (pooled_h, pooled_w), sampling_ratio, order)

    def one(region):
        number, r, c = region
        return jnp.einsum("ph,chw,qw->cpq", r, images[number], c)

    y = (
        lax.map(one, (image, rows, columns), batch_size=_TOGETHER)
        if rois.shape[0]
        else jnp.zeros((0, images.shape[1], pooled_h, pooled_w), x.dtype)
    )
    return jnp.moveaxis(y, 1, -1) if is_channels_last(order) else y


@op("RoIAlignGradient")
def roi_align_gradient(
    x,
    rois,
    dy,
    *,
    spatial_scale: float = 1.0,
    pooled_h: int = 1,
    pooled_w: int = 1,
    sampling_ratio: int = -1,
    order: str = "NCHW",
):
    images, image, rows, columns = _prepared(x, rois, spatial_scale, (pooled_h, pooled_w), sampling_ratio, order)
    last = is_channels_last(order)
    wanted = (pooled_h, pooled_w, x.shape[-1]) if last else (x.shape[1], pooled_h, pooled_w)
    check_shape(dy, (rois.shape[0], *wanted), "dy")
    arriving = jnp.moveaxis(dy, -1, 1) if last else dy

    def add(total, region):
        number, r, c, d = region
        return total.at[number].add(jnp.einsum("ph,cpq,qw->chw", r, d, c)), None

    dx, _ = lax.scan(add, jnp.zeros(images.shape, dy.dtype), (image, rows, columns, arriving))
    return jnp.moveaxis(dx, 1, -1) if last else dx
