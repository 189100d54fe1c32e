"""Rules for convolutions and pooling windows, over one to three dimensions, in any layout."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrnn.convert.emit import FLOAT, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.elementwise import binary, unary
from jrnn.convert.rules.shapes import padded, pick, transpose
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError


@rule("conv_general_dilated")
def _(e: Emitter, node: Node, x, w):
    p = node.params
    spatial = len(x.shape) - 2
    if not 1 <= spatial <= 3 or x.dtype != FLOAT:
        raise ConversionError(f"a convolution over {spatial} dimensions of {x.dtype}; 1 to 3 of float32 convert")
    numbers, group = p["dimension_numbers"], p["feature_group_count"]
    dilated = any(n != 1 for n in p["lhs_dilation"])
    last = spatial == 2 and group == 1 and numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2) and not dilated
    order = (0, 2, 3, 1) if last else tuple(range(spatial + 2))  # of [N, C, ...], as the operator takes it
    x = e.blob(transpose(e, x, [numbers.lhs_spec[k] for k in order]))
    w = e.blob(transpose(e, w, [numbers.rhs_spec[k] for k in order]))
    shape = tuple(node.outputs[0].shape[numbers.out_spec[k]] for k in order)
    if (groups := p["batch_group_count"]) != 1:
        if last or group != 1:
            raise ConversionError("a convolution with groups of the batch beside channels last or groups of channels")
        x, group = _groups_as_channels(e, x, groups), groups
    pads: Sequence[tuple[int, int]] = _two(p["padding"], (0, 0))
    strides, dilations = _two(p["window_strides"], 1), _two(p["rhs_dilation"], 1)
    stretch = _two(p["lhs_dilation"], 1)
    x, w = (e.reshaped(v, _image(v.shape)) for v in (x, w))
    out = _image(shape)
    kernels = [w.shape[k] for k in ((1, 2) if last else range(2, len(w.shape)))]
    if dilated and (made := _transposed(e, x, w, out, kernels, pads, strides, dilations, stretch, group)) is not None:
        return transpose(e, e.reshaped(made, shape), np.argsort([numbers.out_spec[k] for k in order]))
    if dilated or any(n < 0 for pair in pads for n in pair):
        around = [(low, high, n - 1) for (low, high), n in zip(pads, stretch)]
        config = [(0, 0, 0), *around, (0, 0, 0)] if last else [(0, 0, 0), (0, 0, 0), *around]
        x, pads = e.blob(padded(e, x, np.zeros((), np.float32), config)), [(0, 0)] * len(kernels)
    args: dict[str, Any] = {"kernels": kernels, "strides": strides, "dilations": dilations, "group": group}
    args["pads"] = _pads(pads)
    made = e.op("Conv", [x, w], out, FLOAT, **args, order="NHWC" if last else None)
    return transpose(e, e.reshaped(made, shape), np.argsort([numbers.out_spec[k] for k in order]))


def _image(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[N, C, L] as [N, C, 1, L]."""
    return shape if len(shape) > 3 else (*shape[:2], 1, shape[2])


def _two(values: Sequence, missing: Any) -> tuple:
    """Settings of each dimension; one-dimensional windows get a first one of size 1."""
    values = tuple(values)
    return values if len(values) > 1 else (missing, *values)


def _pads(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Before all dimensions, then after them."""
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _groups_as_channels(e: Emitter, x: Blob, groups: int) -> Blob:
    """[G*N, C, ...] as [N, G*C, ...]: groups of the batch are convolved as groups of channels are."""
    apart = e.reshaped(x, (groups, x.shape[0] // groups, *x.shape[1:]))
    moved = e.blob(transpose(e, apart, [1, 0, *range(2, len(apart.shape))]))
    return e.reshaped(moved, (x.shape[0] // groups, groups * x.shape[1], *x.shape[2:]))


def _transposed(e: Emitter, x, w, out, kernels, pads, strides, dilations, stretch, group: int) -> Blob | None:
    """A convolution of a dilated image [N, C, H, W] as a ConvTranspose, where that is one."""
    before = [k - 1 - low for k, (low, _) in zip(kernels, pads)]
    # Caffe2's ending: the pads after, less what `adj` adds
    after = [k - 1 - high for k, (_, high) in zip(kernels, pads)]
    extra = [max(0, -n) for n in after]
    plain = all(n == 1 for n in (*strides, *dilations)) and len(kernels) == 2
    if not plain or any(n < 0 for n in before) or any(n >= s for n, s in zip(extra, stretch)):
        return None
    channels, features = x.shape[1], w.shape[0]
    for axis in (2, 3):
        if w.shape[axis] > 1:
            w = pick(e, w, axis, np.arange(w.shape[axis])[::-1])
    # [M, C/G, ...] -> [C, M/G, ...]
    apart = e.reshaped(w, (group, features // group, channels // group, *w.shape[2:]))
    filter = e.reshaped(e.blob(transpose(e, apart, (0, 2, 1, 3, 4))), (channels, features // group, *w.shape[2:]))
    args: dict[str, Any] = {"kernels": kernels, "strides": stretch, "pads": [*before, *(max(0, n) for n in after)]}
    if any(extra):
        args["adjs"] = extra
    return e.op("ConvTranspose", [x, filter], out, FLOAT, group=group, **args)


@rule("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _(e: Emitter, node: Node, x):
    p = node.params
    window = p["window_dimensions"]
    if any(n != 1 for n in p["window_dilation"]) or x.dtype != FLOAT:
        raise ConversionError("a window with dilation, or over another type than float32: Caffe2's pooling has neither")
    if any(n != 1 for n in p["base_dilation"]):
        least = {"reduce_window_max": -np.inf, "reduce_window_min": np.inf, "reduce_window_sum": 0.0}[node.name]
        x = padded(e, x, np.asarray(least, np.float32), [(0, 0, n - 1) for n in p["base_dilation"]])
    axes = [k for k, n in enumerate(window) if n > 1 or p["window_strides"][k] > 1 or any(p["padding"][k])]
    if not axes:
        return x
    if len(axes) > 3:
        raise ConversionError(f"a window over {len(axes)} dimensions; pooling over 1 to 3 converts")
    rest = [k for k in range(len(x.shape)) if k not in axes]
    order = [*rest, *axes]
    moved = e.blob(transpose(e, x, order))
    lead = math.prod(moved.shape[: len(rest)])
    image = e.reshaped(moved, (1, lead, *_two(moved.shape[len(rest) :], 1)))
    out = tuple(node.outputs[0].shape[k] for k in order)
    kernels = _two([window[k] for k in axes], 1)
    args: dict[str, Any] = {"strides": _two([p["window_strides"][k] for k in axes], 1), "kernels": kernels}
    args["pads"] = _pads(_two([p["padding"][k] for k in axes], (0, 0)))
    shape = (1, lead, *_two(out[len(rest) :], 1))
    made: Value
    if node.name == "reduce_window_max":
        made = e.op("MaxPool", [image], shape, FLOAT, **args)
    elif node.name == "reduce_window_min":
        made = unary(e, "Negative", e.op("MaxPool", [unary(e, "Negative", image)], shape, FLOAT, **args))
    else:
        mean: Blob = e.op("AveragePool", [image], shape, FLOAT, count_include_pad=1, **args)
        made = binary(e, "Mul", mean, np.asarray(math.prod(kernels), np.float32))
    return transpose(e, e.reshaped(e.blob(made), out), np.argsort(order))
