"""Features of numbers: sinusoidal positions, piecewise linear calibration, and 16-bit floats."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, check_rank, describe
from jrnn.ops.values import is_concrete
from jrnn.registry import op


@op("SinusoidPositionEncoding")
def sinusoid_position_encoding(positions, *, embedding_size: int = 100, alpha: float = 10000.0, amplitude: float = 1.0):
    """Positions [T, N] -> [T, N, E]: amplitude * sin or cos (even or odd k) of position / alpha^(k / E)."""
    check_rank(positions, 2, "positions")
    if positions.dtype.kind not in "iu":
        raise OpError(f"positions is {describe(positions)}; it must hold integers")
    if embedding_size < 1 or alpha <= 0:
        raise OpError(f"embedding_size {embedding_size} and alpha {alpha} must be positive")
    k = np.arange(embedding_size)
    frequency = (alpha ** (-k / embedding_size)).astype(np.float32)
    # compat: the first example's positions stand for all
    angle = jnp.asarray(positions)[:, :1].astype(jnp.float32) * frequency[None, :]
    waves = amplitude * jnp.where((k % 2 == 0)[None, :], jnp.sin(angle), jnp.cos(angle))  # [T, E]
    return jnp.broadcast_to(waves[:, None, :], (*positions.shape, embedding_size))


def _pieces(bounds: Any, slopes: Any, intercepts: Any) -> tuple[Any, Any, Any]:
    """The lines of each group: bounds [G, P + 1], slopes and intercepts [G, P]."""
    groups = bounds.size - slopes.size
    if slopes.size != intercepts.size or groups < 1 or slopes.size % groups or slopes.size < groups:
        raise OpError(
            f"has {bounds.size} bounds, {slopes.size} slopes and {intercepts.size} intercepts; a group of lines has "
            "as many slopes as intercepts, and one bound more"
        )
    b = bounds.reshape(groups, -1)
    if is_concrete(b) and (np.diff(np.asarray(b), axis=1) < 0).any():
        raise OpError("bounds must ascend in each group")
    return b, slopes.reshape(groups, -1), intercepts.reshape(groups, -1)


def _transform(x: Any, bounds: Any, slopes: Any, intercepts: Any) -> Any:
    """x [N, G] on its group's lines; outside the bounds the value at the nearest one."""
    x = jnp.clip(x, bounds[:, :1].T, bounds[:, -1:].T)
    above = (x[:, :, None] > bounds[None, :, 1:-1]).sum(-1)  # [N, G]: a bound belongs to the line before it
    group = jnp.arange(bounds.shape[0])[None, :]
    return slopes[group, above] * x + intercepts[group, above]


@op("PiecewiseLinearTransform", gradient="forbidden")
def piecewise_linear_transform(
    x,
    bounds_blob=None,
    slopes_blob=None,
    intercepts_blob=None,
    *,
    bounds: tuple[float, ...] = (),
    slopes: tuple[float, ...] = (),
    intercepts: tuple[float, ...] = (),
    binary: bool = False,
):
    """slope * x + intercept, with the line whose bounds hold x; lines come from arguments or from blobs.

    x is [N, G] with one group of lines a column. With `binary` there is one group: x is [N] or [N, 1], or [N, 2] whose
    second column p is transformed and whose first becomes 1 - p.
    """
    check_float(x, "x")
    given = [a for a in (bounds, slopes, intercepts) if a]
    blobs = [b for b in (bounds_blob, slopes_blob, intercepts_blob) if b is not None]
    if (len(given), len(blobs)) not in ((3, 0), (0, 3)):
        raise OpError("give bounds, slopes and intercepts, either all as arguments or all as inputs 1, 2 and 3")
    lines = _pieces(*(blobs or (np.asarray(a, x.dtype) for a in given)))
    lines = tuple(jnp.asarray(a) for a in lines)
    groups = lines[0].shape[0]
    if not binary:
        if x.ndim != 2 or x.shape[1] != groups:
            raise OpError(f"x is {describe(x)}; it must be [N, {groups}], one column a group of lines")
        return _transform(x, *lines)
    if groups != 1 or x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[1] not in (1, 2)):
        raise OpError(
            f"x is {describe(x)} with {groups} groups; binary=1 takes x of [N], [N, 1] or [N, 2] and one group"
        )
    if x.ndim == 2 and x.shape[1] == 2:
        p = _transform(x[:, 1:], *lines)
        return jnp.concatenate([1 - p, p], 1)
    return _transform(x.reshape(-1, 1), *lines).reshape(x.shape)


_LARGEST_HALF = 65504.0


@op("FloatToHalf", gradient="HalfToFloat(dy)")
def float_to_half(x, *, clip: bool = False, wide=False):
    """32-bit floats as 16-bit ones; `clip` brings those too large to the largest instead of infinity."""
    if wide:
        return jnp.clip(x, -_LARGEST_HALF, _LARGEST_HALF) if clip else jnp.asarray(x)
    if x.dtype != np.float32:
        raise OpError(f"x is {describe(x)}; it must be float32")
    return (jnp.clip(x, -_LARGEST_HALF, _LARGEST_HALF) if clip else x).astype(jnp.float16)


@op("HalfToFloat", gradient="FloatToHalf(dy)")
def half_to_float(x, *, wide=False):
    if wide:
        return jnp.asarray(x)
    if x.dtype != np.float16:
        raise OpError(f"x is {describe(x)}; it must be float16")
    return x.astype(jnp.float32)
