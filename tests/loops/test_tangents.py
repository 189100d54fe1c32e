"""Which arguments of a loop have tangents at some step, so that JAX differentiates the step once."""

import jax
import jax.numpy as jnp
import pytest

import jrnn
from jrnn import loops
from jrnn.jaxprs.tangents import Linearized, arguments_that_move

W = jnp.ones((2, 2))


def of_weights(w, carry, x):
    h, c = carry
    h = jnp.tanh(h @ w + x)
    return (h, c * 2 + h), None


def stopped(w, carry, x):
    h, c = carry
    h = jax.lax.stop_gradient(h @ w)
    return (h, jnp.floor(c + w[:1] + h)), None


def in_branches(w, carry, x):
    h, c = carry
    return (h, jax.lax.cond(x[0, 0] > 0, lambda: c @ w, lambda: c)), None


def in_a_loop(w, carry, x):
    h, c = carry
    return (h, jax.lax.fori_loop(0, 3, lambda _, c: c @ w, c)), None


@jax.custom_jvp
def own_rule(x):
    return x * 2


own_rule.defjvp(lambda primals, tangents: (own_rule(*primals), tangents[0] * 2))


def by_own_rule(w, carry, x):
    h, c = carry
    return (own_rule(h @ w), jnp.cumsum(h, 1)), None


STEPS = {
    of_weights: [True, True],
    stopped: [False, False],
    in_branches: [False, True],
    in_a_loop: [False, True],
    by_own_rule: [True, True],
}


@pytest.mark.parametrize("step", STEPS)
def test_carries_with_tangents_are_found(step):
    def loop(w):
        init = (jnp.zeros((1, 2)), jnp.zeros((1, 2)))
        return jax.lax.scan(lambda carry, x: step(w, carry, x), init, jnp.ones((3, 1, 2)))

    eqn = jax.make_jaxpr(loop)(W).jaxpr.eqns[-1]
    assert eqn.primitive.name == "scan"
    avals = [v.aval.shape for v in eqn.invars]
    moving = [shape == W.shape for shape in avals]
    found = arguments_that_move(eqn.params, moving)
    carries = [i for i, shape in enumerate(avals) if shape == (1, 2)]
    assert sorted(found[i] for i in carries) == sorted(STEPS[step][-len(carries) :])


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_step_is_differentiated_once(transform, monkeypatch):
    calls = []
    of = Linearized.of

    def counted(run, avals, argnums):
        calls.append(argnums)
        return of(run, avals, argnums)

    monkeypatch.setattr(Linearized, "of", counted)

    def loss(w):
        init = (jnp.zeros((1, 2)), jnp.zeros((1, 2)))
        (h, c), _ = jrnn.scan(lambda carry, x: of_weights(w, carry, x), init, jnp.ones((3, 1, 2)))
        return jnp.sum(h + c)

    with loops.unverified():
        jax.jit(transform(loss)).lower(W)
    assert len(calls) == 1
