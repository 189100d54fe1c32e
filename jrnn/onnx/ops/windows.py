"""Operators over windows: convolutions and pooling.

Shapes: N batch, C channels, then the spatial axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.jaxprs.queries import is_floating
from jrnn.nets.memory import check_size
from jrnn.onnx.graph import op
from jrnn.onnx.ops.contract import by_channel, precision


@dataclass(frozen=True)
class AxisWindow:
    """The windows along one spatial axis. `outside` is the padding that `ceil_mode` adds, which no average counts."""

    size: int
    kernel: int
    stride: int
    dilation: int
    low: int
    high: int
    outside: int

    def positions(self) -> np.ndarray:
        """The indices of the elements that each window covers, [windows, kernel]; out of range in the padding."""
        last = self.size + self.high + self.outside - ((self.kernel - 1) * self.dilation + 1)
        check_size((max(0, (last + self.low) // self.stride + 1), self.kernel), np.int64)
        first = np.arange(-self.low, last + 1, self.stride)
        return first[:, None] + np.arange(self.kernel)[None] * self.dilation


def _windows(node, shape: Sequence[int], kernel: Sequence[int]) -> list[AxisWindow]:
    rank = len(kernel)
    auto = node.get("auto_pad", "NOTSET")
    pads = np.reshape(node.get("pads") or [0] * 2 * rank, (2, rank)).T.tolist()
    strides = node.get("strides") or [1] * rank
    dilations = node.get("dilations") or [1] * rank
    windows = []
    for axis, (size, k) in enumerate(zip(shape, kernel, strict=True)):
        stride = strides[axis]
        dilation = dilations[axis]
        reach = (k - 1) * dilation + 1
        low, high = pads[axis]
        outside = 0
        if auto == "VALID":
            low = high = 0
        elif auto != "NOTSET":
            total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
            low = total // 2 if auto == "SAME_UPPER" else total - total // 2
            high = total - low
        if node.get("ceil_mode", 0):
            count = math.ceil((size + low + high - reach) / stride) + 1
            # a window may not begin in the padding at the end
            count -= (count - 1) * stride >= size + low
            outside = (count - 1) * stride + reach - (size + low + high)
        windows.append(AxisWindow(size, k, stride, dilation, low, high, outside))
    return windows


def convolve(node, x, weight, **options):
    """A convolution with the node's strides, padding, dilations and groups."""
    windows = _windows(node, x.shape[2:], weight.shape[2:])
    return lax.conv_general_dilated(
        x,
        weight,
        [w.stride for w in windows],
        [(w.low, w.high) for w in windows],
        rhs_dilation=[w.dilation for w in windows],
        feature_group_count=node.get("group", 1),
        **options,
    )


def add_bias(y, bias):
    return y if bias is None else y + by_channel(bias, y)


@op("Conv")
def _(node, x, weight, bias=None):
    return add_bias(
        convolve(node, jnp.asarray(x), jnp.asarray(weight), precision=precision()), bias
    )


@op("ConvTranspose")
def conv_transpose_node(node, x, weight, bias=None):
    """The transpose of a convolution is one of x with its elements apart by the stride and the kernel reversed."""
    x = jnp.asarray(x)
    weight = jnp.asarray(weight)
    kernel = weight.shape[2:]
    groups = node.get("group", 1)
    rank = x.ndim - 2
    strides = node.get("strides") or [1] * rank
    dilations = node.get("dilations") or [1] * rank
    extra = node.get("output_padding") or [0] * rank
    pads = np.reshape(node.get("pads") or [0] * 2 * rank, (2, rank)).T.tolist()
    auto = node.get("auto_pad", "NOTSET")
    wanted = node.get("output_shape")
    if auto.startswith("SAME") and wanted is None:
        wanted = []
        for size, stride in zip(x.shape[2:], strides, strict=True):
            wanted.append(size * stride)
    padding = []
    for k, (low, high) in enumerate(pads):
        reach = (kernel[k] - 1) * dilations[k]
        if auto == "VALID":
            low = high = 0
        if wanted is not None:
            total = strides[k] * (x.shape[2 + k] - 1) + extra[k] + reach + 1 - wanted[-rank:][k]
            low = total // 2 if auto == "SAME_UPPER" else total - total // 2
            low = 0 if total < 0 else low
            high = total - low
        padding.append((reach - low, reach - high + extra[k]))
    weight = weight.reshape(groups, x.shape[1] // groups, *weight.shape[1:])
    weight = jnp.flip(
        jnp.swapaxes(weight, 1, 2).reshape(-1, x.shape[1] // groups, *kernel),
        tuple(range(2, 2 + rank)),
    )
    options = {"lhs_dilation": strides, "rhs_dilation": dilations, "feature_group_count": groups}
    return add_bias(
        lax.conv_general_dilated(x, weight, [1] * rank, padding, precision=precision(), **options),
        bias,
    )


def _reduced(x, windows: Sequence[AxisWindow], initial, function):
    sizes = [1, 1]
    strides = [1, 1]
    dilations = [1, 1]
    pads = [(0, 0), (0, 0)]
    for w in windows:
        sizes.append(w.kernel)
        strides.append(w.stride)
        dilations.append(w.dilation)
        pads.append((w.low, w.high + w.outside))
    return lax.reduce_window(
        x, np.asarray(initial, x.dtype), function, sizes, strides, pads, None, dilations
    )


@op("MaxPool")
def max_pool_node(node, x):
    x = jnp.asarray(x)
    windows = _windows(node, x.shape[2:], node.get("kernel_shape"))
    if is_floating(x):
        lowest = -np.inf
    else:
        lowest = jnp.iinfo(x.dtype).min
    if len(node.outputs) == 1:
        return _reduced(x, windows, lowest, lax.max)
    rank = len(windows)
    places = np.zeros((), np.int64)
    inside = np.asarray(True)
    if node.get("storage_order", 0) == 0:
        order = range(rank)[::-1]
    else:
        order = range(rank)
    apart = {}
    step = 1
    for axis in order:
        apart[axis] = step
        step *= windows[axis].size
    index = []
    for axis, w in enumerate(windows):  # [o1, o2, ..., k1, k2, ...]
        at = w.positions()
        row = [1] * 2 * rank
        row[axis], row[rank + axis] = at.shape
        inside = inside & ((at >= 0) & (at < w.size)).reshape(row)
        index.append(np.clip(at, 0, w.size - 1).reshape(row))
        places = places + index[-1] * apart[axis]
    flat = (*inside.shape[:rank], -1)
    inside = inside.reshape(flat)
    places = places.reshape(flat)
    picked = x[(slice(None), slice(None), *index)].reshape(*x.shape[:2], *inside.shape)
    picked = jnp.where(inside[None, None], picked, jnp.asarray(lowest, x.dtype))
    best = jnp.argmax(picked, -1)[..., None]
    channels = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * rank) * math.prod(
        x.shape[2:]
    )
    where = jnp.take_along_axis(jnp.asarray(places)[None, None], best, -1)[..., 0]
    return jnp.take_along_axis(picked, best, -1)[..., 0], where + jnp.asarray(channels)


@op("AveragePool")
def _(node, x):
    x = jnp.asarray(x)
    windows = _windows(node, x.shape[2:], node.get("kernel_shape"))
    total = _reduced(x, windows, 0, lax.add)
    for axis, w in enumerate(windows):
        low, high = (w.low, w.high) if node.get("count_include_pad", 0) else (0, 0)
        at = w.positions()
        counts = ((at >= -low) & (at < w.size + high)).sum(1)
        row = [1] * total.ndim
        row[2 + axis] = len(counts)
        total = total / counts.reshape(row).astype(x.dtype)
    return total


@op("GlobalAveragePool", "GlobalMaxPool")
def _(node, x):
    reduce = jnp.mean if node.type == "GlobalAveragePool" else jnp.max
    return reduce(x, axis=tuple(range(2, x.ndim)), keepdims=True)
