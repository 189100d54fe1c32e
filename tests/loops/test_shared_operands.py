"""Products of one value with several matrices are one product, and what is constant leaves a differentiated loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

from jrnn.loops import scan
from jrnn.loops.compile import canonical_form
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, H = 16, 2, 3
A, B, C = (jnp.sin(k + jnp.arange(H * H, dtype=jnp.float32)).reshape(H, H) for k in range(3))
XS = jnp.cos(jnp.arange(T * N * H, dtype=jnp.float32)).reshape(T, N, H)


def gates(p, h, x):
    a, b, c = p
    f, u = jax.nn.sigmoid(x @ a + h @ b + a[:1]), jnp.tanh(x @ c + h @ a + b[:1])
    return f * h + (1 - f) * u, h


def transposed(p, h, x):
    a, b, _ = p
    return jnp.tanh(x * (h @ a.T) + h @ b.T), h


def columns(p, h, x):
    a, b, _ = p
    return jnp.tanh(x * (a @ h.T).T + (b @ h.T).T), h


def computed_later(p, h, x):
    """The second matrix is computed after the first product."""
    a, b, _ = p
    f = jax.nn.sigmoid(h @ a)
    return f * jnp.tanh(h @ jnp.exp(b)) + x, h


def of_heads(p, h, x):
    a, b, c = p
    each = [jnp.einsum("nh,nhk->nk", h, jnp.stack([w, c])) for w in (a, b)]
    return jnp.tanh(each[0] * x) + each[1], h


def of_several_sizes(p, h, x):
    a, b, c = p
    z = h @ a[:, :1] + b[:1, :1], h @ b + c[:1], h @ c[:, 1:] + a[:1, 1:]
    return jnp.tanh(jnp.concatenate([z[0] * x[:, :1], z[2]], 1)) + z[1], h


def in_part(p, h, x):
    """Only one of two joined products is added to something."""
    a, b, c = p
    return jnp.tanh(x @ c + h @ a) * (h @ b), h


# Steps, and the products of each that are left.
STEPS = [
    (gates, 2),
    (transposed, 1),
    (columns, 1),
    (computed_later, 1),
    (of_heads, 1),
    (of_several_sizes, 1),
    (in_part, 3),
]


def loss(step, which=scan):
    def of(p, xs):
        last, ys = which(lambda h, x: step(p, h, x), jnp.ones((N, H)), xs)
        return jnp.sum(jnp.sin(last)) + jnp.sum(ys * ys)

    return of


def traced_loops(fn, *args):
    plans = plans_in(jax.make_jaxpr(fn)(*args).jaxpr, Target("cpu"))
    return [canonical_form(plan.loop)[0] for plan in plans]


def count(loop, name):
    return sum(e.primitive.name == name for e in loop.eqns)


@pytest.mark.parametrize("step, left", STEPS, ids=[step.__name__ for step, _ in STEPS])
def test_products_with_one_operand_are_one(step, left):
    given = (A, B, C), XS
    for fn in (loss(step), jax.grad(loss(step), (0, 1))):
        assert count(traced_loops(fn, *given)[0], "dot_general") == left
    actual, wanted = (
        by_numpy(jax.value_and_grad(loss(step, which), (0, 1)))(*given)
        for which in (scan, jax.lax.scan)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, wanted
    )


def test_a_joined_product_has_one_in_the_reverse_loop():
    """Its cotangents are read together: by the gradients of x, of h and of both joined matrices."""
    _, reverse = traced_loops(jax.grad(loss(gates), (0, 1)), (A, B, C), XS)
    assert count(reverse, "dot_general") == 4


def test_a_product_for_outputs_is_not_joined():
    """It may leave the loop."""

    def step(p, h, x):
        a, b, c = p
        return jnp.tanh(h @ a + x), h @ b

    (loop,) = traced_loops(loss(step), (A, B, C), XS)
    assert count(loop, "dot_general") == 2


def test_few_steps_are_not_worth_copies_of_the_matrices():
    (loop,) = traced_loops(loss(gates), (A, B, C), XS[:4])
    assert count(loop, "dot_general") == 4


def test_what_is_computed_from_constants_is_differentiated_once():
    def step(p, h, x):
        a, b, c = p
        return jnp.tanh(h @ jax.nn.softplus(a) * jnp.exp(-c[:1])) + x, None

    def of(which):
        return lambda p: jnp.sum(which(lambda h, x: step(p, h, x), jnp.ones((N, H)), XS)[0])

    given = (A, B, C)
    forward, reverse = traced_loops(jax.grad(of(scan)), given)
    for loop in (forward, reverse):
        assert {e.primitive.name for e in loop.eqns}.isdisjoint(("exp", "logistic", "log1p", "neg"))
    actual, wanted = (
        by_numpy(jax.grad(of(scan)))(given),
        by_numpy(jax.grad(of(jax.lax.scan)))(given),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, wanted
    )


def test_the_reverse_loop_adds_up_no_more_gradients_than_constants():
    """Not those of a and of 1 - a: this took 1.2 times the time of the loop as it is."""

    def mean(a):
        return jnp.sum(scan(lambda h, x: (a * h + (1 - a) * x, None), jnp.ones((N, H)), XS)[0])

    _, reverse = traced_loops(jax.grad(mean), jnp.float32(0.2))
    assert [v.aval.shape for v in reverse.carry] == [(), (N, H)]


def test_gradients_of_a_cast_weight_are_added_in_its_own_type():
    def of(which):
        def step(h, x, a):
            return jnp.tanh(
                (h.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16)).astype(jnp.float32) + x
            ), None

        return lambda a: jnp.sum(which(lambda h, x: step(h, x, a), jnp.ones((N, H)), XS)[0])

    _, reverse = traced_loops(jax.grad(of(scan)), A)
    assert [v.aval.dtype for v in reverse.carry] == [jnp.float32, jnp.float32]


def test_a_rule_for_the_gradient_of_a_weight_is_applied_at_each_step():
    """It may not be linear."""

    @jax.custom_vjp
    def clipped(a):
        return a * 1

    clipped.defvjp(lambda a: (a * 1, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))

    def of(which):
        return lambda a: jnp.sum(
            which(lambda h, x: (jnp.tanh(h @ clipped(a) + x), None), jnp.ones((N, H)), XS)[0]
        )

    np.testing.assert_allclose(
        by_numpy(jax.grad(of(scan)))(A), by_numpy(jax.grad(of(jax.lax.scan)))(A), rtol=1e-5
    )
