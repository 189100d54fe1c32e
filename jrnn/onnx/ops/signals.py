"""Operators of speech front ends: Fourier transforms and filters on the mel scale. The windows are functions of ONNX.

Shapes: complex numbers are pairs in a last axis of size 2, real numbers may have size 1 there. B batch, L samples.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import TensorProto, helper

from jrnn.errors import ConversionError
from jrnn.nets.memory import check_size
from jrnn.onnx.graph import op


def _pairs(x, dtype):
    return jnp.stack([x.real, x.imag], -1).astype(dtype)


def _transform(
    x,
    length,
    axis: int,
    inverse: bool,
    one_sided: bool,
):
    """The transform along an axis of x, whose last axis has the parts; `length` cuts or pads, None is the axis' own."""
    if not 1 <= x.shape[-1] <= 2:
        raise ConversionError(
            f"the last axis has the real and imaginary parts, 1 or 2 of them, not {x.shape[-1]}"
        )
    if x.shape[-1] == 1:
        z = x[..., 0]
    else:
        z = lax.complex(x[..., 0], x[..., 1])
    if inverse and one_sided:
        return jnp.fft.irfft(z, length, axis)[..., None].astype(x.dtype)
    if one_sided and not jnp.iscomplexobj(z):
        return _pairs(jnp.fft.rfft(z, length, axis), x.dtype)
    y = _pairs((jnp.fft.ifft if inverse else jnp.fft.fft)(z, length, axis), x.dtype)
    if one_sided:
        return lax.slice_in_dim(y, 0, y.shape[axis] // 2 + 1, axis=axis)
    return y


@op("DFT")
def _(node, x, length=None, axis=None):
    if axis is None:
        axis = node.get("axis", 1 if node.opset < 20 else -2)
    else:
        axis = node.known(axis, "axis").item()
    if length is not None:
        length = node.known(length, "dft_length").item()
    return _transform(
        jnp.asarray(x), length, axis % x.ndim, bool(node.get("inverse")), bool(node.get("onesided"))
    )


@op("STFT")
def _(
    node,
    signal,
    step,
    window=None,
    length=None,
):
    """[B, L, parts] -> [B, frames, bins, 2]."""
    step = node.known(step, "frame_step").item()
    signal = jnp.asarray(signal)
    size = signal.shape[1] if window is None else window.shape[0]
    if length is not None:
        size = node.known(length, "frame_length").item()
    if (
        step < 1
        or not 1 <= size <= signal.shape[1]
        or (window is not None and window.shape != (size,))
    ):
        if window is None:
            shown = "without a window"
        else:
            shown = f"with a window of {list(window.shape)}"
        raise ConversionError(
            f"{node}: frames of {size} samples every {step}, {shown}, of {signal.shape[1]} samples"
        )
    first = np.arange(0, signal.shape[1] - size + 1, step)
    check_size((*signal.shape[:1], len(first), size), signal.dtype)
    frames = signal[:, first[:, None] + np.arange(size)[None]]  # [B, frames, size, parts]
    if window is not None:
        frames = frames * jnp.asarray(window)[None, None, :, None]
    return _transform(frames, size, 2, False, bool(node.get("onesided", 1)))


@op("MelWeightMatrix")
def _(
    node,
    bands,
    length,
    rate,
    low,
    high,
):
    """Triangles of height 1, [length // 2 + 1, bands], at equal distances on the scale 2595 log10(1 + f / 700)."""
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    given = zip((bands, length, rate, low, high), names, strict=True)
    bands, length, rate, *edges = (node.known(v, name).item() for v, name in given)
    low, high = (2595 * np.log10(1 + edge / 700) for edge in edges)
    bins, _ = check_size((length // 2 + 1, bands), np.float32)
    hertz = 700 * (10 ** ((low + np.arange(bands + 2) * (high - low) / (bands + 2)) / 2595) - 1)
    at = ((length + 1) * hertz // rate).astype(int)
    if not (at.min() >= 0 and at.max() < bins):
        raise ConversionError(
            f"{node}: bands to {edges[1]} Hz need more than the {bins} bins of {length} samples"
        )
    left, center, right = (at[k : bands + k][None] for k in range(3))
    here = np.arange(bins)[:, None]
    rising = (here - left) / np.maximum(center - left, 1)
    falling = (right - here) / np.maximum(right - center, 1)
    weights = np.where((left <= here) & (here < center), rising, 0)
    weights = np.where((center <= here) & (here < right), falling, weights)
    weights = np.where(here == center, 1, weights)
    return weights.astype(
        helper.tensor_dtype_to_np_dtype(node.get("output_datatype", TensorProto.FLOAT))
    )
