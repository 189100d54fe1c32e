"""Losses over rows: cross entropies against labels or distributions, and their means.

Shapes: N rows, D classes. A loss operator returns one number per row; AveragedLoss returns their mean.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.values import as_float, check_indices
from jrnn.registry import op

LOG_THRESHOLD = 1e-20  # the least probability whose logarithm is taken


@jax.custom_jvp
def clipped_log(x: Any) -> Any:
    """log(max(x, LOG_THRESHOLD)), with derivative 1 / max(x, LOG_THRESHOLD) also below the threshold."""
    return jnp.log(jnp.maximum(x, LOG_THRESHOLD))


@clipped_log.defjvp
def _clipped_log_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return clipped_log(x), dx / jnp.maximum(x, LOG_THRESHOLD)


@op("AveragedLoss", gradient="AveragedLossGradient(x, dy)")
def averaged_loss(x):
    return jnp.sum(x) / max(x.size, 1)  # the mean of nothing is 0


@op("AveragedLossGradient")
def averaged_loss_gradient(x, dy):
    return jnp.broadcast_to(jnp.reshape(dy, (1,) * x.ndim) / max(x.size, 1), x.shape)


def _rows(x: Any) -> Any:
    """`x` as [N, D]; a vector is one row."""
    x = as_float(x)
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:]))) if x.ndim > 1 else x.reshape(1, -1)


def _labels(label: Any, rows: Any) -> Any:
    """Integer labels as [N]."""
    n, d = rows.shape
    if label.shape not in ((n,), (n, 1)):
        raise OpError(f"label is {describe(label)}; its shape must be [{n}] or [{n}, 1], as x has {n} rows")
    check_indices(label, d, "label")
    return jnp.reshape(label, (n,))


def picked(rows: Any, labels: Any) -> Any:
    """The element of each row that its label names: [N, D], [N] -> [N]."""
    return jnp.take_along_axis(rows, labels[:, None], axis=1, mode="fill")[:, 0]


def one_hot(labels: Any, classes: int, dtype: Any) -> Any:
    """[N] -> [N, D], 1 at each row's label."""
    return (labels[:, None] == jnp.arange(classes, dtype=labels.dtype)[None, :]).astype(dtype)


@op("LabelCrossEntropy", gradient="LabelCrossEntropyGradient(x, label, dy)")
def label_cross_entropy(x, label):
    rows = _rows(x)
    return -clipped_log(picked(rows, _labels(label, rows)))


@op("LabelCrossEntropyGradient")
def label_cross_entropy_gradient(x, label, dy):
    rows = _rows(x)
    dx = -jnp.reshape(dy, (-1, 1)) / jnp.maximum(rows, LOG_THRESHOLD)
    return jnp.reshape(dx * one_hot(_labels(label, rows), rows.shape[1], x.dtype), x.shape)


def _distributions(x: Any, label: Any) -> tuple[Any, Any]:
    """`x` and the distributions in `label`, both as [N, D]."""
    rows = _rows(x)
    if label.size != rows.size or label.ndim > 2 or label.shape[:1] != rows.shape[:1]:
        raise OpError(f"label is {describe(label)}; its shape must be {list(rows.shape)}, that of the rows of x")
    return rows, jnp.reshape(label, rows.shape)


@op("CrossEntropy", gradient="CrossEntropyGradient(x, label, dy)")
def cross_entropy(x, label):
    rows, target = _distributions(x, label)
    return -jnp.sum(target * clipped_log(rows), axis=1)


@op("CrossEntropyGradient")
def cross_entropy_gradient(x, label, dy):
    rows, target = _distributions(x, label)
    return jnp.reshape(-jnp.reshape(dy, (-1, 1)) * target / jnp.maximum(rows, LOG_THRESHOLD), x.shape)
