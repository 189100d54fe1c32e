"""Resize and Upsample: each axis by itself, as a product with a matrix of weights that is known at trace time."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConversionError, check_known, near
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.memory import check_size
from jrnn.onnx.graph import op
from jrnn.onnx.ops.contract import precision

_NEAREST = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _cubic(t, a: float):
    """Keys' kernel, of radius 2."""
    t = np.abs(t)
    inner = ((a + 2) * t - (a + 3)) * t * t + 1
    outer = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, inner, np.where(t < 2, outer, 0.0))


def _places(
    mode: str,
    size: int,
    count: int,
    scale: float,
    roi: tuple[float, float],
) -> np.ndarray:
    """Where each of `count` outputs lies among `size` inputs."""
    y = np.arange(count, dtype=np.float64)
    length = scale * size
    half = (y + 0.5) / scale - 0.5
    match mode:
        case "half_pixel":
            return half
        case "half_pixel_symmetric":
            return half + size / 2 * (1 - count / length)
        case "pytorch_half_pixel":
            return half if length > 1 else np.full(count, -0.5)
        case "align_corners":
            return y * (size - 1) / (length - 1) if length > 1 else np.zeros(count)
        case "asymmetric":
            return y / scale
        case "tf_half_pixel_for_nn":
            return (y + 0.5) / scale
        case "tf_crop_and_resize":
            start, end = roi
            step = (end - start) * (size - 1) / (length - 1) if length > 1 else 0.0
            if length > 1:
                return start * (size - 1) + y * step
            return np.full(count, (start + end) * (size - 1) / 2)
    raise ConversionError(f"no coordinate_transformation_mode is called {mode!r}")


def _weights(
    node,
    mode: str,
    places: np.ndarray,
    size: int,
    scale: float,
) -> np.ndarray:
    """The weights of the inputs in each output, [outputs, size]."""
    if mode == "nearest":
        name = node.get("nearest_mode", "round_prefer_floor" if node.opset > 10 else "floor")
        check_known(name, _NEAREST, ConversionError, f"{node}: no nearest_mode is called {name!r}")
        taps = _NEAREST[name](places)[:, None]
        values = np.ones((len(places), 1))
    else:
        if node.get("antialias", 0):
            narrow = min(scale, 1.0)
        else:
            narrow = 1.0
        radius = math.ceil((1 if mode == "linear" else 2) / narrow)
        check_size((len(places), 2 * radius), np.float64)
        taps = np.floor(places)[:, None] + np.arange(1 - radius, radius + 1)[None]
        distance = (taps - places[:, None]) * narrow
        if mode == "linear":
            values = np.maximum(1 - np.abs(distance), 0.0)
        else:
            values = _cubic(distance, node.get("cubic_coeff_a", -0.75))
    if node.get("exclude_outside", 0):
        values = np.where((taps < 0) | (taps >= size), 0.0, values)
    if node.get("antialias", 0) or node.get("exclude_outside", 0):
        values = values / values.sum(1, keepdims=True)
    matrix = np.zeros((len(places), size))
    taps = np.clip(taps, 0, size - 1).astype(int)
    np.add.at(matrix, (np.arange(len(places))[:, None], taps), values)
    return matrix


@op("Resize", "Upsample")
def resize_node(node, x, *given):
    roi, scales, sizes = (
        (*given, None, None, None)[:3] if len(given) > 1 else (None, *given, None)[:3]
    )
    if node.opset <= 10:  # and Upsample, which operator set 10 removed
        roi = None
        if given:
            scales = given[0]
        else:
            scales = np.asarray(node.get("scales"))
        sizes = None
    mode = {"bilinear": "linear"}.get(name := node.get("mode", "nearest"), name)
    if mode not in ("nearest", "linear", "cubic"):
        raise ConversionError(
            f"{node}: no mode is called {mode!r}{near(mode, ['nearest', 'linear', 'cubic'])}"
        )
    where = node.get(
        "coordinate_transformation_mode", "half_pixel" if node.opset > 10 else "asymmetric"
    )
    axes = [a % x.ndim for a in node.get("axes") or range(x.ndim)]
    numbers: list[Any] = []
    for v, n in ((scales, "scales"), (sizes, "sizes")):
        numbers.append(None if v is None or not v.size else node.known(v, n))
    if numbers[1] is not None:
        counts = list(map(int, numbers[1]))
        factors = []
        for n, a in zip(counts, axes, strict=True):
            factors.append(n / max(x.shape[a], 1))
        policy = node.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(axes)
            counts = []
            for f, a in zip(factors, axes, strict=True):
                counts.append(int(f * x.shape[a] + 0.5))
    else:
        factors = list(map(float, numbers[0]))
        counts = []
        for f, a in zip(factors, axes, strict=True):
            counts.append(math.floor(f * x.shape[a]) if math.isfinite(f) else 0)
    if not all(0 < f < math.inf for f in factors):
        raise ConversionError(f"{node}: resizes by {factors}; scales and sizes must be positive")
    region = [0.0] * len(axes) + [1.0] * len(axes)
    if where == "tf_crop_and_resize" and roi is not None and roi.size:
        region = list(map(float, node.known(roi, "roi")))
    x = jnp.asarray(x)
    dtype = x.dtype
    is_float = is_floating(x)
    if is_float or mode == "nearest":
        image = x
    else:
        image = x.astype(jnp.float32)
    for k, (axis, factor, count) in enumerate(zip(axes, factors, counts, strict=True)):
        size = x.shape[axis]
        part = (region[k], region[len(axes) + k])
        if count == size and factor == 1 and part == (0, 1):
            continue
        check_size((count, size), np.float64)  # of the weights
        places = _places(where, size, count, factor, part)
        weights = _weights(node, mode, places, size, factor)
        if mode == "nearest":
            image = jnp.take(image, weights.argmax(1), axis=axis)
        else:
            product = jnp.tensordot(
                jnp.asarray(weights, image.dtype), image, (1, axis), precision=precision()
            )
            image = jnp.moveaxis(product, 0, axis)
        outside = (places < 0) | (places > size - 1)
        if where == "tf_crop_and_resize" and outside.any():
            row = [count if a == axis else 1 for a in range(x.ndim)]
            value = jnp.asarray(node.get("extrapolation_value", 0.0), image.dtype)
            image = jnp.where(outside.reshape(row), value, image)
    if image.dtype != dtype:
        bounds = jnp.iinfo(dtype)
        image = jnp.clip(jnp.round(image), bounds.min, bounds.max)
    return image.astype(dtype)
