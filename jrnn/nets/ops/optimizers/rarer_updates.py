"""Rarer updates of parameters, dense and sparse, and operators that adapt learning rates. None has a gradient.

Shapes: R rows of D numbers in the parameters, K rows of gradients with their indices. A sparse update with an index that
occurs twice is applied twice, one after the other.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn.errors import OpError
from jrnn.nets.ir import Values
from jrnn.nets.ops.lengths import per_row
from jrnn.nets.ops.optimizers.updates import (
    adam_options,
    adam_step,
    filled,
    momentum_step,
    next_step,
    norm,
    same_size,
    sum_of_squares,
)
from jrnn.nets.ops.values import check_indices, describe, raise_if, scalar, takes
from jrnn.nets.registry import op


def _row_size(param: Any) -> int:
    return param.size // max(param.shape[0], 1)


def _check(indices: Any, grad: Any, param: Any) -> None:
    raise_if(
        indices.ndim != 1 or indices.dtype.kind not in "iu",
        "it must be a vector of integers",
        indices=indices,
    )
    if param.ndim < 1 or grad.size != indices.size * _row_size(param):
        raise OpError(
            f"grad is {describe(grad)} for {indices.size} indices into param {describe(param)}; it must have "
            f"{indices.size} of its rows"
        )
    check_indices(indices, param.shape[0])


def _occurrence(indices: Any) -> Any:
    """How often each index has come before.

    >>> _occurrence(jnp.array([3, 1, 3, 3])).tolist()
    [0, 0, 1, 2]
    """
    order = jnp.argsort(indices, stable=True)
    place = jnp.arange(indices.size)
    runs = indices[order]
    begins = jnp.where(runs != jnp.roll(runs, 1), place, 0) if indices.size > 1 else place
    count = place - lax.cummax(begins)
    return jnp.zeros_like(count).at[order].set(count)


def _by_rows(step: Callable, indices: Any, grad: Any, param: Any, **tables: Any) -> tuple[Any, ...]:
    """Applies `step(grad rows, param rows, *table rows) -> (result rows, *new rows)` row by row, in the order of indices.

    All first occurrences of an index are updated at once, then all second ones, and so on. Returns the new parameters and
    tables and the results, all in the shapes given.

    Args:
        tables: arrays of R rows, shaped like the rows of `param`; a pair (array, shape) where rows have another shape.
    """
    _check(indices, grad, param)
    shape = (_row_size(param),)
    blobs = [param]
    shaped = [param.reshape(param.shape[0], *shape)]
    for name, given in tables.items():
        table, row = given if isinstance(given, tuple) else (given, shape)
        if table.size != param.shape[0] * math.prod(row):
            raise OpError(
                f"{name} is {describe(table)}, param {describe(param)}; it must have {math.prod(row)} a row of it"
            )
        blobs.append(table)
        shaped.append(table.reshape(param.shape[0], *row))
    if indices.size == 0:
        return *blobs, grad
    rows = grad.reshape(indices.size, *shape)
    indices = jnp.asarray(indices)
    occurrence = _occurrence(indices)
    count = occurrence.max() + 1

    def goes_on(state):
        return state[0] < count

    def update(state):
        """Applies the step to the k-th occurrence of every index."""
        k, result, tables = state
        updated, *new = step(rows, *(table[indices] for table in tables))
        is_due = occurrence == k
        target = jnp.where(is_due, indices, param.shape[0])  # past the end is dropped
        tables = [t.at[target].set(r, mode="drop") for t, r in zip(tables, new)]
        return k + 1, jnp.where(is_due[:, None], updated, result), tables

    start = (jnp.zeros_like(count), jnp.zeros_like(rows), shaped)
    _, result, tables = lax.while_loop(goes_on, update, start)
    updated = [table.reshape(blob.shape) for table, blob in zip(tables, blobs)]
    return *updated, result.reshape(grad.shape)


@op("SparseMomentumSGDUpdate", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 3})
def sparse_momentum_sgd_update(
    grad, m, lr, param, indices, *, momentum: float = 0.0, nesterov: bool = False
):
    lr = scalar(lr, "lr")

    def step(g, p, m):
        change, m = momentum_step(g, m, lr, momentum, nesterov)
        return change, p - change, m

    param, m, change = _by_rows(step, indices, grad, param, m=m)
    return change, m, param


def _register_adagrad(type: str, row_wise: bool) -> None:
    """Adagrad; if `row_wise` with one moment per row, to which the mean of the row's squared gradients is added."""

    @op(type, outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
    def adagrad(
        param, moment, indices, grad, lr, *, epsilon: float = 1e-5, weight_decay: float = 0.0
    ):
        lr = scalar(lr, "lr")

        def step(g, p, h):
            g = g + weight_decay * p
            squares = g * g
            h = h + (squares.mean(1) if row_wise else squares)
            return g, p + lr * g / per_row(jnp.sqrt(h) + epsilon, g), h

        table = (moment, ()) if row_wise else moment
        return _by_rows(step, indices, grad, param, moment=table)[:2]


_register_adagrad("SparseAdagrad", False)
_register_adagrad("RowWiseSparseAdagrad", True)


def _rectified(t: Any, beta2: float) -> tuple[Any, Any]:
    """RAdam's number of averaged steps at t, and its factor on the step where they are enough."""
    limit = 2 / (1 - beta2) - 1
    steps = limit - 2 * t * (1 - filled(beta2, t)) / filled(beta2, t)
    divisor = (limit - 4) * (limit - 2) * jnp.maximum(steps, 1e-6)
    square = (steps - 4) * (steps - 2) * limit / divisor
    return steps, jnp.sqrt(jnp.maximum(square, 0))


@op("SparseAdam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
@takes(options=adam_options)
def sparse_adam(param, m1, m2, indices, grad, lr, iter, *, options, enableRAdam: bool = False):
    """Also returns the scaled gradient."""
    lr = scalar(lr, "lr")
    t = next_step(iter, param.dtype)

    def step(g, p, m1, m2):
        scaled, m1, m2 = adam_step(m1, m2, g, t, *options)
        if enableRAdam:
            beta1, beta2, _ = options
            steps, factor = _rectified(t, beta2)
            scaled = jnp.where(steps >= 5, factor * scaled, m1 / filled(beta1, t))
        return scaled, p + lr * scaled, m1, m2

    return _by_rows(step, indices, grad, param, m1=m1, m2=m2)


@op("RowWiseSparseAdam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
@takes(options=adam_options)
def row_wise_sparse_adam(param, m1, m2, indices, grad, lr, iter, *, options):
    """Adam with one second moment per row. Also returns the scaled gradient."""
    lr = scalar(lr, "lr")
    t = next_step(iter, param.dtype)

    def step(g, p, m1, m2):
        scaled, m1, m2 = adam_step(m1, m2, g, t, *options)
        return scaled, p + lr * scaled, m1, m2

    return _by_rows(step, indices, grad, param, m1=m1, m2=(m2, ()))


def _adadelta_step(grad, param, moment, delta, *, lr, epsilon, decay):
    """(what was added to the parameters, new parameters, new moment, new delta)."""
    moment = decay * moment + (1 - decay) * grad * grad
    scaled = jnp.sqrt(delta + epsilon) / jnp.sqrt(moment + epsilon) * grad
    return lr * scaled, param + lr * scaled, moment, decay * delta + (1 - decay) * scaled * scaled


@op("Adadelta", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def adadelta(param, moment, delta, grad, lr, *, epsilon: float = 1e-5, decay: float = 0.95):
    same_size(param=param, moment=moment, delta=delta, grad=grad)
    lr = scalar(lr, "lr")
    _, *new = _adadelta_step(grad, param, moment, delta, lr=lr, epsilon=epsilon, decay=decay)
    return tuple(new)


@op("SparseAdadelta", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def sparse_adadelta(
    param, moment, delta, indices, grad, lr, *, epsilon: float = 1e-5, decay: float = 0.95
):
    step = partial(_adadelta_step, lr=scalar(lr, "lr"), epsilon=epsilon, decay=decay)
    return _by_rows(step, indices, grad, param, moment=moment, delta=delta)[:3]


def _ftrl_step(grad, var, nz, *, alpha, beta, lambda1, lambda2):
    """(grad, new var, new nz); nz holds the sum of squared gradients and the linear term, in its last dimension."""
    n = nz[..., 0]
    z = nz[..., 1]
    new_n = n + grad * grad
    z = z + grad - (jnp.sqrt(new_n) - jnp.sqrt(n)) / alpha * var
    shrunk = (lambda1 * jnp.sign(z) - z) / ((beta + jnp.sqrt(new_n)) / alpha + lambda2)
    return grad, jnp.where(jnp.abs(z) > lambda1, shrunk, 0), jnp.stack([new_n, z], -1)


def _ftrl_options(
    *, alpha: float | None = None, beta: float = 1.0, lambda1: float = 0.001, lambda2: float = 0.001
) -> Callable[[Any], Values]:
    """A function of the blob of alpha, or None, that returns the options of `_ftrl_step`."""

    def options(blob: Any) -> Values:
        if blob is not None and alpha is not None:
            raise OpError("alpha is given both as input and as argument; give one of them")
        rate = 0.005 if alpha is None else alpha
        if blob is not None:
            rate = scalar(blob, "alpha")
        return {"alpha": rate, "beta": beta, "lambda1": lambda1, "lambda2": lambda2}

    return options


@op("Ftrl", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
@takes(options=_ftrl_options)
def ftrl(var, nz, grad, alpha_blob=None, *, options):
    same_size(var=var, grad=grad)
    raise_if(nz.size != 2 * var.size, f"nz must be {[*var.shape, 2]}", nz=nz, var=var)
    grad = grad.reshape(var.shape)
    pairs = nz.reshape(*var.shape, 2)
    _, var, pairs = _ftrl_step(grad, var, pairs, **options(alpha_blob))
    return var, pairs.reshape(nz.shape)


@op("SparseFtrl", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
@takes(options=_ftrl_options)
def sparse_ftrl(var, nz, indices, grad, alpha_blob=None, *, options):
    step = partial(_ftrl_step, **options(alpha_blob))
    return _by_rows(step, indices, grad, var, nz=(nz, (_row_size(var), 2)))[:2]


@op("Wngrad", outputs=(2, 4), gradient="forbidden", inplace={0: 0, 1: 1})
def wngrad(param, seq_b, grad, lr, *, epsilon: float = 1e-5):
    """Also returns the effective learning rate, and the update."""
    same_size(param=param, grad=grad)
    b = scalar(seq_b, "seq_b")
    new_b = b + sum_of_squares(grad) / (b + epsilon)
    effective = scalar(lr, "lr") / (b + epsilon)  # compat: b as it was, not as it becomes
    update = effective * grad
    return param + update, new_b.reshape(seq_b.shape), effective.reshape(1), update


@op("SparseWngrad", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def sparse_wngrad(param, seq_b, indices, grad, lr, *, epsilon: float = 1e-5):
    _check(indices, grad, param)
    b = scalar(seq_b, "seq_b")
    new_b = b + sum_of_squares(grad) / b  # compat: Wngrad divides by b + epsilon here
    rows = grad.reshape(indices.size, *param.shape[1:]) * (scalar(lr, "lr") / (b + epsilon))
    return param.at[indices].add(rows), new_b.reshape(seq_b.shape)


def _storm_step(grad, param, moment, *, squares, lr, momentum, beta):
    """(what was added to the parameters, new parameters, new moment), with the new sum of squared gradients."""
    effective = lr * (beta + squares) ** (-1 / 3)
    moment = grad + (1 - momentum * effective * effective) * (moment - grad)
    return effective * moment, param + effective * moment, moment


@op("Storm", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def storm(param, moment, grad_sq_sum, grad, lr, *, momentum: float = 10.0, beta: float = 0.1):
    same_size(param=param, moment=moment, grad=grad)
    squares = scalar(grad_sq_sum, "grad_sq_sum") + sum_of_squares(grad)
    options = {"squares": squares, "lr": scalar(lr, "lr"), "momentum": momentum, "beta": beta}
    _, param, moment = _storm_step(grad, param, moment, **options)
    return param, moment, squares.reshape(grad_sq_sum.shape)


@op("SparseStorm", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def sparse_storm(
    param, moment, grad_sq_sum, grad, indices, lr, *, momentum: float = 10.0, beta: float = 0.1
):
    squares = scalar(grad_sq_sum, "grad_sq_sum") + sum_of_squares(grad)
    step = partial(_storm_step, squares=squares, lr=scalar(lr, "lr"), momentum=momentum, beta=beta)
    param, moment, _ = _by_rows(step, indices, grad, param, moment=moment)
    return param, moment, squares.reshape(grad_sq_sum.shape)


@op("Lars", gradient="forbidden")
def lars(x, dx, wd, trust, lr_max, *, offset: float = 0.5, lr_min: float = 0.02):
    """The factor on the learning rate of one layer: trust / (|dx| / |x| + wd + offset), within lr_min and lr_max."""
    same_size(x=x, dx=dx)
    size = norm(x)
    ratio = norm(dx) / jnp.where(size > 0, size, 1)
    rate = jnp.where(size > 0, scalar(trust, "trust") / (ratio + scalar(wd, "wd") + offset), 1)
    return jnp.maximum(jnp.minimum(rate, scalar(lr_max, "lr_max")), lr_min).reshape(1)


@op("LearningRateAdaption", gradient="stops", inplace={0: 0})
def learning_rate_adaption(
    lr, grad, effgrad, *, lr_alpha: float = 0.01, normalized_lr_adaption: bool = True
):
    """lr moved by the product of this gradient and the last: of their directions, if normalized."""
    same_size(grad=grad, effgrad=effgrad)
    scalar(lr, "lr")
    lr, grad, effgrad = lax.stop_gradient((lr, grad, effgrad))
    product = jnp.sum(grad * effgrad)
    if not normalized_lr_adaption:
        return lr - lr_alpha * product
    lengths = norm(grad) * norm(effgrad)
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
            f"curv_win is {curv_win.shape}, scalars {scalars.shape}; they must be [{curv_win_width}] and [5]"
        )
    t = scalar(iter, "iter")
    lr = scalar(lr_avg, "lr_avg")
    mu = scalar(mu_avg, "mu_avg")

    def average(old, new):
        return beta * old + (1 - beta) * new

    norm2 = jnp.maximum(sum_of_squares(grad), epsilon)
    g_avg = average(g_avg, grad)
    g2_avg = average(g2_avg, grad * grad)
    curv_win = curv_win.at[(t - 1) % curv_win_width].set(jnp.log(norm2))
    seen = jnp.arange(curv_win_width) < t
    least = jnp.min(jnp.where(seen, curv_win, jnp.inf))
    greatest = jnp.max(jnp.where(seen, curv_win, -jnp.inf))
    new = average(scalars[:4], jnp.stack([jnp.sqrt(norm2), norm2, least, greatest]))
    scalars = jnp.concatenate([new, average(scalars[4:], (new[0] / new[1]).reshape(1))])

    debias = filled(beta, t.astype(param.dtype)) if zero_debias else 1.0
    _, square, low, high, distance = scalars / debias
    variance = jnp.maximum(square - jnp.sum(jnp.square(g_avg / debias)), epsilon)
    low = jnp.maximum(jnp.exp(low), epsilon)
    high = jnp.maximum(jnp.exp(high), epsilon)
    root = _cubic_root(jnp.square(distance * low) / (2 * variance))
    spread = jnp.sqrt(high / low)
    tuned_mu = jnp.maximum(root * root, jnp.square((spread - 1) / (spread + 1)))
    tuned_lr = jnp.square(1 - jnp.sqrt(tuned_mu)) / low

    step, moment = momentum_step(grad, moment, lr, mu, nesterov)
    new_lr = jnp.where(t > 1, average(lr, tuned_lr), lr).reshape(lr_avg.shape)
    new_mu = jnp.where(t > 1, average(mu, tuned_mu), mu).reshape(mu_avg.shape)
    return param - step, moment, new_lr, new_mu, curv_win, g_avg, g2_avg, scalars
