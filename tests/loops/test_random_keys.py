"""Keys of random numbers that a loop carries and splits: a loop of their own computes them, with the same bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.loops.compile import canonical_form
from jrnn.loops.ir import traced_loops
from jrnn.loops.passes.canonical.random_keys import HoistedKeys
from jrnn.loops.strategies.nodes import Steps, adapted

N, H, T = 8, 32, 6
W = jnp.linspace(-0.3, 0.3, H * H).reshape(H, H)
XS = jnp.linspace(-1, 1, T * N * H).reshape(T, N, H)


def new(h, x, key):
    return jnp.tanh(h @ W + x) * jax.random.bernoulli(key, 0.7, h.shape)


def splitting(carry, x):
    key, own = jax.random.split(carry[0])
    h = new(carry[1], x, own)
    return (key, h), h


def folding(carry, x):
    key, t, h = carry
    key = jax.random.fold_in(key, t)
    return (key, t + 1, new(h, x, key)), jax.random.key_data(key)


def of_words(carry, x):
    """A key as words, of which an output and the last carry are read."""
    key, *own = jax.random.split(carry[0], 3)
    return (key, new(carry[1], x, own[1])), (key, jax.random.uniform(own[0]))


def two(carry, x):
    """One key depends on the other one."""
    (a, b), h = carry
    a, own = jax.random.split(a)
    b = jax.random.fold_in(b, jax.random.bits(own))
    return ((a, b), new(h, x, b)), h


def of_state(carry, x):
    """The key depends on the state, and stays."""
    key, h = carry
    key = jax.random.fold_in(key, jnp.argmax(h).astype(jnp.int32))
    return (key, new(h, x, key)), h


KEY = jax.random.key(3)
STARTS = {
    splitting: (KEY, XS[0]),
    folding: (KEY, jnp.int32(2), XS[0]),
    of_words: (jax.random.PRNGKey(3), XS[0]),
    two: ((KEY, jax.random.key(4)), XS[0]),
    of_state: (KEY, XS[0]),
}


def words(tree):
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(a) if is_key(a) else a) for a in jax.tree.leaves(tree)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("step", STARTS, ids=lambda step: step.__name__)
def test_keys_leave_the_carry_with_the_same_bits(step, reverse):
    run = lambda *given: jax.lax.scan(step, *given, reverse=reverse)  # noqa: E731
    (loop,) = traced_loops(run, STARTS[step], XS)
    form, adapters, _ = canonical_form(loop, hoists_keys=True)
    keys = [adapter.key_loop for adapter in adapters if isinstance(adapter, HoistedKeys)]
    if step is of_state:
        assert not keys and len(form.carry) == 2
        return
    assert [v.aval.shape for v in form.carry] == [(N, H)]
    assert len(keys[0].carry) == (2 if step is two else 1)
    given = [W, *jax.tree.leaves(STARTS[step])]
    assert [v.aval.shape for v in loop.consts] == [W.shape]
    node = adapted(Steps(form.verify()), adapters)
    ours, theirs = (
        jax.jit(lambda *a, run=run: run(*a, T))(given[:1], given[1:], [XS])
        for run in (node.run, loop.run)
    )
    for a, b in zip(words(ours), words(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("step", STARTS, ids=lambda step: step.__name__)
def test_the_scan_has_the_values_and_gradients_of_lax_scan(step):
    def run(scan, w, xs):
        def with_weights(carry, x):
            carry, out = step(carry, x @ w)
            return carry, out

        last, ys = scan(with_weights, STARTS[step], xs)
        return jnp.sum(jnp.sin(last[-1])), (last, ys)

    ours, theirs = (
        jax.jit(
            jax.value_and_grad(lambda w, xs, scan=scan: run(scan, w, xs), (0, 1), has_aux=True)
        )(W, XS)
        for scan in (jrnn.scan, jax.lax.scan)
    )
    for a, b in zip(words(ours), words(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
