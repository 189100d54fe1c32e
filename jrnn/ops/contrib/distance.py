"""Norms of vectors, distances and similarities between rows, and ranking losses on them.

Shapes: N rows; a distance has two inputs [N, ...] and returns [N].
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.reduce import reduced_axes, with_kept_dims
from jrnn.ops.values import as_float, canonical_axis, check_integers, check_same_shape, describe, flat_at, magnitude
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


def _rows(x: Any) -> Any:
    """[N, ...] -> [N, D]; a scalar is one row."""
    return flat_at(as_float(x), 1) if x.ndim else jnp.reshape(x, (1, 1))


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    check_same_shape("x and y", x, y)
    return _rows(x), _rows(y)


def _each(dy: Any, rows: Any) -> Any:
    """The gradient that arrives, one number a row, as a column: [N] -> [N, 1]."""
    if dy.shape != rows.shape[:1]:
        raise OpError(f"the gradient is {describe(dy)}; its shape must be [{rows.shape[0]}]")
    return dy[:, None]


@op("SquaredL2Distance", gradient="SquaredL2DistanceGradient(x, y, dy) -> x, y")
def squared_l2_distance(x, y):
    a, b = _pair(x, y)
    return jnp.sum(jnp.square(a - b), 1) / 2


@op("SquaredL2DistanceGradient", outputs=2)
def squared_l2_distance_gradient(x, y, dy):
    a, b = _pair(x, y)
    dx = jnp.reshape(_each(dy, a) * (a - b), x.shape)
    return dx, -dx


@op("L1Distance", gradient="L1DistanceGradient(x, y, dy) -> x, y")
def l1_distance(x, y):
    a, b = _pair(x, y)
    return jnp.sum(magnitude(a - b), 1)


@op("L1DistanceGradient", outputs=2)
def l1_distance_gradient(x, y, dy):
    a, b = _pair(x, y)
    dx = jnp.reshape(_each(dy, a) * sign_of(a - b), x.shape)
    return dx, -dx


@op("DotProduct", gradient="DotProductGradient(x, y, dy) -> x, y")
def dot_product(x, y):
    a, b = _pair(x, y)
    return jnp.sum(a * b, 1)


@op("DotProductGradient", outputs=2)
def dot_product_gradient(x, y, dy):
    a, b = _pair(x, y)
    each = _each(dy, a)
    return jnp.reshape(each * b, x.shape), jnp.reshape(each * a, y.shape)


_SHORTEST = 1e-6  # the least length that is divided by


@op("CosineSimilarity", gradient="CosineSimilarityGradient(x, y, dy) -> x, y")
def cosine_similarity(x, y):
    a, b = _pair(x, y)
    return jnp.sum(a * b, 1) / (length_of(a, 1, _SHORTEST) * length_of(b, 1, _SHORTEST))[:, 0]


@op("CosineSimilarityGradient", outputs=2)
def cosine_similarity_gradient(x, y, dy):
    a, b = _pair(x, y)
    length_a, length_b = length_of(a, 1, _SHORTEST), length_of(b, 1, _SHORTEST)
    each = _each(dy, a) / (length_a * length_b)
    dot = jnp.sum(a * b, 1, keepdims=True)
    da = each * (b - a / length_a * (dot / length_a))
    db = each * (a - b / length_b * (dot / length_b))
    return jnp.reshape(da, x.shape), jnp.reshape(db, y.shape)


def _signs(y: Any, x: Any) -> Any:
    """The 1s and -1s of a criterion in the shape of what they judge."""
    check_integers(y, "y")
    if y.size != x.size:
        raise OpError(f"y is {describe(y)} and the scores are {describe(x)}; they must have as many elements")
    return jnp.reshape(y, x.shape)


@op("CosineEmbeddingCriterion", gradient="CosineEmbeddingCriterionGradient(s, y, dy)")
def cosine_embedding_criterion(s, y, *, margin: float = 0.0):
    """1 - s where y is 1, max(0, s - margin) where it is not; any shape -> the same."""
    together = _signs(y, as_float(s)) == 1
    return jnp.where(together, 1 - s, jnp.where(s >= margin, s - margin, 0))


@op("CosineEmbeddingCriterionGradient")
def cosine_embedding_criterion_gradient(s, y, dy, *, margin: float = 0.0):
    return jnp.where(_signs(y, s) == 1, -dy, jnp.where(s >= margin, dy, 0))


@op("MarginRankingCriterion", gradient="MarginRankingCriterionGradient(x1, x2, y, dy) -> x1, x2")
def margin_ranking_criterion(x1, x2, y, *, margin: float = 1.0):
    """max(0, margin - y (x1 - x2)): x1 should be the greater by `margin` where y is 1, the smaller where it is -1."""
    check_same_shape("x1 and x2", as_float(x1), as_float(x2))
    loss = margin - _signs(y, x1) * (x1 - x2)
    return jnp.where(loss >= 0, loss, 0)


@op("MarginRankingCriterionGradient", outputs=2)
def margin_ranking_criterion_gradient(x1, x2, y, dy, *, margin: float = 1.0):
    sign = _signs(y, x1)
    dx = jnp.where(margin - sign * (x1 - x2) >= 0, -sign * jnp.reshape(dy, x1.shape), 0)
    return dx, -dx
