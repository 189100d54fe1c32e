"""Updates of dense parameters by rarer optimizers, and operators that adapt learning rates. None has a gradient."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.errors import OpError
from jrnn.ops.optim import filled, momentum_step, same_size, scalar
from jrnn.ops.values import describe
from jrnn.registry import op


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


def _cubic_root(p):
    """The x in (0, 1) with p x = (1 - x)^3."""
    w3 = (-jnp.sqrt(p * p + 4 / 27 * p**3) - p) / 2
    w = -jnp.cbrt(-w3)
    return w - p / (3 * w) + 1


@op("YellowFin", outputs=8, gradient="forbidden", inplace={k: k for k in range(8)})
def yellow_fin(
    param,
    moment,
    lr_avg,
    mu_avg,
    curv_win,
    g_avg,
    g2_avg,
    scalars,
    grad,
    iter,
    *,
    beta: float = 0.999,
    curv_win_width: int = 20,
    epsilon: float = 1e-6,
    nesterov: bool = False,
    zero_debias: bool = True,
):
    """One step (Zhang and Mitliagkas, 2017) with the learning rate and momentum tuned so far, and both tuned.

    curv_win holds the logarithms of the last squared norms; scalars the moving averages of the gradient's norm, of its
    square, of the least and the greatest logarithm in the window, and of the distance to the optimum. The first iteration
    is 1; it does not tune yet.
    """
    same_size(param=param, moment=moment, g_avg=g_avg, g2_avg=g2_avg, grad=grad)
    if curv_win.shape != (curv_win_width,) or scalars.shape != (5,):
        raise OpError(
            f"curv_win is {describe(curv_win)} and scalars is {describe(scalars)}; they must be [{curv_win_width}] and [5]"
        )
    t = scalar(iter, "iter")
    lr, mu = scalar(lr_avg, "lr_avg"), scalar(mu_avg, "mu_avg")

    def average(old, new):
        return beta * old + (1 - beta) * new

    norm2 = jnp.maximum(jnp.sum(grad * grad), epsilon)
    g_avg, g2_avg = average(g_avg, grad), average(g2_avg, grad * grad)
    curv_win = curv_win.at[(t - 1) % curv_win_width].set(jnp.log(norm2))
    seen = jnp.arange(curv_win_width) < t
    least = jnp.min(jnp.where(seen, curv_win, jnp.inf))
    greatest = jnp.max(jnp.where(seen, curv_win, -jnp.inf))
    new = average(scalars[:4], jnp.stack([jnp.sqrt(norm2), norm2, least, greatest]))
    scalars = jnp.concatenate([new, average(scalars[4:], (new[0] / new[1]).reshape(1))])

    debias = filled(beta, t.astype(param.dtype)) if zero_debias else 1.0
    _, square, low, high, distance = scalars / debias
    variance = jnp.maximum(square - jnp.sum(jnp.square(g_avg / debias)), epsilon)
    low, high = jnp.maximum(jnp.exp(low), epsilon), jnp.maximum(jnp.exp(high), epsilon)
    root = _cubic_root(jnp.square(distance * low) / (2 * variance))
    spread = jnp.sqrt(high / low)
    tuned_mu = jnp.maximum(root * root, jnp.square((spread - 1) / (spread + 1)))
    tuned_lr = jnp.square(1 - jnp.sqrt(tuned_mu)) / low

    step, moment = momentum_step(grad, moment, lr, mu, nesterov)
    new_lr = jnp.where(t > 1, average(lr, tuned_lr), lr).reshape(lr_avg.shape)
    new_mu = jnp.where(t > 1, average(mu, tuned_mu), mu).reshape(mu_avg.shape)
    return param - step, moment, new_lr, new_mu, curv_win, g_avg, g2_avg, scalars
