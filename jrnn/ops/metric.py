"""Metrics of classifiers: numbers to look at, without gradients. Shapes: N rows, D classes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..errors import OpError
from ..registry import op
from .checks import check_rank, describe
from .loss import picked
from .values import as_float, check_integers


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
