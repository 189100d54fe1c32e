"""Rules for products: `dot_general`, FC, convolutions of one to three dimensions in any layout, and pooling windows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrnn.convert.emitter import FLOAT, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import binary, unary
from jrnn.convert.rules.reduction_rules import reduce
from jrnn.convert.rules.shape_rules import (
    moves_elements,
    other_axes,
    padded,
    reverse,
    sizes_at,
    transpose,
)
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.nets.ir import Shape


@rule("dot_general")
def _(e: Emitter, node: FlatEquation, x, y):
    (over_x, over_y), (batch_x, batch_y) = node.params["dimension_numbers"]
    free_x = other_axes(x, *over_x, *batch_x)
    free_y = other_axes(y, *over_y, *batch_y)
    batch = sizes_at(x, batch_x)
    over = sizes_at(x, over_x)
    rows = sizes_at(x, free_x)
    columns = sizes_at(y, free_y)
    shape = (*batch, *rows, *columns)
    if x.dtype != FLOAT or y.dtype != FLOAT:
        # a sum of products: Caffe2 multiplies matrices of floats alone, which do not hold every integer
        x = transpose(e, x, [*batch_x, *free_x, *over_x])
        y = transpose(e, y, [*batch_y, *free_y, *over_y])
        x = e.cast(x, node.dtype)
        y = e.cast(y, node.dtype)
        x = e.reshaped(x, batch + rows + (1,) * len(columns) + over)
        y = e.reshaped(y, batch + (1,) * len(rows) + columns + over)
        axes = tuple(range(len(shape), len(shape) + len(over)))
        return reduce(e, "ReduceSum", binary(e, "Mul", x, y), axes)
    lead = (math.prod(batch),) if batch else ()
    m = math.prod(rows)
    k = math.prod(over)
    n = math.prod(columns)
    a, trans_a = _matrices(e, x, batch_x, free_x, over_x, (*lead, m, k))
    b, trans_b = _matrices(e, y, batch_y, over_y, free_y, (*lead, k, n))
    type = "BatchMatMul" if batch else "MatMul"
    product = e.op(type, [a, b], (*lead, m, n), FLOAT, trans_a=trans_a, trans_b=trans_b)
    return e.reshaped(product, shape)


def _matrices(e: Emitter, x: Value, batch, first, second, shape: Shape) -> tuple[Value, int | None]:
    """x as matrices [batch, first, second], or as their transposes if only that moves no elements."""
    order = [*batch, *first, *second]
    if moves_elements(x, order) and not moves_elements(x, [*batch, *second, *first]):
        return e.reshaped(x, (*shape[:-2], shape[-1], shape[-2])), 1
    return e.reshaped(transpose(e, x, order), shape), None


def fully_connected(e: Emitter, x: Value, w: Value, bias: Value, *, out_first: bool) -> Value:
    """x [..., in] times w, [out, in] or [in, out], plus bias [out]."""
    row = e.reshaped(x, (1, *x.shape)) if len(x.shape) == 1 else x
    shape = (*row.shape[:-1], *bias.shape)
    axis = len(row.shape) - 1
    type = "FC" if out_first else "FCTransposed"
    product = e.op(type, [row, w, bias], shape, FLOAT, axis=None if axis == 1 else axis)
    return e.reshaped(product, (*x.shape[:-1], *bias.shape))


# Convolutions ----------------------------------------------------------------------------------------------------------


@rule("conv_general_dilated")
def convolution_rule(e: Emitter, node: FlatEquation, x, w):
    p = node.params
    spatial = len(x.shape) - 2
    if not 1 <= spatial <= 3 or x.dtype != FLOAT:
        raise ConversionError(
            f"a convolution over {spatial} dimensions of {x.dtype}: only 1 to 3 dimensions of float32 can be converted"
        )
    numbers = p["dimension_numbers"]
    feature_groups = p["feature_group_count"]
    batch_groups = p["batch_group_count"]
    is_dilated = not _all_ones(p["lhs_dilation"])
    channels_last = (
        spatial == 2
        and feature_groups == 1
        and numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2)
        and not is_dilated
    )

    # The layout that the operator takes.
    order = list(range(spatial + 2))  # of [N, C, ...]
    if channels_last:
        order = [0, 2, 3, 1]
    x = transpose(e, x, _at(numbers.lhs_spec, order))
    w = transpose(e, w, _at(numbers.rhs_spec, order))
    out_axes = _at(numbers.out_spec, order)
    shape = sizes_at(node.outputs[0], out_axes)
    if batch_groups != 1:
        if channels_last or feature_groups != 1:
            raise ConversionError(
                "a convolution with batch groups and channels last or feature groups cannot be converted"
            )
        x = _groups_as_channels(e, x, batch_groups)
    x = e.reshaped(x, _image(x.shape))
    w = e.reshaped(w, _image(w.shape))
    out = _image(shape)

    window = _Window(
        kernels=list(w.shape[1:3] if channels_last else w.shape[2:]),
        pads=_two(p["padding"], (0, 0)),
        strides=_two(p["window_strides"], 1),
        dilations=_two(p["rhs_dilation"], 1),
        group=feature_groups * batch_groups,
    )
    stretch = _two(p["lhs_dilation"], 1)
    image = None
    if is_dilated:
        image = _transposed(e, x, w, out, window, stretch)
    if image is None:
        if is_dilated or min(_pads(window.pads)) < 0:
            # The operator has no dilation of images and no negative pads: an image with zeros takes their place.
            config = [(low, high, n - 1) for (low, high), n in zip(window.pads, stretch)]
            config.insert(0, (0, 0, 0))
            config.insert(3 if channels_last else 0, (0, 0, 0))
            x = padded(e, x, np.zeros((), np.float32), config)
            window = replace(window, pads=[(0, 0)] * len(window.kernels))
        image = e.op(
            "Conv",
            [x, w],
            out,
            FLOAT,
            kernels=window.kernels,
            strides=window.strides,
            dilations=window.dilations,
            group=window.group,
            pads=_pads(window.pads),
            order="NHWC" if channels_last else None,
        )
    return transpose(e, e.reshaped(image, shape), np.argsort(out_axes))


@dataclass(frozen=True)
class _Window:
    """The settings of a convolution, as Caffe2's operators take them; `pads` are pairs (before, after)."""

    kernels: Sequence[int]
    pads: Sequence[tuple[int, int]]
    strides: Sequence[int]
    dilations: Sequence[int]
    group: int


def _all_ones(numbers: Iterable[int]) -> bool:
    return set(numbers) <= {1}


def _at(values: Sequence[Any], positions: Iterable[int]) -> list[Any]:
    return [values[k] for k in positions]


def _image(shape: Shape) -> Shape:
    """[N, C, L] as [N, C, 1, L]."""
    return shape if len(shape) > 3 else (*shape[:2], 1, shape[2])


def _two(values: Sequence, missing: Any) -> tuple:
    """Settings of each dimension; one-dimensional windows get a first dimension of size 1."""
    values = tuple(values)
    return values if len(values) > 1 else (missing, *values)


def _pads(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The pads before all dimensions, then the pads after them."""
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _groups_as_channels(e: Emitter, x: Value, groups: int) -> Value:
    """[G*N, C, ...] as [N, G*C, ...]: a convolution with batch groups is one with feature groups."""
    by_group = e.reshaped(x, (groups, x.shape[0] // groups, *x.shape[1:]))
    transposed = transpose(e, by_group, [1, 0, *range(2, len(by_group.shape))])
    return e.reshaped(transposed, (x.shape[0] // groups, groups * x.shape[1], *x.shape[2:]))


def _transposed(
    e: Emitter, x: Value, w: Value, out: Shape, window: _Window, stretch: Sequence[int]
) -> Blob | None:
    """A convolution of a dilated image [N, C, H, W] as a ConvTranspose, or None if it is not one."""
    if not _all_ones((*window.strides, *window.dilations)) or len(window.kernels) != 2:
        return None
    before = []
    after = []
    extra = []  # Caffe2 adds `adj` after the pads
    for kernel, (low, high), n in zip(window.kernels, window.pads, stretch):
        before.append(kernel - 1 - low)
        after.append(max(0, kernel - 1 - high))
        extra.append(max(0, high - kernel + 1))
        if before[-1] < 0 or extra[-1] >= n:
            return None
    channels = x.shape[1]
    features = w.shape[0]
    group = window.group
    for axis in (2, 3):
        if w.shape[axis] > 1:
            w = reverse(e, w, axis)
    # [M, C/G, ...] -> [C, M/G, ...]
    by_group = e.reshaped(w, (group, features // group, channels // group, *w.shape[2:]))
    by_group = transpose(e, by_group, (0, 2, 1, 3, 4))
    filter = e.reshaped(by_group, (channels, features // group, *w.shape[2:]))
    return e.op(
        "ConvTranspose",
        [x, filter],
        out,
        FLOAT,
        kernels=window.kernels,
        strides=stretch,
        pads=[*before, *after],
        adjs=extra if any(extra) else None,
        group=group,
    )


_NEUTRAL = {"reduce_window_max": -np.inf, "reduce_window_min": np.inf, "reduce_window_sum": 0.0}


@rule(*_NEUTRAL)
def window_rule(e: Emitter, node: FlatEquation, x):
    p = node.params
    window = p["window_dimensions"]
    if not _all_ones(p["window_dilation"]) or x.dtype != FLOAT:
        raise ConversionError(
            "a window with dilation or of another type than float32: Caffe2's pooling has neither"
        )
    if not _all_ones(p["base_dilation"]):
        between = [(0, 0, n - 1) for n in p["base_dilation"]]
        x = padded(e, x, np.asarray(_NEUTRAL[node.name], np.float32), between)

    # Only the axes along which the window does something are pooled; the others become channels.
    axes = []
    for axis, size in enumerate(window):
        if size > 1 or p["window_strides"][axis] > 1 or any(p["padding"][axis]):
            axes.append(axis)
    if not axes:
        return x
    if len(axes) > 3:
        raise ConversionError(f"a window over {len(axes)} dimensions: Caffe2 pools over 1 to 3")
    rest = other_axes(x, *axes)
    order = [*rest, *axes]
    channels = math.prod(sizes_at(x, rest))
    image = e.reshaped(transpose(e, x, order), (1, channels, *_two(sizes_at(x, axes), 1)))
    out = sizes_at(node.outputs[0], order)
    shape = (1, channels, *_two(out[len(rest) :], 1))
    kernels = _two(_at(window, axes), 1)
    args: dict[str, Any] = {
        "strides": _two(_at(p["window_strides"], axes), 1),
        "kernels": kernels,
        "pads": _pads(_two(_at(p["padding"], axes), (0, 0))),
    }
    if node.name == "reduce_window_max":
        pooled = e.op("MaxPool", [image], shape, FLOAT, **args)
    elif node.name == "reduce_window_min":
        negative = e.op("MaxPool", [unary(e, "Negative", image)], shape, FLOAT, **args)
        pooled = unary(e, "Negative", negative)
    else:
        mean = e.op("AveragePool", [image], shape, FLOAT, count_include_pad=1, **args)
        pooled = binary(e, "Mul", mean, np.asarray(math.prod(kernels), np.float32))
    return transpose(e, e.reshaped(pooled, out), np.argsort(order))
