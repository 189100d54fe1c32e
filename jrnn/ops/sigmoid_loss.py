"""Cross entropies of independent binary labels.

Shapes: logits and targets are [..., D]; the loss is their mean over the last dimension, [...].
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.checks import describe
from jrnn.ops.values import as_float, check_same_shape
from jrnn.registry import op


def _mean(losses: Any) -> Any:
    return jnp.sum(losses, -1) / max(losses.shape[-1], 1) if losses.ndim else losses


def _each(dy: Any, x: Any) -> Any:
    """The gradient of a mean over the last dimension of x, at each of its elements."""
    return jnp.reshape(dy, (*x.shape[:-1], 1)) / max(x.shape[-1], 1) if x.ndim else jnp.reshape(dy, ())


def _check(logits: Any, targets: Any, log_d_trick: bool, unjoined: bool) -> None:
    check_same_shape("logits and targets", as_float(logits), targets)
    if log_d_trick and unjoined:
        raise OpError("arguments 'log_D_trick' and 'unjoined_lr_loss' are both set; choose one")


@op("SigmoidCrossEntropyWithLogits", gradient="SigmoidCrossEntropyWithLogitsGradient(dy, x, y)")
def sigmoid_cross_entropy(x, y, *, log_D_trick: bool = False, unjoined_lr_loss: bool = False):
    _check(x, y, log_D_trick, unjoined_lr_loss)
    if log_D_trick:  # for a generator: it maximizes log D where targets are 0 instead of minimizing log(1 - D)
        return _mean((2 * y - 1) * jax.nn.softplus(-x))
    if unjoined_lr_loss:  # positives were counted among the negatives before
        return _mean((1 - y) * jax.nn.softplus(x) - y * x)
    return _mean(jax.nn.softplus(x) - y * x)


@op("SigmoidCrossEntropyWithLogitsGradient")
def sigmoid_cross_entropy_gradient(dy, x, y, *, log_D_trick: bool = False, unjoined_lr_loss: bool = False):
    _check(x, y, log_D_trick, unjoined_lr_loss)
    if log_D_trick:
        return _each(dy, x) * (1 - 2 * y) * jax.nn.sigmoid(-x)
    if unjoined_lr_loss:
        return _each(dy, x) * ((1 - y) * jax.nn.sigmoid(x) - y)
    return _each(dy, x) * (jax.nn.sigmoid(x) - y)


@op("WeightedSigmoidCrossEntropyWithLogits", gradient="WeightedSigmoidCrossEntropyWithLogitsGradient(dy, x, y, w)")
def weighted_sigmoid_cross_entropy(x, y, w):
    check_same_shape("logits, targets and weights", as_float(x), y, w)
    return _mean(w * (jax.nn.softplus(x) - y * x))


@op("WeightedSigmoidCrossEntropyWithLogitsGradient")
def weighted_sigmoid_cross_entropy_gradient(dy, x, y, w):
    return _each(dy, x) * w * (jax.nn.sigmoid(x) - y)


@op("MakeTwoClass", gradient="MakeTwoClassGradient(dy)")
def make_two_class(x):
    """Probabilities of yes -> those of no and yes: [...] -> [..., 2]."""
    return jnp.stack([1 - as_float(x), x], axis=-1)


@op("MakeTwoClassGradient")
def make_two_class_gradient(dy):
    if dy.shape[-1:] != (2,):
        raise OpError(f"the gradient is {describe(dy)}; its last dimension must be 2")
    return dy[..., 1] - dy[..., 0]
