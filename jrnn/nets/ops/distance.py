"""Norms of vectors, distances and similarities between rows, and ranking losses on them.

Shapes: N rows; a distance has two inputs [N, ...] and returns [N].
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ir import Ints
from jrnn.nets.ops.reduce import mean_of, reduced_axes
from jrnn.nets.ops.values import (
    as_float,
    canonical_axis,
    check_integers,
    check_same_shape,
    describe,
    flat_at,
    magnitude,
    raise_if,
)
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import op

TINY = 1e-12  # smaller norms and elements count as zero


def _sizes(x: Any) -> Any:
    """The absolute values, with derivative 0 below TINY."""
    return jnp.where(jnp.abs(x) > TINY, magnitude(x), 0)


@op_with_vjp("LpNorm", gradient="LpNormGradient(x, dy)")
def lp_norm(x, *, p: int = 2, average: bool = False):
    """The sum of the absolute values (p = 1) or of the squares (p = 2) of all elements: any shape -> [1]."""
    raise_if(p not in (1, 2), f"argument 'p' is {p}; it must be 1 or 2")
    raise_if(average and x.size == 0, "an average needs at least one element", x=x)
    total = jnp.sum(_sizes(as_float(x)) if p == 1 else jnp.square(as_float(x)))
    return jnp.reshape(total / (x.size if average else 1), (1,))


def length_of(x: Any, axis: int, least: float = TINY) -> Any:
    """The Euclidean length along an axis, which is kept; at least `least`, with derivative 0 below it."""
    squares = jnp.sum(jnp.square(x), axis, keepdims=True)
    return jnp.sqrt(jnp.where(squares > least**2, squares, least**2))


@op_with_vjp("Normalize", inplace={0: 0}, gradient="NormalizeGradient(x, dy)")
def normalize(x, *, axis: int = -1):
    return x / length_of(as_float(x), canonical_axis(axis, x.ndim))


@op("NormalizeL1")
def normalize_l1(x, *, axis: int = -1):
    total = jnp.sum(jnp.abs(as_float(x)), canonical_axis(axis, x.ndim), keepdims=True)
    return x / jnp.where(total == 0, 1, total)


@op_with_vjp("Moments", outputs=2, gradient="MomentsGradient(dy, dy1, x, y)")
def moments(x, *, axes: Ints = (), keepdims: bool = True):
    """The mean and the (biased) variance over `axes` (default: all)."""
    over = reduced_axes(axes, x.ndim)
    mean = mean_of(x, over)
    variance = mean_of(jnp.square(x - mean), over)
    return (mean, variance) if keepdims else (jnp.squeeze(mean, over), jnp.squeeze(variance, over))


def _rows(x: Any) -> Any:
    """[N, ...] -> [N, D]; a scalar is one row."""
    return flat_at(as_float(x), 1) if x.ndim else jnp.reshape(x, (1, 1))


def _register(type: str, distance: Callable) -> None:
    """Registers `distance(a, b)` of rows [N, D]."""

    @op_with_vjp(type, gradient=f"{type}Gradient(x, y, dy) -> x, y")
    def forward(x, y):
        check_same_shape("x and y", x, y)
        return distance(_rows(x), _rows(y))


_SHORTEST = 1e-6  # the least length that CosineSimilarity divides by


def _cosine(a: Any, b: Any) -> Any:
    return jnp.sum(a * b, 1) / (length_of(a, 1, _SHORTEST) * length_of(b, 1, _SHORTEST))[:, 0]


_register("SquaredL2Distance", lambda a, b: jnp.sum(jnp.square(a - b), 1) / 2)
_register("L1Distance", lambda a, b: jnp.sum(_sizes(a - b), 1))
_register("DotProduct", lambda a, b: jnp.sum(a * b, 1))
_register("CosineSimilarity", _cosine)


def _signs(y: Any, x: Any) -> Any:
    """The labels 1 and -1 in the shape of the scores x."""
    check_integers(y, "y")
    if y.size != x.size:
        raise OpError(
            f"y is {describe(y)} and the scores are {describe(x)}; they must have as many elements"
        )
    return jnp.reshape(y, x.shape)


@op_with_vjp("CosineEmbeddingCriterion", gradient="CosineEmbeddingCriterionGradient(s, y, dy)")
def cosine_embedding_criterion(s, y, *, margin: float = 0.0):
    """1 - s where y is 1, max(0, s - margin) where it is not; any shape -> the same."""
    together = _signs(y, as_float(s)) == 1
    return jnp.where(together, 1 - s, jnp.where(s >= margin, s - margin, 0))


@op_with_vjp(
    "MarginRankingCriterion", gradient="MarginRankingCriterionGradient(x1, x2, y, dy) -> x1, x2"
)
def margin_ranking_criterion(x1, x2, y, *, margin: float = 1.0):
    """max(0, margin - y (x1 - x2)): x1 should be greater than x2 by `margin` where y is 1, smaller where y is -1."""
    check_same_shape("x1 and x2", as_float(x1), as_float(x2))
    loss = margin - _signs(y, x1) * (x1 - x2)
    return jnp.where(loss >= 0, loss, 0)
