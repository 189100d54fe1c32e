"""Metrics of classifiers, without gradients. Shapes: N rows, D classes."""

from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import check_rank, describe
from jrnn.ops.loss import one_hot, picked
from jrnn.ops.values import as_float, check_indices, check_integers
from jrnn.registry import op


def _check_predictions(x: Any, label: Any) -> None:
    check_rank(as_float(x), 2, "x")
    check_integers(label, "label")
    if label.shape != x.shape[:1]:
        raise OpError(f"label is {describe(label)}; its shape must be [{x.shape[0]}], one for each row of x")


@op("Accuracy", gradient="forbidden")
def accuracy(x, label, *, top_k: int = 1):
    _check_predictions(x, label)
    inside = (label >= 0) & (label < x.shape[1])
    own = picked(x, jnp.where(inside, label, 0))[:, None]
    before = jnp.arange(x.shape[1])[None, :] < label[:, None]
    rank = jnp.sum((x > own) | ((x == own) & before), axis=1)  # of equal predictions the first is the better one
    return jnp.mean((inside & (rank < top_k)).astype(x.dtype))


@op("MultiClassAccuracy", outputs=2, gradient="forbidden")
def multi_class_accuracy(x, label):
    """For each class, the share of its rows that are predicted as it (0 where it has none), and how many it has."""
    _check_predictions(x, label)
    check_indices(label, x.shape[1], "label")
    right = (jnp.argmax(x, axis=1) == label).astype(x.dtype)
    own = one_hot(jnp.asarray(label), x.shape[1], x.dtype)  # [N, D]
    amounts = jnp.sum(own, axis=0)
    return jnp.sum(own * right[:, None], axis=0) / jnp.maximum(amounts, 1), amounts.astype(jnp.int32)


@op("Perplexity", gradient="forbidden")
def perplexity(x):
    """The inverse of the geometric mean of probabilities: [N] or [N, 1] -> []."""
    if as_float(x).ndim == 0 or x.size != x.shape[0]:
        raise OpError(f"x is {describe(x)}; it must hold one probability a row")
    return jnp.exp(-jnp.sum(jnp.log(x)) / max(x.size, 1))
