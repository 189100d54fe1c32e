"""Updates of dense parameters. None has a gradient.

Each reads parameters, state and gradients, and writes the new parameters and state under names of the net's choice, as a
rule the same ones. Learning rates are added as they are: where `param + lr * ...` stands, lr is negative to descend.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..errors import OpError
from ..registry import op
from .checks import describe


def same_size(**xs: Any) -> None:
    """Raises OpError unless all arrays have as many elements as the first."""
    (first, x0), *rest = xs.items()
    for name, x in rest:
        if x.size != x0.size:
            raise OpError(f"{name} is {describe(x)} and {first} is {describe(x0)}; they must have as many elements")


def scalar(x: Any, name: str) -> Any:
    """A blob of one element as a scalar; OpError where it has more."""
    if x.size != 1:
        raise OpError(f"{name} is {describe(x)}; it must have 1 element")
    return jnp.reshape(x, ())


def momentum_step(grad, m, lr, momentum, nesterov):
    """(what to subtract from the parameters, the new momentum)."""
    new = momentum * m + lr * grad
    return ((1 + momentum) * new - momentum * m if nesterov else new), new


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
def adagrad(param, moment, grad, lr, *, epsilon: float = 1e-5, decay: float = 1.0, weight_decay: float = 0.0):
    """Also gives the effective learning rates, and the update."""
    same_size(param=param, moment=moment, grad=grad)
    grad = grad + weight_decay * param
    moment = decay * moment + grad * grad
    effective = scalar(lr, "lr") / (jnp.sqrt(moment) + epsilon)
    update = effective * grad
    return param + update, moment, effective, update


def filled(beta: float, t: Any) -> Any:
    """1 - beta^t: how much of a moving average that began at 0 is filled after t steps."""
    return -jnp.expm1(t * math.log(beta)) if beta > 0 else jnp.ones_like(t)  # 1 - beta**t would cancel


def next_step(iteration: Any, dtype: Any) -> Any:
    """iteration + 1, as a number of the parameters' type."""
    return (scalar(iteration, "iter") + 1).astype(dtype)


def adam_step(m1, m2, grad, t, beta1, beta2, epsilon):
    """(the scaled gradient, new m1, new m2); m2 may hold one number a row."""
    m1 = beta1 * m1 + (1 - beta1) * grad
    m2 = beta2 * m2 + (1 - beta2) * (grad * grad).mean(tuple(range(m2.ndim, grad.ndim)))
    correction = jnp.sqrt(filled(beta2, t)) / filled(beta1, t)
    root = jnp.sqrt(m2) + epsilon
    return correction * m1 / root.reshape(m2.shape + (1,) * (grad.ndim - m2.ndim)), m1, m2


@op("Adam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def adam(param, m1, m2, grad, lr, iter, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-5):
    """Also gives the gradient as it was scaled."""
    same_size(param=param, m1=m1, m2=m2, grad=grad)
    scaled, m1, m2 = adam_step(m1, m2, grad, next_step(iter, param.dtype), beta1, beta2, epsilon)
    return param + scalar(lr, "lr") * scaled, m1, m2, scaled


@op("RmsProp", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def rms_prop(grad, mean_squares, mom, lr, *, decay: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-5):
    """The first output is what to add to the parameters."""
    same_size(grad=grad, mean_squares=mean_squares, mom=mom)
    mean_squares = mean_squares + (1 - decay) * (grad * grad - mean_squares)
    mom = momentum * mom + scalar(lr, "lr") * grad / jnp.sqrt(epsilon + mean_squares)
    return mom, mean_squares, mom


def adadelta_step(moment, delta, grad, lr, epsilon, decay):
    """(what to add to the parameters, new moment, new delta)."""
    moment = decay * moment + (1 - decay) * grad * grad
    scaled = jnp.sqrt(delta + epsilon) / jnp.sqrt(moment + epsilon) * grad
    return lr * scaled, moment, decay * delta + (1 - decay) * scaled * scaled


@op("Adadelta", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def adadelta(param, moment, delta, grad, lr, *, epsilon: float = 1e-5, decay: float = 0.95):
    same_size(param=param, moment=moment, delta=delta, grad=grad)
    step, moment, delta = adadelta_step(moment, delta, grad, scalar(lr, "lr"), epsilon, decay)
    return param + step, moment, delta


def ftrl_alpha(blob: Any, argument: float | None) -> Any:
    """Ftrl's learning rate: a blob, or an argument, but not both."""
    if blob is not None and argument is not None:
        raise OpError("alpha is given both as input and as argument; give one of them")
    return scalar(blob, "alpha") if blob is not None else (0.005 if argument is None else argument)


def ftrl_step(var, nz, grad, alpha, beta, lambda1, lambda2):
    """(new var, new nz); nz holds the sum of squared gradients and the linear term, in its last dimension."""
    n, z = nz[..., 0], nz[..., 1]
    new_n = n + grad * grad
    z = z + grad - (jnp.sqrt(new_n) - jnp.sqrt(n)) / alpha * var
    shrunk = (lambda1 * jnp.sign(z) - z) / ((beta + jnp.sqrt(new_n)) / alpha + lambda2)
    return jnp.where(jnp.abs(z) > lambda1, shrunk, 0), jnp.stack([new_n, z], -1)


@op("Ftrl", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def ftrl(
    var,
    nz,
    grad,
    alpha_blob=None,
    *,
    alpha: float | None = None,
    beta: float = 1.0,
    lambda1: float = 0.001,
    lambda2: float = 0.001,
):
    same_size(var=var, grad=grad)
    if nz.size != 2 * var.size:
        raise OpError(f"nz is {describe(nz)} and var is {describe(var)}; nz must be {[*var.shape, 2]}")
    pairs = nz.reshape(*var.shape, 2)
    step = ftrl_step(var, pairs, grad.reshape(var.shape), ftrl_alpha(alpha_blob, alpha), beta, lambda1, lambda2)
    return step[0], step[1].reshape(nz.shape)


@op("Wngrad", outputs=(2, 4), gradient="forbidden", inplace={0: 0, 1: 1})
def wngrad(param, seq_b, grad, lr, *, epsilon: float = 1e-5):
    """Also gives the effective learning rate, and the update."""
    same_size(param=param, grad=grad)
    b = scalar(seq_b, "seq_b")
    new_b = b + jnp.sum(grad * grad) / (b + epsilon)
    effective = scalar(lr, "lr") / (b + epsilon)  # compat: b as it was, not as it becomes
    update = effective * grad
    return param + update, new_b.reshape(seq_b.shape), effective.reshape(1), update


def storm_step(moment, grad, squares, lr, momentum, beta):
    """(what to add to the parameters, new moment), with the new sum of squared gradients."""
    effective = lr * (beta + squares) ** (-1 / 3)
    moment = grad + (1 - momentum * effective * effective) * (moment - grad)
    return effective * moment, moment


@op("Storm", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def storm(param, moment, grad_sq_sum, grad, lr, *, momentum: float = 10.0, beta: float = 0.1):
    same_size(param=param, moment=moment, grad=grad)
    squares = scalar(grad_sq_sum, "grad_sq_sum") + jnp.sum(grad * grad)
    step, moment = storm_step(moment, grad, squares, scalar(lr, "lr"), momentum, beta)
    return param + step, moment, squares.reshape(grad_sq_sum.shape)


@op("Lars", gradient="forbidden")
def lars(x, dx, wd, trust, lr_max, *, offset: float = 0.5, lr_min: float = 0.02):
    """The factor on the learning rate of one layer: trust / (|dx| / |x| + wd + offset), within lr_min and lr_max."""
    same_size(x=x, dx=dx)
    size = jnp.sqrt(jnp.sum(x * x))
    ratio = jnp.sqrt(jnp.sum(dx * dx)) / jnp.where(size > 0, size, 1)
    rate = jnp.where(size > 0, scalar(trust, "trust") / (ratio + scalar(wd, "wd") + offset), 1)
    return jnp.maximum(jnp.minimum(rate, scalar(lr_max, "lr_max")), lr_min).reshape(1)


@op("LearningRateAdaption", gradient="stops", inplace={0: 0})
def learning_rate_adaption(lr, grad, effgrad, *, lr_alpha: float = 0.01, normalized_lr_adaption: bool = True):
    """lr moved by the product of this gradient and the last: of their directions, if normalized."""
    same_size(grad=grad, effgrad=effgrad)
    scalar(lr, "lr")
    lr, grad, effgrad = lax.stop_gradient((lr, grad, effgrad))
    product = jnp.sum(grad * effgrad)
    if not normalized_lr_adaption:
        return lr - lr_alpha * product
    lengths = jnp.sqrt(jnp.sum(grad * grad)) * jnp.sqrt(jnp.sum(effgrad * effgrad))
    return lr * (1 - lr_alpha * product / jnp.maximum(lengths, 1e-12))


@op("ClipTensorByScaling", gradient="forbidden", inplace={0: 0})
def clip_tensor_by_scaling(x, value, additional_threshold=None, *, threshold: float):
    """x scaled down to a norm of `threshold` where `value`, its norm, is above it."""
    if threshold <= 0:
        raise OpError(f"threshold must be positive, is {threshold}")
    if x.size == 0:
        raise OpError(f"x is {describe(x)}; it must not be empty")
    limit = (
        threshold if additional_threshold is None else threshold * scalar(additional_threshold, "additional_threshold")
    )
    value = scalar(value, "value")
    return x * jnp.where(value > limit, limit / value, 1)


@op("WeightScale", gradient="forbidden", inplace={0: 0})
def weight_scale(w, iter, *, stepsize: int = 2**31 - 1, upper_bound_iter: int = 2**31 - 1, scale: float = 1.0):
    """w, scaled at every `stepsize`-th iteration before `upper_bound_iter`."""
    if stepsize < 1:
        raise OpError(f"stepsize must be at least 1, is {stepsize}")
    t = scalar(iter, "iter") + 1
    return jnp.where((t % stepsize == 0) & (t < upper_bound_iter), w * scale, w)
