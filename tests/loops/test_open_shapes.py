"""Scans that `jax.export` takes with dimensions left open: how many steps there are, and how many sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jrnn.errors import ScanError
from jrnn.loops import scan

W, U = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), 0.5 * jnp.eye(4)


def recurrent(x, **options):
    def step(state, x):
        h, total = state
        h = jnp.tanh(x @ W + h @ U)
        return (h, total + 2.0), h

    (_, total), hs = scan(step, (jnp.zeros((x.shape[1], 4)), jnp.zeros(x.shape[1])), x, **options)
    return total, hs


def gradient(x):
    def loss(x):
        total, hs = recurrent(x, lengths=jnp.arange(x.shape[1]) + 1)
        return jnp.sum(hs**2) + jnp.sum(total)

    return jax.grad(loss)(x)


def affine(x):
    return scan(lambda h, x: (h * jax.nn.sigmoid(x) + x,) * 2, jnp.zeros(x.shape[1:]), x)[1]


@pytest.mark.sample("affine")
@pytest.mark.parametrize("fn", [recurrent, gradient, affine])
def test_what_is_exported_computes_the_same(fn):
    given = jax.ShapeDtypeStruct(export.symbolic_shape("t, n, 3"), jnp.float32)
    exported = export.export(jax.jit(fn))(given)
    for shape in ((5, 2, 3), (4, 3, 3)):
        x = np.random.RandomState(0).randn(*shape).astype(np.float32)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            exported.call(x),
            fn(x),
        )


def test_a_step_that_does_not_read_its_inputs():
    given = jax.ShapeDtypeStruct(export.symbolic_shape("t, 2"), jnp.float32)
    exported = export.export(
        jax.jit(lambda x: scan(lambda h, x: (jnp.tanh(h * 2), None), jnp.ones(3), x)[0])
    )(given)
    expected = jnp.tanh(2 * jnp.tanh(2 * jnp.ones(3)))
    np.testing.assert_allclose(exported.call(jnp.zeros((2, 2))), expected, rtol=1e-6)


def test_checkpoints_need_to_know_the_steps():
    given = jax.ShapeDtypeStruct(export.symbolic_shape("t, 2, 3"), jnp.float32)
    with pytest.raises(
        ScanError, match="recompute='sqrt' divides the steps, but their number .t. is symbolic"
    ):
        export.export(jax.jit(lambda x: recurrent(x, recompute="sqrt")))(given)
