"""Rearranging the elements of images: order of axes and channels, patches as columns, blocks as batches, DepthConcat."""

import math
from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ir import Op
from jrnn.nets.ops.images.windows import (
    Window,
    check_image,
    is_channels_last,
    spatial_sizes,
    takes_window,
)
from jrnn.nets.ops.shape import concat, make_split_gradient, split
from jrnn.nets.ops.values import describe, raise_if, takes
from jrnn.nets.registry import gradient, op


@op("NCHW2NHWC", gradient="NHWC2NCHW(dy)")
def nchw_to_nhwc(x):
    check_image(x)
    return jnp.moveaxis(x, 1, -1)


@op("NHWC2NCHW", gradient="NCHW2NHWC(dy)")
def nhwc_to_nchw(x):
    check_image(x)
    return jnp.moveaxis(x, -1, 1)


def _transpose_channels(x: Any, order: str, group: int, back: bool) -> Any:
    axis = x.ndim - 1 if is_channels_last(order) else 1
    if x.ndim < 2 or group < 1 or x.shape[axis] % group:
        raise OpError(
            f"group {group} must be at least 1 and divide the channels of x {describe(x)}, order {order}"
        )
    rows = x.shape[axis] // group if back else group
    shape = (*x.shape[:axis], rows, x.shape[axis] // rows, *x.shape[axis + 1 :])
    return jnp.swapaxes(x.reshape(shape), axis, axis + 1).reshape(x.shape)


@op("ChannelShuffle", gradient="ChannelShuffleGradient(dy)")
def channel_shuffle(x, *, group: int = 1, order: str = "NCHW"):
    """The channels in `group` groups, taken in turn from each."""
    return _transpose_channels(x, order, group, back=False)


op("ChannelShuffleGradient")(
    lambda dy, *, group=1, order="NCHW": _transpose_channels(dy, order, group, back=True)
)


def _for_columns(window: Window, x: Any, op: Op) -> Window:
    w = window.for_image(x)
    # compat: Caffe2 does not read these here, and pads by `pad`
    unread = [
        n
        for n in ("pads", "pad_t", "pad_l", "pad_b", "pad_r", "legacy_pad", "global_pooling")
        if op.arg(n)
    ]
    if unread:
        raise OpError(f"takes no {', '.join(unread)}; give pad, the same on all sides")
    return w


@op("Im2Col", gradient="Col2Im(dy, x)")
@takes_window
def im2col(x, *, window, op):
    """The elements of each window as channels: [N, C K, *windows], or [N, *windows, K C] in order NHWC."""
    w = _for_columns(window, x, op)
    parts = list(w.slices(x, 0))
    if w.channels_last:
        return jnp.concatenate(parts, -1)
    columns = jnp.stack(parts, 2)  # [N, C, K, *windows]
    return columns.reshape(x.shape[0], -1, *columns.shape[3:])


@op("Col2Im", gradient="Im2Col(dy)")
@takes_window
def col2im(columns, z, *, window, op):
    """Adds columns up at the places of their elements, in an image of z's shape; the values of z are not read."""
    w = _for_columns(window, z, op)
    windows = w.output_sizes(spatial_sizes(z, w.channels_last))
    n = z.shape[0]
    c = z.shape[-1 if w.channels_last else 1]
    shape = (n, *windows, w.volume, c) if w.channels_last else (n, c, w.volume, *windows)
    size = math.prod(shape)
    if columns.size != size:
        raise OpError(
            f"columns is {describe(columns)}; for an image {describe(z)} it must have {size} elements"
        )
    parts = jnp.moveaxis(columns.reshape(shape), -2 if w.channels_last else 2, 0)
    return w.spread(parts, z.shape)


def _blocks(
    *,
    block_size: int = 2,
    pad: int = 0,
    pad_t: int | None = None,
    pad_l: int | None = None,
    pad_b: int | None = None,
    pad_r: int | None = None,
    order: str = "NCHW",
) -> tuple[int, int, int]:
    """The size of blocks, the rows of padding at the top, and the padding of the other sides."""
    raise_if(block_size < 1, f"block_size must be at least 1, is {block_size}")
    raise_if(is_channels_last(order), f"order {order!r} is not offered; it must be NCHW")
    # compat: of the single sides Caffe2 reads pad_t alone; where another would matter, its result is wrong
    if any(p not in (None, pad) for p in (pad_l, pad_b, pad_r)):
        raise OpError(
            f"pad_l, pad_b and pad_r must equal pad, which is {pad}; only pad_t may differ"
        )
    top = pad if pad_t is None else pad_t
    raise_if(top < 0 or pad < 0, f"pad {pad} and pad_t {top} must not be negative")
    return block_size, top, pad


@op("SpaceToBatch", gradient="BatchToSpace(dy)")
@takes(blocks=_blocks)
def space_to_batch(x, *, blocks):
    """[N, C, H, W] -> [b b N, C, H / b, W / b]: every b-th row and column, from each of the b b starting points."""
    check_image(x, 4)
    size, top, pad = blocks
    n, c, h, w = x.shape
    rows = (h + top + pad) // size
    columns = (w + 2 * pad) // size
    if (h + top + pad) % size or (w + 2 * pad) % size:
        raise OpError(
            f"x is {describe(x)}; its padded height and width must be multiples of block_size {size}"
        )
    x = jnp.pad(x, ((0, 0), (0, 0), (top, pad), (pad, pad))).reshape(
        n, c, rows, size, columns, size
    )
    return x.transpose(3, 5, 0, 1, 2, 4).reshape(-1, c, rows, columns)


@op("BatchToSpace", gradient="SpaceToBatch(dy)")
@takes(blocks=_blocks)
def batch_to_space(x, *, blocks):
    """[b b N, C, H, W] -> [N, C, b H, b W], the reverse of SpaceToBatch; pads are cut off."""
    check_image(x, 4)
    size, top, pad = blocks
    batch, c, h, w = x.shape
    rows = h * size
    columns = w * size
    if batch % size**2 or rows <= top + pad or columns <= 2 * pad:
        raise OpError(
            f"x is {describe(x)}; its batch must be a multiple of block_size^2 = {size**2}, and the pads smaller than "
            f"the {rows} by {columns} image"
        )
    x = x.reshape(size, size, -1, c, h, w).transpose(2, 3, 4, 0, 5, 1).reshape(-1, c, rows, columns)
    return x[:, :, top : rows - pad, pad : columns - pad]


# The old names of Concat and Split, for old nets.
op("DepthConcat", outputs=2, gradient="Split(dy, y1) -> *")(concat)
op("DepthSplit", outputs=(1, None))(split)
gradient("DepthSplit")(make_split_gradient)
