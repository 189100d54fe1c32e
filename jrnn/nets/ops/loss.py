"""Losses over rows, cross entropies of independent binary labels, and metrics of classifiers.

Shapes: N rows, D classes. A loss operator returns one number per row; AveragedLoss returns their mean. Of binary labels,
logits and targets are [..., D], and the loss is their mean over the last dimension, [...]. SoftmaxWithLoss has the softmax
and its cross-entropy loss in one operator: of a matrix [N, D] whose columns begin at `axis`, or of images [N, D, H, W].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError, OpError
from jrnn.nets.ops.values import (
    as_float,
    canonical_axis,
    check_indices,
    check_integers,
    check_rank,
    check_same_shape,
    check_shape,
    describe,
    flat_at,
    is_concrete,
    raise_if,
    takes,
)
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import gradient, op

LOG_THRESHOLD = 1e-20  # the smallest argument of logarithms


@jax.custom_jvp
def clipped_log(x: Any) -> Any:
    """log(max(x, LOG_THRESHOLD)), with derivative 1 / max(x, LOG_THRESHOLD) also below the threshold."""
    return jnp.log(jnp.maximum(x, LOG_THRESHOLD))


@clipped_log.defjvp
def _clipped_log_jvp(primals, tangents):
    (x,) = primals
    (dx,) = tangents
    return clipped_log(x), dx / jnp.maximum(x, LOG_THRESHOLD)


@op("AveragedLoss", gradient="AveragedLossGradient(x, dy)")
def averaged_loss(x):
    return jnp.sum(x) / max(x.size, 1)  # the mean of nothing is 0


op("AveragedLossGradient")(
    lambda x, dy: jnp.broadcast_to(jnp.reshape(dy, (1,) * x.ndim) / max(x.size, 1), x.shape)
)


def _rows(x: Any) -> Any:
    """`x` as [N, D]; a vector is one row."""
    x = as_float(x)
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:]))) if x.ndim > 1 else x.reshape(1, -1)


def _labels(label: Any, rows: Any) -> Any:
    """Integer labels as [N]."""
    n, d = rows.shape
    raise_if(
        label.shape not in ((n,), (n, 1)),
        f"its shape must be [{n}] or [{n}, 1], as x has {n} rows",
        label=label,
    )
    check_indices(label, d, "label")
    return jnp.reshape(label, (n,))


def picked(rows: Any, labels: Any) -> Any:
    """The element of each row at its label: [N, D], [N] -> [N]."""
    return jnp.take_along_axis(rows, labels[:, None], axis=1, mode="fill")[:, 0]


@op_with_vjp("LabelCrossEntropy", gradient="LabelCrossEntropyGradient(x, label, dy)")
def label_cross_entropy(x, label):
    rows = _rows(x)
    return -clipped_log(picked(rows, _labels(label, rows)))


def _distributions(x: Any, label: Any) -> tuple[Any, Any]:
    """`x` and the distributions in `label`, both as [N, D]."""
    rows = _rows(x)
    if label.size != rows.size or label.ndim > 2 or label.shape[:1] != rows.shape[:1]:
        raise OpError(
            f"label is {describe(label)}; its shape must be {list(rows.shape)}, one label for each row of x"
        )
    return rows, jnp.reshape(label, rows.shape)


@op_with_vjp("CrossEntropy", gradient="CrossEntropyGradient(x, label, dy)")
def cross_entropy(x, label):
    rows, target = _distributions(x, label)
    return -jnp.sum(target * clipped_log(rows), axis=1)


def _mean(losses: Any) -> Any:
    """The mean of the losses of a row; a scalar stays."""
    if losses.ndim == 0:
        return losses
    return jnp.sum(losses, -1) / max(losses.shape[-1], 1)


def _loss(
    *, log_D_trick: bool = False, unjoined_lr_loss: bool = False
) -> Callable[[Any, Any], Any]:
    """The loss of logits x and targets y."""
    if log_D_trick and unjoined_lr_loss:
        raise OpError("arguments 'log_D_trick' and 'unjoined_lr_loss' are both set; choose one")
    softplus = jax.nn.softplus
    if log_D_trick:
        # For a generator: where targets are 0, it maximizes log D instead of minimizing log(1 - D).
        return lambda x, y: (2 * y - 1) * softplus(-x)
    if unjoined_lr_loss:  # positives are counted among the negatives too
        return lambda x, y: (1 - y) * softplus(x) - y * x
    return lambda x, y: softplus(x) - y * x


@op_with_vjp(
    "SigmoidCrossEntropyWithLogits", gradient="SigmoidCrossEntropyWithLogitsGradient(dy, x, y)"
)
@takes(loss=_loss)
def sigmoid_cross_entropy(x, y, *, loss):
    check_same_shape("logits and targets", as_float(x), y)
    return _mean(loss(x, y))


@op_with_vjp(
    "WeightedSigmoidCrossEntropyWithLogits",
    gradient="WeightedSigmoidCrossEntropyWithLogitsGradient(dy, x, y, w)",
)
def weighted_sigmoid_cross_entropy(x, y, w):
    check_same_shape("logits, targets and weights", as_float(x), y, w)
    return _mean(w * (jax.nn.softplus(x) - y * x))


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
    raise_if(
        label.shape != x.shape[:1],
        f"its shape must be [{x.shape[0]}], one for each row of x",
        label=label,
    )


@op("Accuracy", gradient="forbidden")
def accuracy(x, label, *, top_k: int = 1):
    _check_predictions(x, label)
    inside = (label >= 0) & (label < x.shape[1])
    own = picked(x, jnp.where(inside, label, 0))[:, None]
    before = jnp.arange(x.shape[1])[None, :] < label[:, None]
    # Of equal predictions the first ranks higher.
    rank = jnp.sum((x > own) | ((x == own) & before), axis=1)
    return jnp.mean((inside & (rank < top_k)).astype(x.dtype))


@op("MultiClassAccuracy", outputs=2, gradient="forbidden")
def multi_class_accuracy(x, label):
    """For each class, the share of its rows that are predicted correctly (0 if it has none), and the number of its rows."""
    _check_predictions(x, label)
    check_indices(label, x.shape[1], "label")
    right = (jnp.argmax(x, axis=1) == label).astype(x.dtype)
    own = jax.nn.one_hot(label, x.shape[1], dtype=x.dtype)  # [N, D]
    amounts = jnp.sum(own, axis=0)
    return jnp.sum(own * right[:, None], axis=0) / jnp.maximum(amounts, 1), amounts.astype(
        jnp.int32
    )


@op("Perplexity", gradient="forbidden")
def perplexity(x):
    """The inverse of the geometric mean of probabilities: [N] or [N, 1] -> []."""
    raise_if(
        as_float(x).ndim == 0 or x.size != x.shape[0], "it must hold one probability a row", x=x
    )
    return jnp.exp(-jnp.sum(jnp.log(x)) / max(x.size, 1))


def _scale(*, scale: float = 1.0, order: str = "NCHW") -> float:
    raise_if(scale < 0, f"argument 'scale' is {scale}; it must not be negative")
    raise_if(order != "NCHW", f"argument 'order' is {order!r}; only NCHW is known")
    return scale


def _unpack(rest: tuple) -> tuple[Any, Any, Any]:
    """The weight or None, the softmax, and the gradient of the loss as a scalar."""
    if len(rest) not in (2, 3):
        raise OpError(
            f"takes x, label, optionally weight, softmax and the loss's gradient; was given {2 + len(rest)}"
        )
    weight = rest[0] if len(rest) == 3 else None
    return weight, rest[-2], jnp.reshape(rest[-1], (-1,))[0]


def _matrix(x: Any, label: Any, weight: Any, label_prob: bool, axis: int) -> tuple[Any, Any, Any]:
    """`x` as [N, D], the target distributions or labels as [N, D] or [N], and the weights as [N] or None."""
    rows = flat_at(as_float(x), canonical_axis(axis, x.ndim))
    n, d = rows.shape
    if label_prob:
        raise_if(
            label.size != n * d,
            f"with label_prob=1 it must have the {n * d} elements of x",
            label=label,
        )
        label = jnp.reshape(label, (n, d))
        if is_concrete(label) and np.any(np.abs(np.sum(np.asarray(label), 1) - 1) > 1e-4):
            raise OpError(
                "a row of label does not add up to 1; with label_prob=1 each row is a distribution"
            )
    else:
        raise_if(
            label.size != n, f"it must hold one integer for each of {n} rows of x", label=label
        )
        check_indices(label, d, "label")
        label = jnp.reshape(label, (n,))
    if weight is not None and weight.size != n:
        raise OpError(
            f"weight is {describe(weight)}; it must hold one number for each of {n} rows of x"
        )
    return rows, label, None if weight is None else jnp.reshape(weight, (n,))


def _ratio(total: Any, weight: Any, count: int, average_by_batch_size: bool) -> Any:
    """`total` over the sum of the weights, or over `count` without weights or if asked for; 0 over 0 is 0."""
    if weight is None or average_by_batch_size:
        return total / max(count, 1)
    weights = jnp.sum(weight)
    return jnp.where(weights == 0, 0, total / jnp.where(weights == 0, 1, weights))


def _floored(log_p: Any) -> Any:
    """Log probabilities, at least log(LOG_THRESHOLD); the derivative ignores the threshold."""
    floor = jnp.maximum(log_p, float(np.log(LOG_THRESHOLD)))
    return log_p + jax.lax.stop_gradient(floor - log_p)


@op("SoftmaxWithLoss", outputs=(2, 3))
@takes(scale=_scale)
def softmax_with_loss(
    x,
    label,
    weight=None,
    *,
    scale,
    label_prob: bool = False,
    axis: int = 1,
    average_by_batch_size: bool = False,
):
    rows, target, w = _matrix(x, label, weight, label_prob, axis)
    log_p = jax.nn.log_softmax(rows, axis=1) if rows.size else rows
    losses = -jnp.sum(target * _floored(log_p), 1) if label_prob else -picked(log_p, target)
    losses = losses if w is None else losses * w
    p = jnp.reshape(jnp.exp(log_p), x.shape)
    loss = scale * _ratio(jnp.sum(losses), w, len(losses), average_by_batch_size)
    return p, loss, losses  # the third output is Caffe2's scratch space


@op("SoftmaxWithLossGradient")
@takes(scale=_scale)
def softmax_with_loss_gradient(
    x,
    label,
    *rest,
    scale,
    label_prob: bool = False,
    axis: int = 1,
    average_by_batch_size: bool = False,
):
    weight, p, d_loss = _unpack(rest)
    rows, target, w = _matrix(x, label, weight, label_prob, axis)
    p = jnp.reshape(p, rows.shape)
    if label_prob:
        dx = p * jnp.sum(target, axis=1, keepdims=True) - target
    else:
        dx = p - jax.nn.one_hot(target, p.shape[1], dtype=p.dtype)
    dx = dx if w is None else dx * w[:, None]
    return jnp.reshape(
        dx * (scale * _ratio(d_loss, w, dx.shape[0], average_by_batch_size)), x.shape
    )


@gradient("SoftmaxWithLoss", "SpatialSoftmaxWithLoss")
def _(g):
    if g.has_grad_output(0):
        raise GradientError(
            f"a gradient arrives at {g.op.outputs[0]!r}, the softmax, but only the loss's gradient is passed on; where both "
            "are needed, use Softmax and LabelCrossEntropy"
        )
    inputs = list(map(g.input, range(len(g.op.inputs))))
    g.emit(g.op.type + "Gradient", [*inputs, g.output(0), g.grad_output(1)], [g.grad_input(0)])


IGNORED = -1  # the label of a pixel that the loss ignores


def _pixels(x: Any, label: Any, weight: Any) -> tuple[Any, Any]:
    """Labels as [N, H, W] with 0 for ignored ones, and the weights of the pixels, 0 for ignored ones."""
    check_rank(as_float(x), 4, "x")
    n, d, h, w = x.shape
    check_shape(label, (n, h, w), "label")
    if weight is not None:
        check_shape(weight, (n, h, w), "weight")
    ignored = label == IGNORED
    classes = (np if isinstance(label, np.ndarray) else jnp).where(ignored, 0, label)
    check_indices(classes, d, "label")
    return jnp.asarray(classes), jnp.where(ignored, 0, 1 if weight is None else weight).astype(
        x.dtype
    )


@op("SpatialSoftmaxWithLoss", outputs=2)
@takes(scale=_scale)
def spatial_softmax_with_loss(x, label, weight=None, *, scale):
    labels, weights = _pixels(x, label, weight)
    log_p = jax.nn.log_softmax(x, axis=1)
    losses = (
        -jnp.take_along_axis(_floored(log_p), labels[:, None], axis=1, mode="fill")[:, 0] * weights
    )
    loss = _ratio(jnp.sum(losses), weights, losses.size, False)
    # compat: the scale only affects the gradient
    return jnp.exp(log_p), loss + (scale - 1) * (loss - jax.lax.stop_gradient(loss))


@op("SpatialSoftmaxWithLossGradient")
@takes(scale=_scale)
def spatial_softmax_with_loss_gradient(x, label, *rest, scale):
    weight, p, d_loss = _unpack(rest)
    labels, weights = _pixels(x, label, weight)
    wrong = p - jnp.moveaxis(jax.nn.one_hot(labels, x.shape[1], dtype=p.dtype), -1, 1)
    return wrong * (weights * (scale * _ratio(d_loss, weights, 1, False)))[:, None]
