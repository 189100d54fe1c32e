"""Softmax with its cross-entropy loss in one operator, over rows and over images.

Shapes: N rows, D classes; the input is a matrix [N, D] whose columns begin at `axis`. Images are [N, D, H, W].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError, OpError
from jrnn.nets.ops.loss import LOG_THRESHOLD, picked
from jrnn.nets.ops.values import (
    as_float,
    canonical_axis,
    check_indices,
    check_rank,
    check_shape,
    describe,
    flat_at,
    is_concrete,
    raise_if,
    takes,
)
from jrnn.nets.registry import gradient, op


def _scale(*, scale: float = 1.0, order: str = "NCHW") -> float:
    raise_if(scale < 0, f"argument 'scale' is {scale}; it must not be negative")
    raise_if(order != "NCHW", f"argument 'order' is {order!r}; only NCHW is known")
    return scale


def _unpack(rest: tuple) -> tuple[Any, Any, Any]:
    """The weight or None, the softmax, and the gradient of the loss as a scalar."""
    if len(rest) not in (2, 3):
        raise OpError(f"takes x, label, optionally weight, softmax and the loss's gradient; was given {2 + len(rest)}")
    weight = rest[0] if len(rest) == 3 else None
    return weight, rest[-2], jnp.reshape(rest[-1], (-1,))[0]


def _matrix(x: Any, label: Any, weight: Any, label_prob: bool, axis: int) -> tuple[Any, Any, Any]:
    """`x` as [N, D], the target distributions or labels as [N, D] or [N], and the weights as [N] or None."""
    rows = flat_at(as_float(x), canonical_axis(axis, x.ndim))
    n, d = rows.shape
    if label_prob:
        raise_if(label.size != n * d, f"with label_prob=1 it must have the {n * d} elements of x", label=label)
        label = jnp.reshape(label, (n, d))
        if is_concrete(label) and np.any(np.abs(np.sum(np.asarray(label), 1) - 1) > 1e-4):
            raise OpError("a row of label does not add up to 1; with label_prob=1 each row is a distribution")
    else:
        raise_if(label.size != n, f"it must hold one integer for each of {n} rows of x", label=label)
        check_indices(label, d, "label")
        label = jnp.reshape(label, (n,))
    if weight is not None and weight.size != n:
        raise OpError(f"weight is {describe(weight)}; it must hold one number for each of {n} rows of x")
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
    x, label, weight=None, *, scale, label_prob: bool = False, axis: int = 1, average_by_batch_size: bool = False
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
    x, label, *rest, scale, label_prob: bool = False, axis: int = 1, average_by_batch_size: bool = False
):
    weight, p, d_loss = _unpack(rest)
    rows, target, w = _matrix(x, label, weight, label_prob, axis)
    p = jnp.reshape(p, rows.shape)
    if label_prob:
        dx = p * jnp.sum(target, axis=1, keepdims=True) - target
    else:
        dx = p - jax.nn.one_hot(target, p.shape[1], dtype=p.dtype)
    dx = dx if w is None else dx * w[:, None]
    return jnp.reshape(dx * (scale * _ratio(d_loss, w, dx.shape[0], average_by_batch_size)), x.shape)


@gradient("SoftmaxWithLoss", "SpatialSoftmaxWithLoss")
def _(g):
    if g.has_grad_output(0):
        raise GradientError(
            f"a gradient arrives at {g.op.outputs[0]!r}, the softmax, and only that of the loss is passed on; where both "
            "are needed, use Softmax and LabelCrossEntropy"
        )
    inputs = [g.input(k) for k in range(len(g.op.inputs))]
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
    kept = (np if isinstance(label, np.ndarray) else jnp).where(ignored, 0, label)
    check_indices(kept, d, "label")
    return jnp.asarray(kept), jnp.where(ignored, 0, 1 if weight is None else weight).astype(x.dtype)


@op("SpatialSoftmaxWithLoss", outputs=2)
@takes(scale=_scale)
def spatial_softmax_with_loss(x, label, weight=None, *, scale):
    labels, weights = _pixels(x, label, weight)
    log_p = jax.nn.log_softmax(x, axis=1)
    losses = -jnp.take_along_axis(_floored(log_p), labels[:, None], axis=1, mode="fill")[:, 0] * weights
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
