"""Rules for convolutions, pooling and padding."""

import math

import numpy as np

from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import FlatEquation
from jrnn.onnx.emit import GraphEmitter, Value, ints, is_static, rule


def padded(e: GraphEmitter, x: Value, config: list[tuple[int, int, int]], value: Value) -> Value:
    """x with `low` and `high` values around each axis, or as many elements less, and `inner` between its elements."""
    for axis, (_, _, inner) in enumerate(config):
        size = x.shape[axis]
        if not inner or (is_static([size]) and size < 2):
            continue
        before = x.shape[:axis]
        after = x.shape[axis + 1 :]
        apart = e.reshape(x, (*before, size, 1, *after))
        ends = np.zeros((2, len(apart.shape)), np.int64)
        ends[1, axis + 1] = inner
        apart = e.op(
            "Pad", [apart, ends.reshape(-1), value], (*before, size, 1 + inner, *after), x.dtype
        )
        apart = e.reshape(apart, (*before, size * (1 + inner), *after))
        shape = (*before, size * (1 + inner) - inner, *after)
        x = e.op("Slice", [apart, ints(0), ints(-inner), ints(axis)], shape, x.dtype)
    low = [row[0] for row in config]
    high = [row[1] for row in config]
    ends = [*low, *high]
    if is_static(ends) and not any(ends):
        return x
    shape = []
    for before, size, after in zip(low, x.shape, high, strict=True):
        shape.append(before + size + after)
    return e.op("Pad", [x, e.sizes(ends), value], shape, x.dtype)


@rule("pad")
def _(e, node, x, value):
    return padded(e, x, node.params["padding_config"], value)


def _picked(values, places) -> list:
    """The values at these places."""
    return [values[k] for k in places]


def _cuts(pads) -> bool:
    """Whether padding is negative, and takes elements away."""
    return any(min(pair) < 0 for pair in pads)


def _in_order(pads) -> list[int]:
    """ONNX's order of padding: the beginnings of all axes, then their ends."""
    return np.reshape(pads, (-1, 2)).T.reshape(-1).tolist()


@rule("conv_general_dilated")
def convolution_rule(e: GraphEmitter, node: FlatEquation, x, kernel):
    p = node.params
    d = node.params["dimension_numbers"]
    if p["batch_group_count"] != 1:
        raise ConversionError(
            "a convolution of groups of the batch, as in the gradient of a grouped one, is not supported"
        )
    dtype = node.dtype
    strides = list(p["window_strides"])
    pads = list(p["padding"])
    apart = p["lhs_dilation"]
    dilations = list(p["rhs_dilation"])
    groups = p["feature_group_count"]
    x = e.transpose(e.cast(x, dtype), d.lhs_spec)
    kernel = e.transpose(e.cast(kernel, dtype), d.rhs_spec)
    zero = np.zeros((), dtype)
    out = _picked(node.shape, d.out_spec)
    ends = []
    for size, dilation, (low, high) in zip(kernel.shape[2:], dilations, pads, strict=True):
        reach = (size - 1) * dilation
        ends.append((reach - low, reach - high))
    has_gaps = max(apart, default=1) > 1
    transposed = has_gaps and all(stride == 1 for stride in strides)
    for (low, high), step in zip(ends, apart, strict=True):
        transposed &= low >= 0 and high > -step
    if transposed:  # the kernel of ConvTranspose is [C_in, C_out / groups, ...], and reversed
        parts = e.reshape(kernel, (groups, kernel.shape[0] // groups, *kernel.shape[1:]))
        parts = e.transpose(parts, (0, 2, 1, *range(3, len(parts.shape))))
        parts = e.reshape(parts, (x.shape[1], kernel.shape[0] // groups, *kernel.shape[2:]))
        kernel = e.flip(parts, range(2, len(parts.shape)))
        options = {"strides": list(apart), "output_padding": [max(-high, 0) for _, high in ends]}
        pads = [(low, max(high, 0)) for low, high in ends]
        kind = "ConvTranspose"
    else:
        no_pads = [(0, 0)] * len(pads)
        cut = _cuts(pads)
        if cut or has_gaps:
            config = [(0, 0, 0), (0, 0, 0)]
            for (low, high), step in zip(pads if cut else no_pads, apart, strict=True):
                config.append((low, high, step - 1))
            x = padded(e, x, config, zero)
            pads = no_pads if cut else pads
        options = {"strides": strides}
        kind = "Conv"
    options |= {
        "pads": _in_order(pads),
        "dilations": dilations,
        "group": groups,
        "kernel_shape": list(kernel.shape[2:]),
    }
    convolved = e.op(kind, [x, kernel], out, dtype, **options)
    return e.transpose(convolved, np.argsort(d.out_spec))


@rule("reduce_window_max", "reduce_window_sum", "reduce_window_min")
def pooling_rule(e: GraphEmitter, node: FlatEquation, x):
    """Pooling: the axes with windows come last, the others are one channel each."""
    p = node.params
    out = node.shape
    sizes = p["window_dimensions"]
    strides = p["window_strides"]
    pads = p["padding"]
    if max(p["base_dilation"], default=1) != 1:
        raise ConversionError("elements apart from each other are not supported")
    if _cuts(pads):
        raise ConversionError("negative padding is not supported")
    spatial = []
    for k, n in enumerate(sizes):
        if n != 1 or strides[k] != 1 or any(pads[k]):
            spatial.append(k)
    if not spatial:
        return x
    others = [k for k in range(len(x.shape)) if k not in spatial]
    order = [*others, *spatial]
    rest = math.prod(_picked(x.shape, others))
    moved = e.transpose(x, order)
    sign = node.name.endswith("min")
    flat = e.reshape(moved, (1, rest, *_picked(x.shape, spatial)))
    if sign:
        flat = e.op("Neg", [flat], flat.shape, flat.dtype)
    options = {
        "kernel_shape": _picked(sizes, spatial),
        "strides": _picked(strides, spatial),
        "pads": _in_order(_picked(pads, spatial)),
    }
    dilations = _picked(p["window_dilation"], spatial)
    shape = (1, rest, *_picked(out, spatial))
    if node.name == "reduce_window_sum":
        if max(dilations) != 1:
            raise ConversionError("a sum over windows with gaps is not supported")
        mean = e.op("AveragePool", [flat], shape, x.dtype, count_include_pad=1, **options)
        pooled: Value = e.op(
            "Mul", [mean, np.asarray(math.prod(options["kernel_shape"]), x.dtype)], shape, x.dtype
        )
    else:
        pooled = e.op("MaxPool", [flat], shape, x.dtype, dilations=dilations, **options)
        if sign:
            pooled = e.op("Neg", [pooled], shape, x.dtype)
    return e.transpose(e.reshape(pooled, _picked(out, order)), np.argsort(order))
