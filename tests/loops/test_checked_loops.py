"""`checkify` of loops that stop early: only steps that run are checked. Options of JAX that forbid what formulas do."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jrnn import nn
from jrnn.errors import ScanError
from jrnn.loops import Newton, online_gradient, scan, while_loop
from jrnn.loops.ir import strict_passes

STARTS = jnp.array([0.0, 2.0, 5.0])  # the last one never runs


def counting(c):
    checkify.check(c < 3, "{c} is too much", c=c)
    return c + 1


def by_while_loop(limit, start):
    def body(c):
        checkify.check(limit < 4, "a limit of an example that never runs")
        return counting(c)

    return while_loop(lambda c: c < 3, body, start, max_steps=6)


def by_until(limit, start):
    def step(c, x):
        checkify.check(limit < 4, "a limit of an example that never runs")
        checkify.check(x < 4, "an x of no step")
        return counting(c), c

    return scan(step, start, jnp.arange(6.0), until=lambda c: c >= 3)[0]


def by_while_loop_with_rows(limit, start):
    def body(c):
        checkify.check(jnp.all(c < 3), "a row has stopped")
        return c + 1

    rows = jnp.stack([start, start + 1.0])
    return scan(lambda c, _: (body(c), None), rows, None, length=6, until=lambda c: c >= 3)[0]


LOOPS = [by_while_loop, by_until, by_while_loop_with_rows]
LIMITS = jnp.array([1.0, 2.0, 9.0])


@pytest.mark.parametrize("loop", LOOPS)
def test_checks_of_steps_that_do_not_run_are_not_reported(loop):
    starts = STARTS[:2] if loop is by_while_loop_with_rows else STARTS
    limits = LIMITS[: len(starts)]
    error, values = checkify.checkify(jax.vmap(loop))(limits, starts)
    assert error.get() is None
    np.testing.assert_array_equal(jnp.ravel(values)[0], 3.0)
    error, _ = checkify.checkify(jax.vmap(jax.vmap(loop)))(limits[:, None], starts[:, None])
    assert error.get() is None
    if loop is not by_while_loop_with_rows:
        error, _ = jax.vmap(checkify.checkify(loop))(limits, starts)
        assert error.get() is None


@pytest.mark.parametrize("loop", [by_while_loop, by_until])
def test_checks_of_steps_that_run_are_reported(loop):
    error, _ = checkify.checkify(jax.vmap(loop))(jnp.array([1.0, 5.0]), STARTS[:2])
    assert "never runs" in error.get()


@pytest.mark.parametrize("loop", [by_while_loop, by_until])
def test_checks_of_a_gradient(loop):
    gradient = jax.vmap(jax.grad(loop, argnums=1))
    error, values = checkify.checkify(gradient)(LIMITS[:2], STARTS[:2])
    assert error.get() is None
    np.testing.assert_array_equal(values, 1.0)


@pytest.mark.parametrize("errors", ["nan_checks", "div_checks"])
def test_numbers_of_steps_that_do_not_run_are_not_checked(errors):
    def body(c):
        return c - 1 + 0 * jnp.log(c) + 0 / c

    def loop(start):
        return while_loop(lambda c: c > 0, body, start, max_steps=6)

    checked = checkify.checkify(jax.vmap(loop), errors=getattr(checkify, errors))
    assert checked(jnp.array([1.0, 2.0, -1.0]))[0].get() is None


# Options of JAX -------------------------------------------------------------------------------------------------------


LAYERS = [nn.LRU, nn.S5, nn.RetNet, nn.GLA, nn.Mamba2, nn.MinGRU, nn.RWKV7]
TWO_SIZES = [nn.LRU, nn.S5, nn.MinGRU]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_without_promotion_of_types(kind, dtype):
    from flax import nnx

    sizes = (4, 4) if kind in TWO_SIZES else (4,)
    layer = kind(*sizes, dtype=dtype, rngs=nnx.Rngs(0))
    x = jnp.linspace(0.0, 1.0, 24, dtype=dtype).reshape(3, 2, 4)

    def outputs(x):
        y, _ = layer(x, lengths=jnp.array([3, 2]))
        now, state = layer.step(x[0])
        return y, now, layer.step(x[0], state)[0], layer.initial_state(2)

    expected = jax.eval_shape(outputs, x)
    with jax.numpy_dtype_promotion("strict"):
        actual = jax.eval_shape(outputs, x)
        jax.eval_shape(jax.grad(lambda x: jnp.sum(layer(x)[0])), x)
    jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), actual, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("jacobian", ["exact", "diagonal"])
def test_newton_without_promotion_of_types(dtype, jacobian):
    xs = jnp.linspace(0.0, 1.0, 24, dtype=dtype).reshape(4, 2, 3)
    w = jnp.eye(3, dtype=dtype)

    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    def loss(xs):
        last, _ = scan(step, jnp.zeros_like(xs[0]), xs, executor=Newton(jacobian=jacobian))
        return jnp.sum(last)

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(jax.grad(loss), xs).dtype == dtype


OPTIONS = [{}, {"until": lambda h: jnp.all(h > 10.0)}, {"executor": "newton"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_no_tracer_leaks(options, transform):
    w = jnp.eye(3)

    def loss(h, xs):
        h, ys = scan(lambda h, x: (jnp.tanh(h @ w + x), h), h, xs, **options)
        return jnp.sum(h) + jnp.sum(ys)

    with jax.checking_leaks(), strict_passes(True):
        jax.jit(transform(loss))(jnp.zeros((2, 3)), jnp.ones((4, 2, 3)))


def test_no_tracer_leaks_from_a_loop_in_chunks():
    def step(state, x):
        state = 0.9 * state + jnp.sin(x)[..., :, None] * x[..., None, :]
        return state, jnp.einsum("nij,nj->ni", state, x)

    def loss(state, xs):
        return jnp.sum(scan(step, state, xs, executor="chunks")[1])

    with jax.checking_leaks(), strict_passes(True):
        jax.jit(jax.grad(loss, 1)).lower(jnp.zeros((2, 3, 3)), jnp.ones((6, 2, 3)))


# Jacobians ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("map_over", [False, True])
def test_newton_with_an_infinite_entry_of_a_jacobian(map_over):
    """The derivative of the root at 0 is infinite, and infinity times 0 in another order of products is no number."""
    xs = jnp.array([0.5, 0.0, 1.0, 0.25])

    def step(h, x):
        h = 0.5 * jnp.cbrt(h) + x
        return h, h

    def derivative(executor, start, tangent):
        def outputs(start):
            return scan(step, start, xs, executor=executor)

        return jax.jvp(outputs, (start,), (tangent,))

    arguments = jnp.array([0.0, 1.0]), jnp.ones(2)
    results = []
    for executor in ("newton", "scan"):
        run = functools.partial(derivative, executor)
        results.append((jax.vmap(run) if map_over else run)(*arguments))
    ours, theirs = results
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), ours, theirs)


def test_an_online_gradient_names_the_branch():
    def step(w, h, x):
        h = jax.lax.cond(x > 0, lambda h: jnp.tanh(w * h), lambda h: h, h)
        return h, jnp.sum(h**2)

    size = 64
    with pytest.raises(ScanError, match=r"through cond at .*test_checked_loops.py.*jnp.where"):
        online_gradient(step).init(jnp.ones(size), jnp.zeros(size), jnp.float32(1.0))
