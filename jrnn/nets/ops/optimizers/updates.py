"""Updates of dense parameters by the common optimizers. None has a gradient.

Each reads parameters, state and gradients, and writes the new parameters and state, usually under the same names. The sign
of learning rates is Caffe2's: where an update is `param + lr * ...`, lr must be negative to descend.
"""

import math
from typing import Any

import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ops.lengths import per_row
from jrnn.nets.ops.values import describe, raise_if, scalar, takes
from jrnn.nets.registry import op


def same_size(**xs: Any) -> None:
    """Raises OpError unless all arrays have as many elements as the first."""
    (first, x0), *rest = xs.items()
    for name, x in rest:
        if x.size != x0.size:
            raise OpError(
                f"{name} is {describe(x)} and {first} is {describe(x0)}; they must have as many elements"
            )


def momentum_step(grad, m, lr, momentum, nesterov):
    """(what to subtract from the parameters, the new momentum)."""
    new = momentum * m + lr * grad
    step = new
    if nesterov:
        step = (1 + momentum) * new - momentum * m
    return step, new


@op("MomentumSGD", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def momentum_sgd(grad, m, lr, *, momentum: float = 0.0, nesterov: bool = False):
    same_size(grad=grad, m=m)
    return momentum_step(grad, m, scalar(lr, "lr"), momentum, nesterov)


@op("MomentumSGDUpdate", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 3})
def momentum_sgd_update(grad, m, lr, param, *, momentum: float = 0.0, nesterov: bool = False):
    same_size(grad=grad, m=m, param=param)
    step, m = momentum_step(grad, m, scalar(lr, "lr"), momentum, nesterov)
    return step, m, param - step


@op("Adagrad", outputs=(2, 4), gradient="forbidden", inplace={0: 0, 1: 1})
def adagrad(
    param, moment, grad, lr, *, epsilon: float = 1e-5, decay: float = 1.0, weight_decay: float = 0.0
):
    """Also returns the effective learning rates, and the update."""
    same_size(param=param, moment=moment, grad=grad)
    grad = grad + weight_decay * param
    moment = decay * moment + grad * grad
    effective = scalar(lr, "lr") / (jnp.sqrt(moment) + epsilon)
    update = effective * grad
    return param + update, moment, effective, update


def sum_of_squares(x: Any) -> Any:
    return jnp.sum(x * x)


def norm(x: Any) -> Any:
    return jnp.sqrt(sum_of_squares(x))


def filled(beta: float, t: Any) -> Any:
    """1 - beta^t, the total weight of t steps in a moving average that began at 0."""
    if beta <= 0:
        return jnp.ones_like(t)
    return -jnp.expm1(t * math.log(beta))  # 1 - beta**t would cancel


def next_step(iteration: Any, dtype: Any) -> Any:
    """iteration + 1, as a number of the parameters' type."""
    return (scalar(iteration, "iter") + 1).astype(dtype)


def adam_step(m1, m2, grad, t, beta1, beta2, epsilon):
    """(the scaled gradient, new m1, new m2); m2 may hold one number per row."""
    m1 = beta1 * m1 + (1 - beta1) * grad
    m2 = beta2 * m2 + (1 - beta2) * (grad * grad).mean(tuple(range(m2.ndim, grad.ndim)))
    correction = jnp.sqrt(filled(beta2, t)) / filled(beta1, t)
    root = jnp.sqrt(m2) + epsilon
    return correction * m1 / per_row(root, grad), m1, m2


def adam_options(
    *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-5
) -> tuple[float, float, float]:
    return beta1, beta2, epsilon


@op("Adam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
@takes(options=adam_options)
def adam(param, m1, m2, grad, lr, iter, *, options):
    """Also returns the scaled gradient."""
    same_size(param=param, m1=m1, m2=m2, grad=grad)
    scaled, m1, m2 = adam_step(m1, m2, grad, next_step(iter, param.dtype), *options)
    return param + scalar(lr, "lr") * scaled, m1, m2, scaled


@op("RmsProp", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def rms_prop(
    grad, mean_squares, mom, lr, *, decay: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-5
):
    """The first output is what to add to the parameters."""
    same_size(grad=grad, mean_squares=mean_squares, mom=mom)
    mean_squares = mean_squares + (1 - decay) * (grad * grad - mean_squares)
    mom = momentum * mom + scalar(lr, "lr") * grad / jnp.sqrt(epsilon + mean_squares)
    return mom, mean_squares, mom


@op("ClipTensorByScaling", gradient="forbidden", inplace={0: 0})
def clip_tensor_by_scaling(x, value, additional_threshold=None, *, threshold: float):
    """x scaled down to a norm of `threshold` where `value`, its norm, is above it."""
    raise_if(threshold <= 0, f"threshold must be positive, is {threshold}")
    raise_if(x.size == 0, "it must not be empty", x=x)
    limit = threshold
    if additional_threshold is not None:
        limit = threshold * scalar(additional_threshold, "additional_threshold")
    value = scalar(value, "value")
    return x * jnp.where(value > limit, limit / value, 1)


@op("WeightScale", gradient="forbidden", inplace={0: 0})
def weight_scale(
    w, iter, *, stepsize: int = 2**31 - 1, upper_bound_iter: int = 2**31 - 1, scale: float = 1.0
):
    """w, scaled at every `stepsize`-th iteration before `upper_bound_iter`."""
    raise_if(stepsize < 1, f"stepsize must be at least 1, is {stepsize}")
    t = scalar(iter, "iter") + 1
    return jnp.where((t % stepsize == 0) & (t < upper_bound_iter), w * scale, w)
