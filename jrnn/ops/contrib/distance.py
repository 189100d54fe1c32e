"""Distances and similarities between the rows of two blobs, and ranking losses on them.

Shapes: N rows; both inputs are [N, ...], the result is [N].
"""

from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import describe, flat_at
from jrnn.ops.contrib.norms import length_of, sign_of
from jrnn.ops.values import as_float, check_integers, check_same_shape, magnitude
from jrnn.registry import op


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
