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
    low = [c[0] for c in config]
    high = [c[1] for c in config]
    if is_static([*low, *high]) and not any([*low, *high]):
        return x
    shape = tuple(a + size + b for a, size, b in zip(low, x.shape, high, strict=True))
    return e.op("Pad", [x, e.sizes([*low, *high]), value], shape, x.dtype)


rule("pad")(lambda e, node, x, value: padded(e, x, node.params["padding_config"], value))


@rule("conv_general_dilated")
def convolution_rule(e: GraphEmitter, node: FlatEquation, x, kernel):
    p = node.params
    d = node.params["dimension_numbers"]
    if p["batch_group_count"] != 1:
        raise ConversionError(
            "a convolution of groups of the batch, as in the gradient of a grouped one, is not supported"
        )
    dtype = node.outputs[0].dtype
    strides = list(p["window_strides"])
    pads = list(p["padding"])
    apart = p["lhs_dilation"]
    dilations = list(p["rhs_dilation"])
    groups = p["feature_group_count"]
    x = e.transpose(e.cast(x, dtype), d.lhs_spec)
    kernel = e.transpose(e.cast(kernel, dtype), d.rhs_spec)
    zero = np.zeros((), dtype)
    out = tuple(node.outputs[0].shape[k] for k in d.out_spec)
    reach = [(k - 1) * dilation for k, dilation in zip(kernel.shape[2:], dilations, strict=True)]
    ends = [(r - low, r - high) for r, (low, high) in zip(reach, pads, strict=True)]
    transposed = (
        any(a > 1 for a in apart)
        and all(s == 1 for s in strides)
        and all(low >= 0 and high > -a for (low, high), a in zip(ends, apart, strict=True))
    )
    if transposed:  # the kernel of ConvTranspose is [C_in, C_out / groups, ...], and reversed
        parts = e.reshape(kernel, (groups, kernel.shape[0] // groups, *kernel.shape[1:]))
        parts = e.transpose(parts, (0, 2, 1, *range(3, len(parts.shape))))
        parts = e.reshape(parts, (x.shape[1], kernel.shape[0] // groups, *kernel.shape[2:]))
        kernel = e.flip(parts, range(2, len(parts.shape)))
        options = {"strides": list(apart), "output_padding": [max(-high, 0) for _, high in ends]}
        pads = [(low, max(high, 0)) for low, high in ends]
        kind = "ConvTranspose"
    else:
        cut = any(n < 0 for pair in pads for n in pair)
        if cut or any(a > 1 for a in apart):
            around = pads if cut else [(0, 0)] * len(pads)
            config = [
                (0, 0, 0),
                (0, 0, 0),
                *((*ends, a - 1) for ends, a in zip(around, apart, strict=True)),
            ]
            x = padded(e, x, config, zero)
            pads = [(0, 0)] * len(pads) if cut else pads
        options = {"strides": strides}
        kind = "Conv"
    options |= {"pads": [int(n) for n in (*(a for a, _ in pads), *(b for _, b in pads))]}
    options |= {"dilations": dilations, "group": groups, "kernel_shape": list(kernel.shape[2:])}
    convolved = e.op(kind, [x, kernel], out, dtype, **options)
    return e.transpose(convolved, np.argsort(d.out_spec))


@rule("reduce_window_max", "reduce_window_sum", "reduce_window_min")
def pooling_rule(e: GraphEmitter, node: FlatEquation, x):
    """Pooling: the axes with windows come last, the others are one channel each."""
    p = node.params
    out = node.outputs[0].shape
    sizes, strides, pads = (p[k] for k in ("window_dimensions", "window_strides", "padding"))
    if any(n != 1 for n in p["base_dilation"]):
        raise ConversionError("elements apart from each other are not supported")
    if any(n < 0 for pair in pads for n in pair):
        raise ConversionError("negative padding is not supported")
    spatial = [k for k, n in enumerate(sizes) if n != 1 or strides[k] != 1 or any(pads[k])]
    if not spatial:
        return x
    order = [*(k for k in range(len(x.shape)) if k not in spatial), *spatial]
    rest = math.prod(x.shape[k] for k in order[: -len(spatial)])
    moved = e.transpose(x, order)
    sign = node.name.endswith("min")
    flat = e.reshape(moved, (1, rest, *(x.shape[k] for k in spatial)))
    flat = e.op("Neg", [flat], flat.shape, flat.dtype) if sign else flat
    options = {
        "kernel_shape": [sizes[k] for k in spatial],
        "strides": [strides[k] for k in spatial],
    }
    options |= {"pads": [pads[k][0] for k in spatial] + [pads[k][1] for k in spatial]}
    dilations = [p["window_dilation"][k] for k in spatial]
    shape = (1, rest, *(out[k] for k in spatial))
    if node.name == "reduce_window_sum":
        if any(n != 1 for n in dilations):
            raise ConversionError("a sum over windows with gaps is not supported")
        mean = e.op("AveragePool", [flat], shape, x.dtype, count_include_pad=1, **options)
        pooled: Value = e.op(
            "Mul", [mean, np.asarray(math.prod(options["kernel_shape"]), x.dtype)], shape, x.dtype
        )
    else:
        pooled = e.op("MaxPool", [flat], shape, x.dtype, dilations=dilations, **options)
        pooled = e.op("Neg", [pooled], shape, x.dtype) if sign else pooled
    return e.transpose(e.reshape(pooled, [out[k] for k in order]), np.argsort(order))
