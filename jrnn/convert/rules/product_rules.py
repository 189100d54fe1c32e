"""Rules for products: `dot_general`, FC, convolutions of one to three dimensions in any layout, and pooling windows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrnn.convert.emitter import FLOAT, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import binary, unary
from jrnn.convert.rules.reduction_rules import reduce
from jrnn.convert.rules.shape_rules import padded, reverse, transpose
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation


@rule("dot_general")
def _(e: Emitter, node: FlatEquation, x, y):
    (over_x, over_y), (batch_x, batch_y) = node.params["dimension_numbers"]
    free_x = [k for k in range(len(x.shape)) if k not in (*over_x, *batch_x)]
    free_y = [k for k in range(len(y.shape)) if k not in (*over_y, *batch_y)]
    batch, over = (tuple(x.shape[k] for k in dims) for dims in (batch_x, over_x))
    rows, columns = (tuple(v.shape[k] for k in free) for v, free in ((x, free_x), (y, free_y)))
    shape = (*batch, *rows, *columns)
    if x.dtype != FLOAT or y.dtype != FLOAT:
        # a sum of products: Caffe2 multiplies matrices of floats alone, which do not hold every integer
        x = transpose(e, x, [*batch_x, *free_x, *over_x])
        y = transpose(e, y, [*batch_y, *free_y, *over_y])
        x, y = (e.cast(v, node.outputs[0].dtype) for v in (x, y))
        x = e.reshaped(x, (*batch, *rows, *(1 for _ in columns), *over))
        y = e.reshaped(y, (*batch, *(1 for _ in rows), *columns, *over))
        axes = tuple(range(len(shape), len(shape) + len(over)))
        return reduce(e, "ReduceSum", binary(e, "Mul", x, y), axes)
    lead = (math.prod(batch),) if batch else ()
    m = math.prod(rows)
    k = math.prod(over)
    n = math.prod(columns)
    a, trans_a = _matrices(e, x, batch_x, free_x, over_x, (*lead, m, k))
    b, trans_b = _matrices(e, y, batch_y, over_y, free_y, (*lead, k, n))
    type = "BatchMatMul" if batch else "MatMul"
    return e.reshaped(
        e.op(type, [a, b], (*lead, m, n), FLOAT, trans_a=trans_a, trans_b=trans_b), shape
    )


def _matrices(
    e: Emitter, x: Value, batch, first, second, shape: tuple[int, ...]
) -> tuple[Value, int | None]:
    """x as matrices [batch, first, second], or as their transposes if that moves no elements."""
    order, swapped = (
        [d for d in dims if x.shape[d] != 1]
        for dims in ([*batch, *first, *second], [*batch, *second, *first])
    )
    if (
        swapped == sorted(swapped) and order != swapped
    ):  # the order of dimensions of size 1 is irrelevant
        return e.reshaped(x, (*shape[:-2], shape[-1], shape[-2])), 1
    return e.reshaped(transpose(e, x, [*batch, *first, *second]), shape), None


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
    group = p["feature_group_count"]
    dilated = any(n != 1 for n in p["lhs_dilation"])
    last = (
        spatial == 2
        and group == 1
        and numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2)
        and not dilated
    )
    order = (
        (0, 2, 3, 1) if last else tuple(range(spatial + 2))
    )  # of [N, C, ...], as the operator takes it
    x = transpose(e, x, [numbers.lhs_spec[k] for k in order])
    w = transpose(e, w, [numbers.rhs_spec[k] for k in order])
    shape = tuple(node.outputs[0].shape[numbers.out_spec[k]] for k in order)
    if (groups := p["batch_group_count"]) != 1:
        if last or group != 1:
            raise ConversionError(
                "a convolution with batch groups and channels last or feature groups cannot be converted"
            )
        x = _groups_as_channels(e, x, groups)
        group = groups
    pads: Sequence[tuple[int, int]] = _two(p["padding"], (0, 0))
    strides, dilations, stretch = (
        _two(p[k], 1) for k in ("window_strides", "rhs_dilation", "lhs_dilation")
    )
    x, w = (e.reshaped(v, _image(v.shape)) for v in (x, w))
    out = _image(shape)
    kernels = [w.shape[k] for k in ((1, 2) if last else range(2, len(w.shape)))]
    image = (
        _transposed(e, x, w, out, kernels, pads, strides, dilations, stretch, group)
        if dilated
        else None
    )
    if image is None:
        if dilated or any(n < 0 for pair in pads for n in pair):
            around = [(low, high, n - 1) for (low, high), n in zip(pads, stretch)]
            config = [(0, 0, 0), *around, (0, 0, 0)] if last else [(0, 0, 0), (0, 0, 0), *around]
            x = padded(e, x, np.zeros((), np.float32), config)
            pads = [(0, 0)] * len(kernels)
        args = {
            "kernels": kernels,
            "strides": strides,
            "dilations": dilations,
            "group": group,
            "pads": _pads(pads),
        }
        image = e.op("Conv", [x, w], out, FLOAT, **args, order="NHWC" if last else None)
    return transpose(e, e.reshaped(image, shape), np.argsort([numbers.out_spec[k] for k in order]))


def _image(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[N, C, L] as [N, C, 1, L]."""
    return shape if len(shape) > 3 else (*shape[:2], 1, shape[2])


def _two(values: Sequence, missing: Any) -> tuple:
    """Settings of each dimension; one-dimensional windows get a first dimension of size 1."""
    values = tuple(values)
    return values if len(values) > 1 else (missing, *values)


def _pads(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The pads before all dimensions, then those after them."""
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _groups_as_channels(e: Emitter, x: Value, groups: int) -> Value:
    """[G*N, C, ...] as [N, G*C, ...]: a convolution with batch groups is one with feature groups."""
    apart = e.reshaped(x, (groups, x.shape[0] // groups, *x.shape[1:]))
    moved = transpose(e, apart, [1, 0, *range(2, len(apart.shape))])
    return e.reshaped(moved, (x.shape[0] // groups, groups * x.shape[1], *x.shape[2:]))


def _transposed(
    e: Emitter, x, w, out, kernels, pads, strides, dilations, stretch, group: int
) -> Blob | None:
    """A convolution of a dilated image [N, C, H, W] as a ConvTranspose, or None if it is not one."""
    before, after = ([k - 1 - pair[end] for k, pair in zip(kernels, pads)] for end in (0, 1))
    extra = [max(0, -n) for n in after]  # Caffe2 adds `adj` after the pads
    plain = all(n == 1 for n in (*strides, *dilations)) and len(kernels) == 2
    if not plain or any(n < 0 for n in before) or any(n >= s for n, s in zip(extra, stretch)):
        return None
    channels = x.shape[1]
    features = w.shape[0]
    for axis in (2, 3):
        if w.shape[axis] > 1:
            w = reverse(e, w, axis)
    # [M, C/G, ...] -> [C, M/G, ...]
    apart = e.reshaped(w, (group, features // group, channels // group, *w.shape[2:]))
    filter = e.reshaped(
        transpose(e, apart, (0, 2, 1, 3, 4)), (channels, features // group, *w.shape[2:])
    )
    args: dict[str, Any] = {
        "kernels": kernels,
        "strides": stretch,
        "pads": [*before, *(max(0, n) for n in after)],
    }
    return e.op(
        "ConvTranspose",
        [x, filter],
        out,
        FLOAT,
        **args,
        adjs=extra if any(extra) else None,
        group=group,
    )


_LEAST = {"reduce_window_max": -np.inf, "reduce_window_min": np.inf, "reduce_window_sum": 0.0}


@rule(*_LEAST)
def window_rule(e: Emitter, node: FlatEquation, x):
    p = node.params
    window = p["window_dimensions"]
    if any(n != 1 for n in p["window_dilation"]) or x.dtype != FLOAT:
        raise ConversionError(
            "a window with dilation or of another type than float32: Caffe2's pooling has neither"
        )
    if any(n != 1 for n in p["base_dilation"]):
        x = padded(
            e,
            x,
            np.asarray(_LEAST[node.name], np.float32),
            [(0, 0, n - 1) for n in p["base_dilation"]],
        )
    axes = [
        k
        for k, n in enumerate(window)
        if n > 1 or p["window_strides"][k] > 1 or any(p["padding"][k])
    ]
    if not axes:
        return x
    if len(axes) > 3:
        raise ConversionError(f"a window over {len(axes)} dimensions: Caffe2 pools over 1 to 3")
    rest = [k for k in range(len(x.shape)) if k not in axes]
    order = [*rest, *axes]
    lead = math.prod(x.shape[k] for k in rest)
    image = e.reshaped(transpose(e, x, order), (1, lead, *_two([x.shape[k] for k in axes], 1)))
    out = tuple(node.outputs[0].shape[k] for k in order)
    shape = (1, lead, *_two(out[len(rest) :], 1))
    kernels = _two([window[k] for k in axes], 1)
    args: dict[str, Any] = {
        "strides": _two([p["window_strides"][k] for k in axes], 1),
        "kernels": kernels,
    }
    args["pads"] = _pads(_two([p["padding"][k] for k in axes], (0, 0)))
    if node.name == "reduce_window_max":
        pooled = e.op("MaxPool", [image], shape, FLOAT, **args)
    elif node.name == "reduce_window_min":
        pooled = unary(
            e, "Negative", e.op("MaxPool", [unary(e, "Negative", image)], shape, FLOAT, **args)
        )
    else:
        mean = e.op("AveragePool", [image], shape, FLOAT, count_include_pad=1, **args)
        pooled = binary(e, "Mul", mean, np.asarray(math.prod(kernels), np.float32))
    return transpose(e, e.reshaped(pooled, out), np.argsort(order))
