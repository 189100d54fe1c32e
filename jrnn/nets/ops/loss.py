"""Losses over rows, cross entropies of independent binary labels, and metrics of classifiers.

Shapes: N rows, D classes. A loss operator returns one number per row; AveragedLoss returns their mean. Of binary labels,
logits and targets are [..., D], and the loss is their mean over the last dimension, [...].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.ops.values import (
    as_float,
    check_indices,
    check_integers,
    check_rank,
    check_same_shape,
    describe,
    raise_if,
    takes,
)
from jrnn.nets.registry import op

LOG_THRESHOLD = 1e-20  # the smallest argument of logarithms


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


op("AveragedLossGradient")(lambda x, dy: jnp.broadcast_to(jnp.reshape(dy, (1,) * x.ndim) / max(x.size, 1), x.shape))


def _rows(x: Any) -> Any:
    """`x` as [N, D]; a vector is one row."""
    x = as_float(x)
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:]))) if x.ndim > 1 else x.reshape(1, -1)


def _labels(label: Any, rows: Any) -> Any:
    """Integer labels as [N]."""
    n, d = rows.shape
    raise_if(label.shape not in ((n,), (n, 1)), f"its shape must be [{n}] or [{n}, 1], as x has {n} rows", label=label)
    check_indices(label, d, "label")
    return jnp.reshape(label, (n,))


def picked(rows: Any, labels: Any) -> Any:
    """The element of each row at its label: [N, D], [N] -> [N]."""
    return jnp.take_along_axis(rows, labels[:, None], axis=1, mode="fill")[:, 0]


@op("LabelCrossEntropy", gradient="LabelCrossEntropyGradient(x, label, dy)")
def label_cross_entropy(x, label):
    rows = _rows(x)
    return -clipped_log(picked(rows, _labels(label, rows)))


@op("LabelCrossEntropyGradient")
def label_cross_entropy_gradient(x, label, dy):
    rows = _rows(x)
    dx = -jnp.reshape(dy, (-1, 1)) / jnp.maximum(rows, LOG_THRESHOLD)
    return jnp.reshape(dx * jax.nn.one_hot(_labels(label, rows), rows.shape[1], dtype=x.dtype), x.shape)


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


def _mean(losses: Any) -> Any:
    return jnp.sum(losses, -1) / max(losses.shape[-1], 1) if losses.ndim else losses


def _each(dy: Any, x: Any) -> Any:
    """The gradient of a mean over the last dimension of x, at each of its elements."""
    return jnp.reshape(dy, (*x.shape[:-1], 1)) / max(x.shape[-1], 1) if x.ndim else jnp.reshape(dy, ())


def _variant(*, log_D_trick: bool = False, unjoined_lr_loss: bool = False) -> tuple[Callable, Callable]:
    """The loss of logits x and targets y, and its derivative with respect to x."""
    if log_D_trick and unjoined_lr_loss:
        raise OpError("arguments 'log_D_trick' and 'unjoined_lr_loss' are both set; choose one")
    softplus, sigmoid = jax.nn.softplus, jax.nn.sigmoid
    if log_D_trick:  # for a generator: where targets are 0, it maximizes log D instead of minimizing log(1 - D)
        return lambda x, y: (2 * y - 1) * softplus(-x), lambda x, y: (1 - 2 * y) * sigmoid(-x)
    if unjoined_lr_loss:  # positives are counted among the negatives too
        return lambda x, y: (1 - y) * softplus(x) - y * x, lambda x, y: (1 - y) * sigmoid(x) - y
    return lambda x, y: softplus(x) - y * x, lambda x, y: sigmoid(x) - y


@op("SigmoidCrossEntropyWithLogits", gradient="SigmoidCrossEntropyWithLogitsGradient(dy, x, y)")
@takes(variant=_variant)
def sigmoid_cross_entropy(x, y, *, variant):
    check_same_shape("logits and targets", as_float(x), y)
    loss, _ = variant
    return _mean(loss(x, y))


@op("SigmoidCrossEntropyWithLogitsGradient")
@takes(variant=_variant)
def sigmoid_cross_entropy_gradient(dy, x, y, *, variant):
    _, derivative = variant
    return _each(dy, x) * derivative(x, y)


@op("WeightedSigmoidCrossEntropyWithLogits", gradient="WeightedSigmoidCrossEntropyWithLogitsGradient(dy, x, y, w)")
def weighted_sigmoid_cross_entropy(x, y, w):
    check_same_shape("logits, targets and weights", as_float(x), y, w)
    return _mean(w * (jax.nn.softplus(x) - y * x))


op("WeightedSigmoidCrossEntropyWithLogitsGradient")(lambda dy, x, y, w: _each(dy, x) * w * (jax.nn.sigmoid(x) - y))


@op("MakeTwoClass", gradient="MakeTwoClassGradient(dy)")
def make_two_class(x):
    """Probabilities of yes -> of no and yes: [...] -> [..., 2]."""
    return jnp.stack([1 - as_float(x), x], axis=-1)


@op("MakeTwoClassGradient")
def make_two_class_gradient(dy):
    if dy.shape[-1:] != (2,):
        raise OpError(f"the gradient is {describe(dy)}; its last dimension must be 2")
    return dy[..., 1] - dy[..., 0]


def _check_predictions(x: Any, label: Any) -> None:
    check_rank(as_float(x), 2, "x")
    check_integers(label, "label")
    raise_if(label.shape != x.shape[:1], f"its shape must be [{x.shape[0]}], one for each row of x", label=label)


@op("Accuracy", gradient="forbidden")
def accuracy(x, label, *, top_k: int = 1):
    _check_predictions(x, label)
    inside = (label >= 0) & (label < x.shape[1])
    own = picked(x, jnp.where(inside, label, 0))[:, None]
    before = jnp.arange(x.shape[1])[None, :] < label[:, None]
    rank = jnp.sum((x > own) | ((x == own) & before), axis=1)  # of equal predictions the first ranks higher
    return jnp.mean((inside & (rank < top_k)).astype(x.dtype))


@op("MultiClassAccuracy", outputs=2, gradient="forbidden")
def multi_class_accuracy(x, label):
    """For each class, the share of its rows that are predicted correctly (0 if it has none), and the number of its rows."""
    _check_predictions(x, label)
    check_indices(label, x.shape[1], "label")
    right = (jnp.argmax(x, axis=1) == label).astype(x.dtype)
    own = jax.nn.one_hot(label, x.shape[1], dtype=x.dtype)  # [N, D]
    amounts = jnp.sum(own, axis=0)
    return jnp.sum(own * right[:, None], axis=0) / jnp.maximum(amounts, 1), amounts.astype(jnp.int32)


@op("Perplexity", gradient="forbidden")
def perplexity(x):
    """The inverse of the geometric mean of probabilities: [N] or [N, 1] -> []."""
    raise_if(as_float(x).ndim == 0 or x.size != x.shape[0], "it must hold one probability a row", x=x)
    return jnp.exp(-jnp.sum(jnp.log(x)) / max(x.size, 1))
