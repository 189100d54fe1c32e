"""YellowFin: momentum SGD that tunes its own learning rate and momentum (Zhang and Mitliagkas, 2017)."""

from __future__ import annotations

import jax.numpy as jnp

from ..errors import OpError
from ..registry import op
from .checks import describe
from .optim import filled, momentum_step, same_size, scalar


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
    """One step with the learning rate and momentum tuned so far, and both tuned by this gradient.

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
