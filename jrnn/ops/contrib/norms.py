"""Norms of vectors, normalization to norm 1, and means and variances over chosen axes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.reduce import reduced_axes, with_kept_dims
from jrnn.ops.values import as_float, canonical_axis, magnitude
from jrnn.registry import op

TINY = 1e-12  # what is smaller counts as zero: a norm that is divided by, an element whose sign is asked


def sign_of(x: Any) -> Any:
    """-1, 0 or 1; 0 also for what is as good as zero."""
    return jnp.where(jnp.abs(x) > TINY, jnp.sign(x), 0)


def _check_norm(p: int, average: bool, x: Any) -> None:
    if p not in (1, 2):
        raise OpError(f"argument 'p' is {p}; it must be 1 or 2")
    if average and x.size == 0:
        raise OpError(f"x is {describe(x)}; there is no average over nothing")


@op("LpNorm", gradient="LpNormGradient(x, dy)")
def lp_norm(x, *, p: int = 2, average: bool = False):
    """The sum of the absolute values (p = 1) or of the squares (p = 2) of all elements: any shape -> [1]."""
    _check_norm(p, average, x)
    total = jnp.sum(magnitude(as_float(x)) if p == 1 else jnp.square(as_float(x)))
    return jnp.reshape(total / (x.size if average else 1), (1,))


@op("LpNormGradient")
def lp_norm_gradient(x, dy, *, p: int = 2, average: bool = False):
    _check_norm(p, average, x)
    each = jnp.reshape(dy, (1,) * x.ndim) / (x.size if average else 1)
    return each * (sign_of(x) if p == 1 else 2 * x)


def length_of(x: Any, axis: int, least: float = TINY) -> Any:
    """The Euclidean length along an axis, which is kept; not below `least`, where its derivative is 0."""
    squares = jnp.sum(jnp.square(x), axis, keepdims=True)
    return jnp.sqrt(jnp.where(squares > least**2, squares, least**2))


@op("Normalize", inplace={0: 0}, gradient="NormalizeGradient(x, dy)")
def normalize(x, *, axis: int = -1):
    return x / length_of(as_float(x), canonical_axis(axis, x.ndim))


@op("NormalizeGradient", inplace={0: 1})
def normalize_gradient(x, dy, *, axis: int = -1):
    over = canonical_axis(axis, x.ndim)
    length = length_of(x, over)
    along = jnp.sum(x * dy, over, keepdims=True)
    return dy / length - x / length * (along / length / length)


@op("NormalizeL1")
def normalize_l1(x, *, axis: int = -1):
    total = jnp.sum(jnp.abs(as_float(x)), canonical_axis(axis, x.ndim), keepdims=True)
    return x / jnp.where(total == 0, 1, total)


@op("Moments", outputs=2, gradient="MomentsGradient(dy, dy1, x, y)")
def moments(x, *, axes: tuple[int, ...] = (), keepdims: bool = True):
    """The mean and the (biased) variance over `axes`; none given: over all."""
    over = reduced_axes(axes, as_float(x).ndim)
    count = max(int(np.prod([x.shape[a] for a in over])), 1)
    mean = jnp.sum(x, over, keepdims=True) / count
    variance = jnp.sum(jnp.square(x - mean), over, keepdims=True) / count
    return (mean, variance) if keepdims else (jnp.squeeze(mean, over), jnp.squeeze(variance, over))


@op("MomentsGradient")
def moments_gradient(d_mean, d_variance, x, mean, *, axes: tuple[int, ...] = (), keepdims: bool = True):
    over = reduced_axes(axes, x.ndim)
    count = max(int(np.prod([x.shape[a] for a in over])), 1)
    d_mean, d_variance, mean = (with_kept_dims(v, x, over) for v in (d_mean, d_variance, mean))
    return (d_mean + 2 * (x - mean) * d_variance) / count
