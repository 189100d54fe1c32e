"""Loops that read constants at indices: their gradients are those of loops over inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

from jrnn import jaxprs
from jrnn.loops import scan
from jrnn.loops.ir import ScanParams

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, D = 5, 2, 3
X = jnp.sin(jnp.arange(T * N * D, dtype=jnp.float32)).reshape(T, N, D)
READS = {
    "a subscript": lambda x, t: x[t],
    "a later place": lambda x, t: x[t + 1],
    "a dynamic slice": lambda x, t: jax.lax.dynamic_index_in_dim(x, t, 0, keepdims=False),
    "take": lambda x, t: jnp.take(x, t, axis=0),
    "clipped": lambda x, t: x.at[t].get(mode="clip"),
    "filled": lambda x, t: x.at[t].get(mode="fill", fill_value=2),
    "of a carried array": None,
    "along the second axis": lambda x, t: x[:, t],
}
ORDERS = {
    "forward": np.arange(T),
    "backward": np.arange(T)[::-1],
    "negative": np.arange(T) - T,
    "from a later place": np.arange(T) + 2,
    "before the first": np.arange(T) - 2,
    "one place": np.full(T, 2),
    "any": np.array([3, 0, 3, 4, 1]),
}


def loss(read, order, which, reverse=False):
    def of(x, p):
        x = jnp.swapaxes(x, 0, 1) if read is READS["along the second axis"] else x

        def step(carry, t):
            h, table = carry
            h = jnp.tanh(h * p + (table[t] if read is None else read(x, t)))
            return (h, table), h

        init = jnp.ones((N, D)), x if read is None else ()
        (last, _), ys = which(step, init, order, reverse=reverse)
        return jnp.sum(jnp.sin(last)) + jnp.sum(ys * ys)

    return jax.value_and_grad(of, (0, 1))


def accumulated(fn, *args):
    """The shapes that loops carry."""
    every = jaxprs.all_equations(jax.make_jaxpr(fn)(*args).jaxpr)
    scans = [ScanParams.of(e.params) for e in every if e.primitive.name == "scan"]
    return [v.aval.shape for scan in scans for v in scan.jaxpr.jaxpr.outvars[: scan.n_carry]]


@pytest.mark.parametrize("order", ORDERS.values(), ids=[name.replace(" ", "_") for name in ORDERS])
@pytest.mark.parametrize("read", READS.values(), ids=[name.replace(" ", "_") for name in READS])
def test_the_gradient_of_a_lookup_is_no_carry(read, order):
    given = X, jnp.linspace(0.5, 1, N * D).reshape(N, D)
    order = jnp.asarray(order)
    for reverse in (False, True):
        ours, theirs = (loss(read, order, which, reverse) for which in (scan, jax.lax.scan))
        assert {*accumulated(ours, *given)} == {(N, D)}
        assert T in sum(accumulated(theirs, *given), ())
        actual, wanted = by_numpy(ours)(*given), by_numpy(theirs)(*given)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, wanted
        )


def test_lookups_in_other_transformations():
    def last(which, x, order):
        return which(lambda h, t: (jnp.tanh(h * 0.9 + x[t]), h), jnp.ones((N, D)), order)

    orders = jnp.stack([jnp.arange(T), jnp.arange(T)[::-1], jnp.asarray([3, 0, 3, 4, 1])])

    def transformed(which):
        def mapped(x):
            return jax.vmap(lambda order: jax.jacrev(lambda x: last(which, x, order)[0])(x))(orders)

        def pushed(x):
            return jax.jvp(lambda x: last(which, x, orders[2]), (x,), (jnp.cos(x),))

        def twice(x):
            return jax.grad(
                lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(last(which, x, orders[0])[0]))(x) ** 2)
            )(x)

        return lambda x: (mapped(x), pushed(x), twice(x))

    actual, wanted = by_numpy(transformed(scan))(X), by_numpy(transformed(jax.lax.scan))(X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, wanted
    )


def test_a_lookup_that_is_no_input_stays():
    """A table that is shorter than the loop would grow, and a place that depends on the carry is not known before."""

    def of(x):
        def step(carry, t):
            h, at = carry
            return (jnp.tanh(h + x[t % 2] + x[at]), jnp.argmax(h)), None

        return jnp.sum(scan(step, (x[0], 0), jnp.arange(T))[0][0])

    x = X[:4, 0]
    assert {(4, D)} < {*accumulated(jax.grad(of), x)}
