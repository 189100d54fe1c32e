"""The parts of a loop: what its values depend on, and that the parts compute what the loop does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import jaxprs
from jrnn.loops.ir import traced_loops
from jrnn.loops.passes.split_loop import split, split_around_carry

T, N, D = 5, 3, 4
W = jnp.linspace(-1, 1, D * D).reshape(D, D)
XS = jnp.linspace(-1, 1, T * N * D).reshape(T, N, D)


def returns_new(h, x):
    """The outputs are products of the new states."""
    h = jnp.tanh(x @ W + h)
    return h, h @ W


def returns_old(h, x):
    """The outputs are products of the states before each step, which are stacked as the new ones."""
    new = jnp.tanh(x @ W + h)
    return new, (new, h @ W)


def loop_of(step, **options):
    (loop,) = traced_loops(lambda xs: jax.lax.scan(step, jnp.zeros((N, D)), xs, **options), XS)
    return loop


def test_values_are_of_three_classes():
    loop = loop_of(returns_new)
    tanh = next(e for e in loop.eqns if e.primitive.name == "tanh")
    product = next(e for e in loop.eqns if e.primitive.name == "dot_general")
    assert product.outvars[0] in loop.per_step and tanh.outvars[0] in loop.on_carry
    assert loop.varying == loop.per_step | loop.on_carry
    assert loop.varying.isdisjoint(loop.consts)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("divided", [split, split_around_carry])
@pytest.mark.parametrize("step", [returns_new, returns_old])
def test_parts_compute_what_the_loop_does(step, divided, reverse):
    loop = loop_of(step, reverse=reverse)
    parts = divided(loop)
    assert not [e for e in parts.residual.eqns if e.primitive.name == "dot_general"]
    arrays = [W] * len(loop.consts), [jnp.ones((N, D))], [XS], T
    for ours, theirs in zip(
        jax.tree.leaves(parts.run(*arrays)), jax.tree.leaves(loop.run(*arrays))
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step, is_shifted", [(returns_new, False), (returns_old, True)])
def test_states_before_each_step_are_stacked_only_where_they_are_read(step, is_shifted):
    loop = loop_of(step)
    parts = split(loop)
    assert bool(parts.shifted) == is_shifted
    jaxpr = jax.make_jaxpr(lambda *args: parts.run([W] * len(loop.consts), *args, T))
    eqns = jaxprs.all_equations(jaxpr([XS[0]], [XS]).jaxpr)
    assert ("concatenate" in {e.primitive.name for e in eqns}) == is_shifted
