"""Rules for convolutions and pooling windows, over one or two dimensions, in any layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import ConversionError
from ..emit import FLOAT, Blob, Emitter, Value
from ..flat import Node
from .elementwise import binary
from .shapes import transpose
from .table import rule


@rule("conv_general_dilated")
def _(e: Emitter, node: Node, x, w):
    p = node.params
    spatial = len(x.shape) - 2
    if spatial not in (1, 2) or x.dtype != FLOAT:
        raise ConversionError(f"a convolution over {spatial} dimensions of {x.dtype}; only 1 or 2 of float32 convert")
    if any(n != 1 for n in p["lhs_dilation"]) or p["batch_group_count"] != 1:
        raise ConversionError(
            "a convolution with a dilated input or with groups of the batch: Caffe2's Conv has neither"
        )
    numbers = p["dimension_numbers"]
    last = spatial == 2 and p["feature_group_count"] == 1 and numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2)
    order = (0, 2, 3, 1) if last else tuple(range(spatial + 2))  # of [N, C, ...], as the operator takes it
    x = e.blob(transpose(e, x, [numbers.lhs_spec[k] for k in order]))
    w = e.blob(transpose(e, w, [numbers.rhs_spec[k] for k in order]))
    out = tuple(node.outputs[0].shape[numbers.out_spec[k]] for k in order)
    kernels = [w.shape[k] for k, at in enumerate(order) if at > 1]
    pads, strides, dilations = _two(p["padding"], (0, 0)), _two(p["window_strides"], 1), _two(p["rhs_dilation"], 1)
    if any(n < 0 for pair in pads for n in pair):
        raise ConversionError("a convolution with negative padding; slice the input before it")
    if spatial == 1:
        x, w = e.reshaped(x, (*x.shape[:2], 1, x.shape[2])), e.reshaped(w, (*w.shape[:2], 1, w.shape[2]))
    shape = out if spatial == 2 else (*out[:2], 1, out[2])
    made = e.op(
        "Conv",
        [x, w],
        shape,
        FLOAT,
        kernels=_two(kernels, 1),
        strides=strides,
        dilations=dilations,
        pads=[pads[0][0], pads[1][0], pads[0][1], pads[1][1]],
        group=p["feature_group_count"],
        order="NHWC" if last else None,
    )
    return transpose(e, e.reshaped(made, out), np.argsort([numbers.out_spec[k] for k in order]))


def _two(values, missing) -> tuple:
    """Settings of two dimensions; one-dimensional windows get a first one of size 1."""
    values = tuple(values)
    return values if len(values) == 2 else (missing, *values)


@rule("reduce_window_max", "reduce_window_sum")
def _(e: Emitter, node: Node, x):
    p = node.params
    window = p["window_dimensions"]
    if any(n != 1 for n in (*p["base_dilation"], *p["window_dilation"])) or x.dtype != FLOAT:
        raise ConversionError("a window with dilation, or over another type than float32: Caffe2's pooling has neither")
    axes = [k for k, n in enumerate(window) if n > 1 or p["window_strides"][k] > 1 or any(p["padding"][k])]
    if not axes:
        return x
    if len(axes) > 2 or len(x.shape) - len(axes) < 1:
        raise ConversionError(f"a window over {len(axes)} dimensions; pooling over 1 or 2 converts")
    rest = [k for k in range(len(x.shape)) if k not in axes]
    order = [*rest, *axes]
    moved = e.blob(transpose(e, x, order))
    lead = math.prod(moved.shape[: len(rest)])
    image = e.reshaped(moved, (1, lead, *_two(moved.shape[len(rest) :], 1)))
    out = tuple(node.outputs[0].shape[k] for k in order)
    pads = _two([p["padding"][k] for k in axes], (0, 0))
    kernels = _two([window[k] for k in axes], 1)
    args: dict[str, Any] = {"strides": _two([p["window_strides"][k] for k in axes], 1), "kernels": kernels}
    args["pads"] = [pads[0][0], pads[1][0], pads[0][1], pads[1][1]]
    shape = (1, lead, *_two(out[len(rest) :], 1))
    made: Value
    if node.name == "reduce_window_max":
        made = e.op("MaxPool", [image], shape, FLOAT, **args)
    else:
        mean: Blob = e.op("AveragePool", [image], shape, FLOAT, count_include_pad=1, **args)
        made = binary(e, "Mul", mean, np.asarray(math.prod(kernels), np.float32))
    return transpose(e, e.reshaped(e.blob(made), out), np.argsort(order))
