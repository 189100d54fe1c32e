"""Updates of rows of parameters, from sparse gradients. None has a gradient.

Shapes: R rows of D numbers in the parameters, K rows of gradients with their indices. An index that occurs twice is applied
twice, one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.contrib.optim_rare import adadelta_step, ftrl_alpha, ftrl_step, storm_step
from jrnn.ops.optim import adam_step, filled, momentum_step, next_step, scalar
from jrnn.ops.values import check_indices, describe
from jrnn.registry import op


def _check(indices: Any, grad: Any, param: Any, **tables: Any) -> None:
    """Raises OpError where indices are no rows of param, or gradients and tables have other rows than it."""
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise OpError(f"indices is {describe(indices)}; it must be a vector of integers")
    if param.ndim < 1 or grad.size != indices.size * _row_size(param):
        raise OpError(
            f"grad is {describe(grad)} for {indices.size} indices into param {describe(param)}; it must have "
            f"{indices.size} of its rows"
        )
    for name, (table, row) in tables.items():
        if table.size != param.shape[0] * row:
            raise OpError(f"{name} is {describe(table)} and param is {describe(param)}; it must have {row} a row of it")
    check_indices(indices, param.shape[0])


def _row_size(param: Any) -> int:
    return param.size // max(param.shape[0], 1)


def _occurrence(indices: Any) -> Any:
    """How often each index has come before.

    >>> _occurrence(jnp.array([3, 1, 3, 3])).tolist()
    [0, 0, 1, 2]
    """
    order = jnp.argsort(indices, stable=True)
    place = jnp.arange(indices.size)
    runs = indices[order]
    begins = jnp.where(runs != jnp.roll(runs, 1), place, 0) if indices.size > 1 else place
    count = place - jax.lax.cummax(begins)
    return jnp.zeros_like(count).at[order].set(count)


def _apply(indices: Any, grad: Any, tables: Sequence[Any], step: Callable) -> tuple[list[Any], Any]:
    """Applies `step(grad rows, *table rows) -> (result rows, *new table rows)` row by row, in the order of the indices.

    All first occurrences go at once, then all second ones, and so on. Returns the new tables and the result rows [K, D].
    """
    if indices.size == 0:
        return list(tables), grad
    indices = jnp.asarray(indices)
    turn = _occurrence(indices)
    rounds = turn.max() + 1

    def round(state):
        k, result, tables = state
        rows = step(grad, *(t[indices] for t in tables))
        target = jnp.where(turn == k, indices, tables[0].shape[0])  # past the end is dropped
        mine = (turn == k).reshape(-1, *(1,) * (grad.ndim - 1))
        new = [t.at[target].set(r, mode="drop") for t, r in zip(tables, rows[1:])]
        return k + 1, jnp.where(mine, rows[0], result), new

    _, result, tables = jax.lax.while_loop(
        lambda state: state[0] < rounds, round, (jnp.zeros_like(rounds), jnp.zeros_like(grad), list(tables))
    )
    return tables, result


def _update(indices, grad, step: Callable, *tables: tuple[Any, tuple[int, ...]]) -> tuple[Any, ...]:
    """`_apply` on (table, shape of one row of it); the new tables and the results, all in the shapes given.

    The first table is the parameters; gradients have their rows.
    """
    rows = tables[0][0].shape[0]
    shaped = [t.reshape(rows, *shape) for t, shape in tables]
    found, result = _apply(indices, grad.reshape(indices.size, *tables[0][1]), shaped, step)
    return *(f.reshape(t.shape) for f, (t, _) in zip(found, tables)), result.reshape(grad.shape)


@op("SparseMomentumSGDUpdate", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 3})
def sparse_momentum_sgd_update(grad, m, lr, param, indices, *, momentum: float = 0.0, nesterov: bool = False):
    d = _row_size(param)
    _check(indices, grad, param, m=(m, d))
    lr = scalar(lr, "lr")

    def step(g, p, m):
        change, m = momentum_step(g, m, lr, momentum, nesterov)
        return change, p - change, m

    param, m, change = _update(indices, grad, step, (param, (d,)), (m, (d,)))
    return change, m, param


@op("SparseAdagrad", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def sparse_adagrad(param, moment, indices, grad, lr, *, epsilon: float = 1e-5, weight_decay: float = 0.0):
    d = _row_size(param)
    _check(indices, grad, param, moment=(moment, d))
    lr = scalar(lr, "lr")

    def step(g, p, h):
        g = g + weight_decay * p
        h = h + g * g
        return g, p + lr * g / (jnp.sqrt(h) + epsilon), h

    return _update(indices, grad, step, (param, (d,)), (moment, (d,)))[:2]


@op("RowWiseSparseAdagrad", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def row_wise_sparse_adagrad(param, moment, indices, grad, lr, *, epsilon: float = 1e-5, weight_decay: float = 0.0):
    """Adagrad with one moment a row: the mean of its squared gradients is added."""
    d = _row_size(param)
    _check(indices, grad, param, moment=(moment, 1))
    lr = scalar(lr, "lr")

    def step(g, p, h):
        g = g + weight_decay * p
        h = h + (g * g).mean(1)
        return g, p + lr * g / (jnp.sqrt(h) + epsilon)[:, None], h

    return _update(indices, grad, step, (param, (d,)), (moment, ()))[:2]


def _rectified(t: Any, beta2: float) -> tuple[Any, Any]:
    """RAdam's number of averaged steps at t, and the factor that it puts on the step where they are enough."""
    limit = 2 / (1 - beta2) - 1
    steps = limit - 2 * t * (1 - filled(beta2, t)) / filled(beta2, t)
    inside = (steps - 4) * (steps - 2) * limit / ((limit - 4) * (limit - 2) * jnp.maximum(steps, 1e-6))
    return steps, jnp.sqrt(jnp.maximum(inside, 0))


@op("SparseAdam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def sparse_adam(
    param,
    m1,
    m2,
    indices,
    grad,
    lr,
    iter,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-5,
    enableRAdam: bool = False,
):
    """Also gives the gradient as it was scaled."""
    d = _row_size(param)
    _check(indices, grad, param, m1=(m1, d), m2=(m2, d))
    lr, t = scalar(lr, "lr"), next_step(iter, param.dtype)

    def step(g, p, m1, m2):
        scaled, m1, m2 = adam_step(m1, m2, g, t, beta1, beta2, epsilon)
        if enableRAdam:
            steps, factor = _rectified(t, beta2)
            scaled = jnp.where(steps >= 5, factor * scaled, m1 / filled(beta1, t))
        return scaled, p + lr * scaled, m1, m2

    return _update(indices, grad, step, (param, (d,)), (m1, (d,)), (m2, (d,)))


@op("RowWiseSparseAdam", outputs=(3, 4), gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def row_wise_sparse_adam(
    param, m1, m2, indices, grad, lr, iter, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-5
):
    """Adam with one second moment a row. Also gives the gradient as it was scaled."""
    d = _row_size(param)
    _check(indices, grad, param, m1=(m1, d), m2=(m2, 1))
    lr, t = scalar(lr, "lr"), next_step(iter, param.dtype)

    def step(g, p, m1, m2):
        scaled, m1, m2 = adam_step(m1, m2, g, t, beta1, beta2, epsilon)
        return scaled, p + lr * scaled, m1, m2

    return _update(indices, grad, step, (param, (d,)), (m1, (d,)), (m2, ()))


@op("SparseAdadelta", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def sparse_adadelta(param, moment, delta, indices, grad, lr, *, epsilon: float = 1e-5, decay: float = 0.95):
    d = _row_size(param)
    _check(indices, grad, param, moment=(moment, d), delta=(delta, d))
    lr = scalar(lr, "lr")

    def step(g, p, h, delta):
        change, h, delta = adadelta_step(h, delta, g, lr, epsilon, decay)
        return change, p + change, h, delta

    return _update(indices, grad, step, (param, (d,)), (moment, (d,)), (delta, (d,)))[:3]


@op("SparseFtrl", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def sparse_ftrl(
    var,
    nz,
    indices,
    grad,
    alpha_blob=None,
    *,
    alpha: float | None = None,
    beta: float = 1.0,
    lambda1: float = 0.001,
    lambda2: float = 0.001,
):
    d = _row_size(var)
    _check(indices, grad, var, nz=(nz, 2 * d))
    rate = ftrl_alpha(alpha_blob, alpha)

    def step(g, w, nz):
        w, nz = ftrl_step(w, nz, g, rate, beta, lambda1, lambda2)
        return g, w, nz

    return _update(indices, grad, step, (var, (d,)), (nz, (d, 2)))[:2]


@op("SparseWngrad", outputs=2, gradient="forbidden", inplace={0: 0, 1: 1})
def sparse_wngrad(param, seq_b, indices, grad, lr, *, epsilon: float = 1e-5):
    _check(indices, grad, param)
    b = scalar(seq_b, "seq_b")
    new_b = b + jnp.sum(grad * grad) / b  # compat: Wngrad divides by b + epsilon here
    rows = grad.reshape(indices.size, *param.shape[1:]) * (scalar(lr, "lr") / (b + epsilon))
    return param.at[indices].add(rows), new_b.reshape(seq_b.shape)


@op("SparseStorm", outputs=3, gradient="forbidden", inplace={0: 0, 1: 1, 2: 2})
def sparse_storm(param, moment, grad_sq_sum, grad, indices, lr, *, momentum: float = 10.0, beta: float = 0.1):
    d = _row_size(param)
    _check(indices, grad, param, moment=(moment, d))
    squares = scalar(grad_sq_sum, "grad_sq_sum") + jnp.sum(grad * grad)
    lr = scalar(lr, "lr")

    def step(g, p, m):
        change, m = storm_step(m, g, squares, lr, momentum, beta)
        return change, p + change, m

    param, moment, _ = _update(indices, grad, step, (param, (d,)), (moment, (d,)))
    return param, moment, squares.reshape(grad_sq_sum.shape)
